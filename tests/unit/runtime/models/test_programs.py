"""Blocks as one compiled program, against the same blocks one operation after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapter_files import SMALL, make_adapter
from quire.config.adapter_memory import adapter_memory
from quire.config.model import Heads
from quire.kernels.clamp import Clamp
from quire.kernels.native.loader import why_not_native
from quire.kernels.native.program import Symbol
from quire.kernels.native.program_run import Program
from quire.runtime.layers.adapted import NativeAdapters
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.native import NativeOps
from quire.runtime.layers.ops import TorchOps
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Value
from quire.runtime.models.decoder import Decoder
from quire.runtime.quantization.levels import LevelWeight
from quire.types.step import Chunk
from tiny_models import DEVICE, Bench, MemoryCheckpoint, checkpoint_of, engine_config, tiny_config, transformers_model

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None or DEVICE != "cpu", reason=str(REFUSAL or "runs on a CPU"))
SIZES = {"hidden_size": 64, "intermediate_size": 96, "heads": Heads(num_query=4, num_kv=2, dim=16)}


class LevelCheckpoint:
    """A checkpoint in memory whose matrices are stored as levels."""

    def __init__(self, plain: MemoryCheckpoint) -> None:
        self._plain = plain
        self.file, self.config, self.names = plain.file, plain.config, plain.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._plain.shape(name)

    def source(self, name: str) -> str:
        return self._plain.source(name)

    def read(self, name: str, own: object = None) -> Tensor:
        levels = self.read_quantized(name)
        return self._plain.read(name) if levels is None else levels.values()

    def read_quantized(self, name: str, region: Any = None) -> LevelWeight | None:
        weight = self._plain.read(name).float()
        if weight.dim() != 2:
            return None
        groups = weight.view(weight.shape[0], -1, 32)
        scales = (groups.abs().amax(dim=-1) / 127).clamp(min=1e-6).half()
        levels = (groups / scales.float().unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8).view(weight.shape)
        return LevelWeight(levels, scales, torch.zeros_like(scales), nibbles=False)

    def close(self) -> None:
        """Nothing is held."""


def answers(architecture: str, *, levels: bool, **config: object) -> list[object]:
    """One row, a few rows, and a chunk."""
    model = tiny_config(architecture, **{**SIZES, **config})  # type: ignore[arg-type]
    checkpoint = checkpoint_of(transformers_model(model), model)
    one = Bench(LevelCheckpoint(checkpoint) if levels else checkpoint, engine_config())  # type: ignore[arg-type]
    one.add(0, [5, 9, 2, 11, 7, 3, 8, 1, 30, 12])
    one.add(1, [4, 4, 17])
    found = [one.run(chunks=[Chunk(0, 0, 4)]), one.run(chunks=[Chunk(0, 4, 6, (0,))])]
    found.append(one.run(decode=[0], chunks=[Chunk(1, 0, 3, (1,))]))
    found += [one.run(decode=[0, 1]) for _ in range(12)]
    model_run = one.worker._runner._model
    assert isinstance(model_run, Decoder)
    programs: dict[int, Program] = model_run.model.layers._programs
    return [*found, [program.num_calls for program in programs.values()]]


@pytest.mark.parametrize("levels", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_program_samples_what_its_blocks_sample(
    architecture: str, levels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    *program, calls = answers(architecture, levels=levels)
    assert calls == [0]  # one program, nothing of it in Python
    monkeypatch.setattr(Blocks, "_run_program", Blocks._run_layers)
    monkeypatch.delattr(Program, "run")
    assert answers(architecture, levels=levels)[:-1] == program


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gates_of_all_activations_are_compiled(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *program, calls = answers("llama", levels=False, activation=activation)
    assert calls == [0]
    monkeypatch.setattr(Blocks, "_run_program", Blocks._run_layers)
    assert answers("llama", levels=False, activation=activation)[:-1] == program


def test_an_operation_without_a_compiled_form_is_called_between_compiled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def gate(ops: NativeOps, x: Value, activation: str, clamp: Clamp | None = None) -> Value:
        if isinstance(x, Symbol):
            return x.writer.call(lambda each, _: gate(ops, each, activation, clamp), (x,), x.width // 2)
        return TorchOps().gate(x, activation, clamp)

    monkeypatch.setattr(NativeOps, "gate", gate)
    *program, calls = answers("llama", levels=False)
    assert calls == [3]  # the gate of each layer
    monkeypatch.setattr(Blocks, "_run_program", Blocks._run_layers)
    assert answers("llama", levels=False)[:-1] == program


def test_no_program_is_written_where_torch_attends() -> None:
    config = tiny_config("llama", **SIZES)
    for dtype, num_programs in (("float32", 1), ("float16", 0)):
        one = Bench(checkpoint_of(transformers_model(config), config), engine_config(dtype=dtype))
        one.add(0, [5, 9, 2])
        one.run(chunks=[Chunk(0, 0, 3, (0,))])
        model = one.worker._runner._model
        assert isinstance(model, Decoder)
        assert len(model.model.layers._programs) == num_programs


def adapted_answers(folder: Path, dtype: str) -> tuple[Bench, list[object]]:
    """Steps with rows of two adapters, with some rows of none, and with only such rows."""
    config = tiny_config("llama", **SIZES)
    reference = transformers_model(config)
    one = Bench(checkpoint_of(reference, config), engine_config(adapters=SMALL, dtype=dtype))
    for slot, rank in ((0, 4), (2, 16)):
        one.put_adapter(slot, make_adapter(folder / str(slot), reference, seed=slot, rank=rank))
    for row, (tokens, slot) in enumerate((([5, 9, 2, 11, 7, 3, 8, 1], 2), ([4, 4, 17], -1), ([6, 1], 0), ([9], 2))):
        one.add(row, tokens, adapter=slot)
    found = [one.run(chunks=[Chunk(0, 0, 4)])]
    found.append(
        one.run(chunks=[Chunk(0, 4, 4, (0,)), Chunk(1, 0, 3, (1,)), Chunk(2, 0, 2, (2,)), Chunk(3, 0, 1, (3,))])
    )
    found += [one.run(decode=rows) for rows in ([0, 1, 2, 3], [1], [2, 3, 0], [3, 1])]
    return one, found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_program_with_adapters_has_nothing_in_python_and_samples_what_its_blocks_sample(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, program = adapted_answers(tmp_path, dtype)
    model = one.worker._runner._model
    assert isinstance(model, Decoder)
    (written,) = model.model.layers._programs.values()
    assert written.num_slots == SMALL.slots
    if dtype == "float32":  # products of bfloat16 are compiled for tile units only
        assert written.num_calls == 0
    adapters = [layer.adapters for layer in model.adapted_layers().values() if isinstance(layer, Linear)]
    adapters = [*(each for each in adapters if each is not None), model.head_adapters]
    held = sum(each.num_bytes for each in adapters if isinstance(each, NativeAdapters))
    planned = adapter_memory(tiny_config("llama", **SIZES), SMALL, getattr(torch, dtype).itemsize, max_tokens=0)
    assert 0 < held <= planned

    def run_layers(blocks: Blocks, x: Tensor, step: ForwardStep) -> Value:
        assert blocks.adapters is not None
        blocks.adapters.begin(step.adapters)
        return blocks._run_layers(x, step)

    monkeypatch.setattr(Blocks, "_run_program", run_layers)
    monkeypatch.delattr(Program, "run")
    other, blocks = adapted_answers(tmp_path, dtype)
    assert blocks == program
    for row, seen in one.sampler.seen.items():
        assert torch.equal(torch.stack(other.sampler.seen[row]), torch.stack(seen))
