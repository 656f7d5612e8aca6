"""A step of one row as a program: its phases, traced from the layers, give what the layers give."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton_cases  # noqa: F401  float8 as hardware rounds it
from family_models import CASES, COMMON, write_line_break
from promises import tolerance
from quire.config.model import Heads, ModelConfig, Rope
from quire.kernels.cuda.row_phases import AttentionPhase, GemvPhase, ScaledRowsWeight
from quire.kernels.triton.gemm_w4 import PackedW4
from quire.runtime.layers import row_programs
from quire.runtime.layers.adapted import ActiveAdapters
from quire.runtime.layers.row_programs import CudaRowKernel
from quire.runtime.layers.row_writer import RowWriter, Untraceable
from quire.runtime.loading.hf.config import hf_model_config
from row_bench import NoKernel, ReferenceKernel, RowBench
from tiny_models import DEVICE, tiny_config

ONE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 1, "heads": Heads(4, 2, 16)}
SIZES: dict[str, Any] = {**ONE, "num_layers": 2}
NEAR = tolerance(cpu=1e-5, gpu=1e-3)
MODELS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "llama": (tiny_config("llama", **SIZES), {}),
    "qwen2": (tiny_config("qwen2", o_bias=True, mlp_bias=True, activation="gelu_tanh", **ONE), {}),
    "qwen3": (tiny_config("qwen3", **SIZES), {}),
    "mistral": (tiny_config("mistral", windows=(7,), **ONE), {}),
    "qwen3 with a window": (tiny_config("qwen3", windows=(7, None), **SIZES), {"block_size": 16}),
    "smollm3": (tiny_config("smollm3", layers_without_rope=(0,), attention_softcap=2.0, **ONE), {}),
    "fp8": (tiny_config("llama", **ONE), {"quantization": "fp8"}),
    "int8": (tiny_config("llama", **ONE), {"quantization": "int8"}),
    "int4": (tiny_config("qwen2", **ONE), {"quantization": "int4"}),
    "float8 cache": (tiny_config("llama", **ONE), {"kv_dtype": "float8"}),
}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4}  # its names of what all have
TRACED = {  # of all families
    "cwm", "ernie4_5", "gemma", "glm", "helium", "idefics3", "internlm2", "internvl", "llama", "llava", "llava_next",
    "llava_onevision", "mimo", "ministral", "mistral", "mistral3", "phi3", "qwen2", "qwen2_5_vl", "qwen2_vl", "qwen3",
    "qwen3_vl", "seed_oss", "smollm3", "smolvlm", "vaultgemma",
}  # fmt: skip


def bench_of(name: str) -> RowBench:
    config, settings = MODELS[name]
    return RowBench(config, **settings)


@pytest.mark.parametrize("name", MODELS)
def test_a_program_gives_what_the_layers_give(name: str) -> None:
    bench, near = bench_of(name), 1e-3 if name == "float8 cache" else NEAR
    for row, position in ((1, 9), (0, 0))[: 2 if name == "qwen3" else 1]:
        step, kernel = bench.step(row, position), ReferenceKernel()
        wanted, _ = bench.run(NoKernel(), step)
        held = [side.clone() for side in bench.values()]
        found, _ = bench.run(kernel, step)
        assert len(kernel.made) == 1
        torch.testing.assert_close(found, wanted, rtol=near, atol=near)
        for side, expected in zip(bench.values(), held, strict=True):
            torch.testing.assert_close(side, expected, rtol=10 * NEAR, atol=NEAR)


def test_a_token_writes_its_own_slot_of_each_layer_and_no_other() -> None:
    bench = bench_of("qwen3 with a window")
    _, before = bench.run(ReferenceKernel(), bench.step(-1, 9))
    bench.go_on(bench.step(1, 9))
    changed = (bench.cache.blocks != before).flatten(2).sum(dim=2)  # [planes and sides, blocks]
    found = {tuple(place): int(changed[*place]) for place in changed.nonzero().tolist()}
    blocks = [int(table[1, 0]) for table in bench.tables]  # of 16 tokens each
    assert found == {(side, block): bench.config.heads.kv_size for side in range(2) for block in blocks}


def test_padding_changes_nothing() -> None:
    bench = bench_of("llama")
    kernel = ReferenceKernel()
    hidden, held = bench.run(kernel, bench.step(-1, 9))
    assert len(kernel.made) == 1
    same, untouched = bench.go_on(bench.step(-1, 3))
    torch.testing.assert_close(hidden, same, rtol=0, atol=0)
    assert torch.equal(held, untouched)


def test_layers_share_the_vectors_between_phases() -> None:
    kernel, bench = ReferenceKernel(), bench_of("qwen3")
    bench.run(kernel, bench.step(1, 9))
    phases = kernel.made[0].phases
    kinds = [type(phase) for phase in phases]
    assert kinds == [GemvPhase, AttentionPhase, GemvPhase, GemvPhase, GemvPhase] * 2
    for first, second in zip(phases[:5], phases[5:], strict=True):
        assert first.source is second.source
        assert first.target is second.target
    qkv, attention, out, gate_up, down = phases[:5]
    assert isinstance(gate_up, GemvPhase)
    assert isinstance(down, GemvPhase)
    assert qkv.target is attention.source
    assert attention.target is out.source
    assert gate_up.target is down.source
    assert (gate_up.activation, down.adds) == ("silu", True)
    vectors = [qkv.target, attention.target, gate_up.target]
    assert len({vector.data_ptr() for vector in vectors if vector is not None}) == 3


@pytest.mark.parametrize(("name", "kind"), [("fp8", ScaledRowsWeight), ("int8", ScaledRowsWeight), ("int4", PackedW4)])
def test_quantized_weights_stay_as_they_are(name: str, kind: type) -> None:
    kernel, bench = ReferenceKernel(), bench_of(name)
    bench.run(kernel, bench.step(1, 9))
    products = [phase for phase in kernel.made[0].phases if isinstance(phase, GemvPhase)]
    assert all(isinstance(phase.weight, kind) for phase in products)


def test_programs_are_traced_once_for_each_number_of_layers() -> None:
    kernel, bench = ReferenceKernel(), bench_of("llama")
    bench.blocks.run_rows_by(kernel)
    bench.model.reserve(64)
    bench.model.trace_row(bench.cache.layers)
    for position in (3, 9):
        bench.go_on(bench.step(1, position))
        bench.go_on(bench.step(1, position, num_layers=2))  # all of them
    assert [len(program.phases) for program in kernel.made] == [10]
    few, _ = bench.go_on(bench.step(1, 9, num_layers=1))
    assert [len(program.phases) for program in kernel.made] == [10, 5]
    torch.testing.assert_close(few, bench.run(NoKernel(), bench.step(1, 9, num_layers=1))[0], rtol=NEAR, atol=NEAR)


def test_a_longer_table_of_angles_is_traced_again() -> None:
    kernel, bench = ReferenceKernel(), bench_of("llama")
    bench.run(kernel, bench.step(1, 9))
    bench.go_on(bench.step(1, 9, max_length=5_000))  # longer than the table is at first
    bench.go_on(bench.step(1, 9))
    first, second = (program.phases[1] for program in kernel.made)
    assert isinstance(first, AttentionPhase)
    assert isinstance(second, AttentionPhase)
    assert first.angles is not None
    assert second.angles is not None
    assert len(first.angles) < 5_000 <= len(second.angles)


@pytest.mark.parametrize("what", ["wanted", "states", "axes", "adapters"])
def test_steps_that_are_told_more_run_layer_by_layer(what: str) -> None:
    kernel, bench = ReferenceKernel(), bench_of("llama")
    told: dict[str, Any] = {"wanted": torch.zeros(1, dtype=torch.int64, device=DEVICE)}
    bench.run(kernel, bench.step(1, 9, **{what: told.get(what, object())}))
    assert not kernel.made


def test_phases_that_the_kernel_does_not_have_run_layer_by_layer() -> None:
    bench, kernel = bench_of("llama"), ReferenceKernel(refuses=AttentionPhase)
    step = bench.step(1, 9)
    wanted, _ = bench.run(NoKernel(), step)
    torch.testing.assert_close(bench.run(kernel, step)[0], wanted, rtol=0, atol=0)
    assert not kernel.made


def test_phases_that_run_faster_one_by_one_run_layer_by_layer(caplog: pytest.LogCaptureFixture) -> None:
    bench, kernel = bench_of("llama"), ReferenceKernel(why_not_faster="they are slow together")
    with caplog.at_level("INFO"):
        bench.run(kernel, bench.step(1, 9))
    assert "layer by layer: they are slow together" in caplog.text


def test_a_row_that_is_too_long_runs_layer_by_layer() -> None:
    bench, kernel = bench_of("llama"), ReferenceKernel(longest=77)
    bench.blocks.run_rows_by(kernel)
    bench.model.reserve(64)
    assert bench.model.trace_row(bench.cache.layers) == 77
    bench.go_on(bench.step(1, 9, is_long_row=True))
    assert kernel.made[0].num_runs == 0
    bench.go_on(bench.step(1, 9))
    assert kernel.made[0].num_runs == 1


def test_a_step_without_adapters_has_a_program_in_a_model_with_adapters() -> None:
    bench, kernel = bench_of("llama"), ReferenceKernel()
    bench.blocks.adapters = ActiveAdapters()
    bench.run(kernel, bench.step(1, 9))
    assert len(kernel.made) == 1
    assert not bench.blocks.adapters.is_on


def test_positions_that_change_with_the_length_run_layer_by_layer() -> None:
    rope = Rope(kind="dynamic", scaling=(("factor", 2.0),), max_position=8)
    bench, kernel = RowBench(tiny_config("llama", rope=rope, **SIZES)), ReferenceKernel()
    bench.blocks.run_rows_by(kernel)
    bench.model.trace_row(bench.cache.layers)
    assert not kernel.made


@pytest.mark.parametrize("family", CASES)
def test_every_family_is_traced_or_runs_layer_by_layer(family: str, tmp_path: Path) -> None:
    settings = {key: value for key, value in (COMMON | CASES[family]).items() if value is not ...}
    settings |= {"model_type": family.partition("-")[0], **GPT2}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    if family == "cohere2_vision":
        write_line_break(tmp_path)
    kernel, bench = ReferenceKernel(), RowBench(hf_model_config(tmp_path))
    bench.blocks.run_rows_by(kernel)
    bench.model.trace_row(bench.cache.layers)
    assert len(kernel.made) == (family in TRACED)


def test_a_vector_is_read_once() -> None:
    writer = RowWriter(8, torch.float32, torch.device("cpu"))
    symbol = writer._new("gemv", 16)
    writer._read(symbol)
    with pytest.raises(Untraceable, match="read twice"):
        writer._read(symbol)


def test_the_stream_is_not_changed_while_something_computed_of_it_waits() -> None:
    writer = RowWriter(8, torch.float32, torch.device("cpu"))
    square: Any = SimpleNamespace(row_weight=torch.zeros(8, 8), bias=None)
    first = writer.multiply(writer.stream, square)
    writer.add_gemv(writer.stream, first, square)
    first, second = writer.multiply(writer.stream, square), writer.multiply(writer.stream, square)
    assert first.vector is not second.vector
    with pytest.raises(Untraceable, match="the stream is changed while a vector"):
        writer.add_gemv(writer.stream, first, square)


def test_a_symbol_refuses_what_is_no_phase() -> None:
    x: Any = RowWriter(8, torch.float32, torch.device("cpu")).stream
    for refused in (
        lambda: x.shape, lambda: len(x), lambda: x[0], lambda: x * 2.0, lambda: 2.0 * x, lambda: torch.ones(8) + x,
        lambda: torch.cat([x, x]), lambda: torch.nn.functional.silu(x), lambda: torch.ones(8).copy_(x),
    ):  # fmt: skip
        with pytest.raises(Untraceable):
            refused()


def test_the_kernel_says_why_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CudaRowKernel().why_not(torch.device("cpu")) == "it is for GPUs"
    monkeypatch.setenv("QUIRE_ROW_PROGRAM", "0")
    assert CudaRowKernel().why_not(torch.device("cuda", 7)) == "QUIRE_ROW_PROGRAM is 0"
    row_programs._why_not.cache_clear()  # another test may have that device
