"""The layers in one compiled call, against the same layers one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.native.loader import why_not_native
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

    def read(self, name: str) -> Tensor:
        levels = self.read_levels(name)
        return self._plain.read(name) if levels is None else levels.values()

    def read_levels(self, name: str) -> LevelWeight | None:
        weight = self._plain.read(name).float()
        if weight.dim() != 2:
            return None
        groups = weight.view(weight.shape[0], -1, 32)
        scales = (groups.abs().amax(dim=-1) / 127).clamp(min=1e-6).half()
        levels = (groups / scales.float().unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8).view(weight.shape)
        return LevelWeight(levels, scales, torch.zeros_like(scales), nibbles=False)

    def close(self) -> None:
        """Nothing is held."""


def bench(architecture: str, *, fused: bool) -> Bench:
    config = tiny_config(architecture, **SIZES)
    checkpoint = LevelCheckpoint(checkpoint_of(transformers_model(config), config))
    made = Bench(checkpoint, engine_config())  # type: ignore[arg-type]
    model = made.worker._runner._model
    assert isinstance(model, Decoder)
    if fused:
        model.fuse()
        assert model.model.fused is not None
    return made


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_fused_layers_sample_what_plain_layers_sample(architecture: str) -> None:
    """One row, a few rows, and a chunk; on some CPUs the chunk is too long for the compiled call."""
    answers = []
    for fused in (False, True):
        one = bench(architecture, fused=fused)
        one.add(0, [5, 9, 2, 11, 7, 3, 8, 1, 30, 12])
        one.add(1, [4, 4, 17])
        found = [one.run(chunks=[Chunk(0, 0, 10, (0,))]), one.run(decode=[0], chunks=[Chunk(1, 0, 3, (1,))])]
        found += [one.run(decode=[0, 1]) for _ in range(12)]
        answers.append(found)
    assert answers[0] == answers[1]


def test_layers_held_as_numbers_are_fused_in_float32_and_not_where_torch_multiplies() -> None:
    config = tiny_config("llama", **SIZES)
    for dtype, is_fused in (("float32", True), ("float16", False)):
        plain = Bench(checkpoint_of(transformers_model(config), config), engine_config(dtype=dtype))
        model = plain.worker._runner._model
        assert isinstance(model, Decoder)
        model.fuse()
        assert (model.model.fused is not None) == is_fused
