"""The kernel that runs all layers of a step of one row, phase by phase and as a whole, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch

from quire.config.model import Heads
from quire.kernels.cuda import row_program, row_records
from quire.kernels.cuda.row_phases import GemvPhase, Phase
from quire.kernels.cuda.row_program import RowProgram, takes_phase, why_not_row_program
from quire.kernels.triton.gemm_w4 import pack_w4
from quire.runtime.layers.row_programs import CudaRowKernel, RowRun
from row_bench import NoKernel, RowBench
from row_cases import BF16, FLOAT8, AttentionCase, check_program, product_of
from tiny_models import tiny_config
from triton_cases import DEVICE, ON_GPU, rand

WHY_NOT = why_not_row_program(DEVICE) if ON_GPU else "there is no GPU"
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"the kernel does not run here: {WHY_NOT}")

KINDS = ["bf16", "fp8", "int8", "nibbles 32", "nibbles 64", "nibbles 128", "offsets 32", "offsets 128"]
SIZES = [(48, 64), (100, 576), (1000, 1536), (576, 1536), (4096, 14336), (1, 4096), (6144, 4096)]


def made(kind: str, outputs: int, inputs: int, **more: Any) -> GemvPhase:
    """A product, where the groups of its weight divide the inputs; else the test is skipped."""
    group = kind.partition(" ")[2]
    if group and inputs % int(group):
        pytest.skip("its groups do not divide the inputs")
    return product_of(kind, outputs, inputs, **more)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_a_vector(kind: str, outputs: int, inputs: int) -> None:
    check_program(RowProgram, [made(kind, outputs, inputs)], rand(1, 64, dtype=BF16))


@pytest.mark.parametrize(("outputs", "inputs"), [(100, 576), (1536, 1536), (6144, 4096)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_the_norm_of_the_stream(kind: str, outputs: int, inputs: int, bias: bool) -> None:
    phase = made(kind, outputs, inputs, norm=True, bias=bias, of_stream=True)
    check_program(RowProgram, [phase], rand(1, inputs, dtype=BF16, seed=3, scale=2.0))


@pytest.mark.parametrize(("outputs", "inputs"), [(112, 576), (1536, 576), (14336, 4096)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gated_products(kind: str, outputs: int, inputs: int, activation: str, bias: bool) -> None:
    phase = made(kind, outputs, inputs, norm=True, bias=bias, activation=activation, of_stream=True)
    check_program(RowProgram, [phase], rand(1, inputs, dtype=BF16, seed=3))


@pytest.mark.parametrize(("outputs", "inputs"), [(576, 1536), (1000, 64), (4096, 14336)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_products_that_are_added_to_the_stream(kind: str, outputs: int, inputs: int, bias: bool) -> None:
    phase = made(kind, outputs, inputs, bias=bias, to_stream=True, adds=True)
    check_program(RowProgram, [phase], rand(1, outputs, dtype=BF16, seed=3))


def test_norms_may_have_float32_weights() -> None:
    phase = product_of("bf16", 100, 576, norm=True, of_stream=True)
    assert phase.norm is not None
    wide = GemvPhase(phase.weight, None, phase.target, norm=phase.norm._replace(weight=phase.norm.weight.float()))
    assert takes_phase(wide)
    check_program(RowProgram, [wide], rand(1, 576, dtype=BF16, seed=3))


CONTEXTS = [1, 15, 16, 17, 700, 5000]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention_over_contexts_of_every_length(dim: int, block: int, context: int) -> None:
    check_attention(AttentionCase(dim=dim, block=block), context)


@pytest.mark.parametrize("context", [1, 17, 700])
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("num_kv", [1, 2, 8])
def test_attention_of_every_group_of_query_heads(num_kv: int, group: int, context: int) -> None:
    check_attention(AttentionCase(num_query=num_kv * group, num_kv=num_kv), context)


FEATURES: dict[str, AttentionCase] = {
    "head norms": AttentionCase(norms=True),
    "half of a head is rotated": AttentionCase(rotated=64),
    "nothing is rotated": AttentionCase(rotated=0),
    "a window": AttentionCase(window=100),
    "a window of one token": AttentionCase(window=1),
    "a window of another table": AttentionCase(window=513, table=1),
    "sinks": AttentionCase(sinks=True, dim=64),
    "sinks and a window": AttentionCase(sinks=True, window=128, dim=64, num_query=16, num_kv=2),
    "blocks of one token": AttentionCase(block=1),
    "float8": AttentionCase(cache=FLOAT8),
    "float8, small heads": AttentionCase(cache=FLOAT8, dim=64, norms=True),
    "float8, large heads": AttentionCase(cache=FLOAT8, dim=256, window=300),
    "int8": AttentionCase(cache=torch.int8),
}


@pytest.mark.parametrize("context", [1, 16, 129, 1500])
@pytest.mark.parametrize("feature", FEATURES)
def test_attention_with(feature: str, context: int) -> None:
    check_attention(FEATURES[feature], context)


def check_attention(case: AttentionCase, context: int) -> None:
    phase, tables = case.make(context)
    assert takes_phase(phase)
    places = [(1, context - 1), (2, context // 2), (-1, context - 1)]
    check_program(RowProgram, [phase], rand(1, 64, dtype=BF16), tables, places)


def test_a_token_past_the_end_of_its_table_is_stored_nowhere() -> None:
    phase, tables = AttentionCase().make(48)
    assert phase.angles is not None
    held = phase.key_cache.clone()
    positions, rows = torch.tensor([47], device=DEVICE), torch.tensor([0], dtype=torch.int32, device=DEVICE)
    program = RowProgram([phase], DEVICE)
    program.run(rand(1, 64, dtype=BF16), positions, rows, [tables[0][:, :2]])  # of 32 tokens
    torch.cuda.synchronize()
    assert torch.equal(phase.key_cache, held)


def layer_of(kind: str, hidden: int, case: AttentionCase, seed: int) -> tuple[list[Any], list[torch.Tensor]]:
    attention, tables = case.make(300, seed)
    size = len(attention.source)
    qkv = product_of(kind, size, hidden, norm=True, bias=True, of_stream=True, seed=seed)
    out = product_of(kind, hidden, len(attention.target), to_stream=True, adds=True, seed=seed + 1)
    gate_up = product_of(kind, 3 * hidden, hidden, norm=True, activation="silu", of_stream=True, seed=seed + 2)
    down = product_of(kind, hidden, 3 * hidden, to_stream=True, adds=True, seed=seed + 3)
    first = GemvPhase(qkv.weight, None, attention.source, qkv.bias, qkv.norm)
    second = GemvPhase(out.weight, attention.target, None, adds=True)
    last = GemvPhase(down.weight, gate_up.target, None, adds=True)
    return [first, attention, second, gate_up, last], tables


@pytest.mark.parametrize("kind", ["bf16", "fp8", "nibbles 32"])
def test_phases_wait_for_those_before_them_and_a_program_runs_again(kind: str) -> None:
    phases, tables = layer_of(kind, 256, AttentionCase(num_query=4, num_kv=2, dim=64), 0)
    more, _ = layer_of(kind, 256, AttentionCase(num_query=4, num_kv=2, dim=64), 50)
    places = [(1, 0), (1, 1), (0, 299), (-1, 3), (0, 299), (2, 16)]
    check_program(RowProgram, [*phases, *more], rand(1, 256, dtype=BF16), tables, places)


@pytest.mark.parametrize("most_slots", [2, 16])
@pytest.mark.parametrize("kind", ["bf16", "nibbles 128", "offsets 64", "offsets 32"])
def test_teams_of_every_size_in_one_launch(kind: str, most_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = cycle((3, 1, 2))
    monkeypatch.setattr(row_records, "_team_shift", lambda *_: next(sizes))
    monkeypatch.setattr(row_records, "_MOST_SLOTS", most_slots)
    monkeypatch.setattr(row_program, "num_processors", lambda _: 3)  # many tiles for each
    phases, tables = layer_of(kind, 256, AttentionCase(num_query=4, num_kv=2, dim=64), 0)
    more, _ = layer_of(kind, 256, AttentionCase(num_query=4, num_kv=2, dim=64), 50)
    check_program(RowProgram, [*phases, *more], rand(1, 256, dtype=BF16), tables, [(1, 5), (0, 299), (-1, 3), (2, 16)])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_makes_no_numbers(kind: str, number: float) -> None:
    phase = product_of(kind, 96, 1024)
    program = RowProgram([phase], DEVICE)
    assert phase.source is not None
    assert phase.target is not None
    phase.source[300] = number
    at, row = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    program.run(rand(1, 64, dtype=BF16), at, row, [row.view(1, 1)] * 4)
    assert not bool(phase.target.isfinite().any())


@pytest.mark.parametrize("group", [256, 512])
def test_large_groups_of_4_bit_weights_of_many_inputs(group: int) -> None:
    levels = torch.randint(0, 16, (96, 7168), dtype=torch.uint8, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    scales, offsets = (rand(96, 7168 // group, dtype=BF16, seed=seed, scale=0.02) for seed in (5, 6))
    target = torch.zeros(96, dtype=BF16, device=DEVICE)
    phase = GemvPhase(pack_w4(levels, scales, offsets), rand(7168, dtype=BF16), target)
    check_program(RowProgram, [phase], rand(1, 64, dtype=BF16))


def test_a_program_can_be_captured() -> None:
    phases, tables = layer_of("bf16", 256, AttentionCase(num_query=4, num_kv=2, dim=64), 0)
    program, stream = RowProgram(phases, DEVICE), rand(1, 256, dtype=BF16)
    given, rows = torch.tensor([3], device=DEVICE), torch.tensor([1], dtype=torch.int32, device=DEVICE)
    first = stream.clone()
    program.run(stream, given, rows, tables)
    wanted = stream.clone()
    stream.copy_(first)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        program.run(stream, given, rows, tables)
    for position in (3, 200, 3):
        given.fill_(position)
        stream.copy_(first)
        graph.replay()
    torch.testing.assert_close(stream, wanted, rtol=0, atol=0)


class CountingKernel(CudaRowKernel):
    """Makes programs whether they are asked for, or faster, or not, and counts those that it has made."""

    num_made = 0

    def why_not(self, device: torch.device) -> str | None:
        return why_not_row_program(device)

    def make(self, phases: Sequence[Phase], device: torch.device) -> RowRun:
        made = RowProgram(phases, device)
        self.num_made += 1
        return made


@pytest.mark.parametrize(
    ("architecture", "windows", "settings"),
    [
        ("llama", (), {}),
        ("qwen2", (), {}),
        ("qwen3", (), {}),
        ("mistral", (20, 20, 20), {}),
        ("qwen3", (20, None, 20), {}),
        ("llama", (), {"quantization": "fp8"}),
        ("llama", (), {"quantization": "int8"}),
        ("llama", (), {"quantization": "int4"}),
        ("qwen3", (), {"kv_dtype": "float8"}),
    ],
)
def test_a_tiny_model_says_what_its_layers_say(
    architecture: str, windows: tuple[int | None, ...], settings: dict[str, Any]
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 640, "heads": Heads(4, 2, 64)}
    config = tiny_config(architecture, windows=windows, num_layers=3, **sizes)
    bench = RowBench(config, block_size=16, dtype="bfloat16", **settings)
    for row, position in ((1, 100), (0, 0), (2, 127)):
        step = bench.step(row, position)
        wanted, _ = bench.run(NoKernel(), step)
        held = [side.clone() for side in bench.values()]
        kernel = CountingKernel()
        found, _ = bench.run(kernel, step)
        assert kernel.num_made == 1
        torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)
        for side, expected in zip(bench.values(), held, strict=True):
            torch.testing.assert_close(side, expected, rtol=0.13, atol=3e-2)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_gated_products_by_other_activations(activation: str) -> None:
    phase = product_of("bf16", 128, 256, norm=True, activation=activation, of_stream=True)
    check_program(RowProgram, [phase], rand(1, 256, dtype=BF16, seed=3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 512])
def test_groups_of_4_bit_weights_and_their_factors(group: int, dtype: torch.dtype) -> None:
    levels = torch.randint(0, 16, (96, 1024), dtype=torch.uint8, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    scales, offsets = (rand(96, 1024 // group, dtype=dtype, seed=seed, scale=0.02) for seed in (5, 6))
    phase = GemvPhase(
        pack_w4(levels, scales, offsets), rand(1024, dtype=BF16), torch.zeros(96, dtype=BF16, device=DEVICE)
    )
    assert takes_phase(phase)
    check_program(RowProgram, [phase], rand(1, 64, dtype=BF16))


def test_marks_begin_again() -> None:
    phases, tables = layer_of("bf16", 256, AttentionCase(num_query=4, num_kv=2, dim=64), 0)

    def late(given: Sequence[Phase], device: torch.device) -> RowProgram:
        program = RowProgram(given, device)
        program._counters[1] = 65_530
        return program

    check_program(late, phases, rand(1, 256, dtype=BF16), tables, [(1, 5), (0, 6), (2, 7), (1, 8)])
