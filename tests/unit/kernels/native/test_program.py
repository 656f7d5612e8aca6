"""Programs of compiled operations: every kind, the memory they share, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.native import ops
from quire.kernels.native.loader import why_not_native
from quire.kernels.native.ops import BYTES, HALVES, NIBBLES, PLAIN, PackedWeight
from quire.kernels.native.panels import cut_panels
from quire.kernels.native.program import ProgramWriter
from quire.kernels.native.program_run import Program
from quire.kernels.native.structures import ProgramStep
from quire.kernels.native.weights import LinearWeights
from quire.kernels.reference import elementwise
from quire.kernels.reference.activation import activate
from quire.kernels.reference.activation import gate as reference_gate

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
WIDTH = 32


def step(wanted: Tensor | None = None) -> ProgramStep:
    """For programs that do not attend."""
    nothing = torch.empty(0, dtype=torch.int64)
    return ProgramStep(nothing, nothing, nothing.view(0, 4), wanted, [(torch.empty(0), torch.empty(0))], ())


def linear(seed: int, outputs: int, inputs: int, *, bias: bool = False) -> tuple[Tensor, Tensor | None, LinearWeights]:
    torch.manual_seed(seed)
    weight, added = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs) if bias else None
    return weight, added, LinearWeights(cut_panels(weight), added)


def mlp(*, in_python: bool = False) -> tuple[Program, list[Tensor]]:
    """x + down(gate(up(norm(x)))), then the wanted rows of x + x' for x' = norm(x)."""
    writer, weight = ProgramWriter(torch.float32, WIDTH), torch.rand(WIDTH) + 0.5
    up, _, packed_up = linear(1, 2 * 48, WIDTH)
    down, bias, packed_down = linear(2, WIDTH, 48, bias=True)
    x = writer.stream
    both = writer.multiply(writer.norm(x, weight, 1e-5), packed_up)
    gated = writer.gate(both, "silu") if not in_python else writer.call(lambda each, _: gate(each), (both,), 48)
    writer.add(x, writer.multiply(gated, packed_down))
    change = writer.norm(x, weight, 1e-5)
    selected, change = writer.select(x, fresh=True), writer.select(change)
    writer.narrow()
    writer.add(selected, change)
    assert bias is not None
    return writer.finish(selected), [weight, up, down, bias]


def gate(both: Tensor) -> Tensor:
    first, second = both.chunk(2, dim=1)
    return F.silu(first) * second


def expected(x: Tensor, weights: list[Tensor], wanted: Tensor | None) -> Tensor:
    weight, up, down, bias = weights
    x = x + F.linear(gate(F.linear(F.rms_norm(x, (WIDTH,), weight, 1e-5), up)), down, bias)
    x = x + F.rms_norm(x, (WIDTH,), weight, 1e-5)
    return x if wanted is None else x[wanted]


@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize("wanted", [None, torch.tensor([4, 0, 2]), torch.tensor([], dtype=torch.int64)])
def test_a_program_computes_what_its_operations_say(wanted: Tensor | None, in_python: bool) -> None:
    program, weights = mlp(in_python=in_python)
    assert program.num_calls == int(in_python)
    for rows in (5, 64, 7):
        x = torch.randn(rows, WIDTH)
        found = program.run(x.clone(), step(wanted))
        torch.testing.assert_close(found, expected(x, weights, wanted), atol=1e-5, rtol=1e-5)


def test_a_result_outlives_the_next_run() -> None:
    program, _ = mlp()
    first = program.run(torch.randn(3, WIDTH), step(torch.tensor([1])))
    kept = first.clone()
    program.run(torch.randn(3, WIDTH), step(torch.tensor([2])))
    assert torch.equal(first, kept)


def test_memory_is_used_again() -> None:
    writer, weight = ProgramWriter(torch.float32, WIDTH), torch.ones(WIDTH)
    for _ in range(10):
        writer.add(writer.stream, writer.norm(writer.stream, weight, 1e-5))
    program = writer.finish(writer.stream)
    program.run(torch.ones(2, WIDTH), step())
    assert len(program._memory) == 2 * WIDTH


@pytest.mark.parametrize(
    ("kind", "is_known"), [(PLAIN, True), (NIBBLES, True), (BYTES, True), (HALVES, True), (99, False), (-1, False)]
)
def test_a_weight_without_a_kernel_is_refused_when_the_program_is_made(kind: int, is_known: bool) -> None:
    writer = ProgramWriter(torch.float32, WIDTH)
    data = torch.zeros(8 * (WIDTH + 64) * WIDTH, dtype=torch.uint8)  # enough in any format
    writer.add(writer.stream, writer.multiply(writer.stream, _weights(torch.float32, kind, data)))
    if is_known:
        x = torch.ones(1, WIDTH)
        assert torch.equal(writer.finish(writer.stream).run(x, step()), torch.ones(1, WIDTH))
        return
    with pytest.raises(ValueError, match="float32 rows"):
        writer.finish(writer.stream)


def test_bfloat16_runs_on_tile_units_and_is_refused_without_them() -> None:
    from quire.kernels.native.ops import has_tile_units

    writer = ProgramWriter(torch.bfloat16, WIDTH)
    data = torch.zeros(8 * (WIDTH + 64) * WIDTH, dtype=torch.uint8)
    writer.add(writer.stream, writer.multiply(writer.stream, _weights(torch.bfloat16, PLAIN, data)))
    if has_tile_units():
        x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
        assert torch.equal(writer.finish(writer.stream).run(x, step()), torch.ones_like(x))
    else:
        with pytest.raises(ValueError, match="bfloat16 rows"):
            writer.finish(writer.stream)


def _weights(dtype: torch.dtype, kind: int, data: Tensor) -> LinearWeights:
    return LinearWeights(PackedWeight(dtype, kind, WIDTH, WIDTH, data), None)


@pytest.mark.parametrize("size", [5, 32, 83])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_norm_is_that_of_torch(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight_bias = (torch.randn(7, size) + 3.0).to(dtype), torch.randn(2, size).to(dtype)
    wanted = elementwise.layer_norm(x, weight_bias, 1e-5)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(ops.layer_norm(x, weight_bias, 1e-5), wanted, **near)
    writer = ProgramWriter(dtype, size)
    writer.add(writer.stream, writer.layer_norm(writer.stream, weight_bias, 1e-5))
    found = writer.finish(writer.stream).run(x.clone(), step())
    assert torch.equal(found, x + ops.layer_norm(x, weight_bias, 1e-5))


@pytest.mark.parametrize("activation", sorted(ops.ACTIVATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_is_that_of_torch(activation: str, dtype: torch.dtype) -> None:
    x = torch.cat((torch.linspace(-12, 12, 4_803), torch.tensor([-1e4, 0.0, 1e4]))).view(2, -1).to(dtype)
    wanted = activate(x, activation)
    near = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-6}
    writer = ProgramWriter(dtype, x.shape[1])
    writer.activate(writer.stream, activation)
    found = writer.finish(writer.stream).run(x.clone(), step())
    torch.testing.assert_close(found, wanted, **near)
    ops.activate(x, activation)
    assert torch.equal(x, found)


@pytest.mark.parametrize("rotated", [2, 12, 32])
def test_only_the_first_numbers_of_a_head_are_rotated(rotated: int) -> None:
    x, angles = torch.randn(5, 3, 32), torch.randn(5, rotated // 2)
    wanted = elementwise.rotate(x, angles.cos(), angles.sin())
    cos, sin = torch.cat((angles.cos(),) * 2, dim=1), torch.cat((-angles.sin(), angles.sin()), dim=1)
    found = x.clone()
    ops.rotate(found, cos[:, None], sin[:, None])
    torch.testing.assert_close(found, wanted)
    writer = ProgramWriter(torch.float32, 96)
    writer.rotate(writer.stream, "angles", 3, 32)
    given = replace(step(), angles=[(cos, sin)])
    assert torch.equal(writer.finish(writer.stream).run(x.view(5, 96).clone(), given), found.view(5, 96))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_within_limits_is_that_of_torch(dtype: torch.dtype) -> None:
    clamp, x = Clamp(0.7, 1.702, 1.0), torch.randn(3, 2 * WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    writer = ProgramWriter(dtype, 2 * WIDTH)
    gated = writer.gate(writer.stream, "silu", clamp)
    program = writer.finish(writer.select(gated, fresh=True))
    wanted = reference_gate(x.float(), "silu", clamp)
    found = program.run(x, step(torch.arange(3)))
    torch.testing.assert_close(found.float(), wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    torch.testing.assert_close(ops.gate(x, "silu", clamp), found, rtol=0, atol=0)


@pytest.mark.parametrize("wanted", [None, torch.tensor([2, 0])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_a_run_is_given_beside_the_stream_are_selected_with_it(
    dtype: torch.dtype, wanted: Tensor | None
) -> None:
    x, beside = torch.randn(3, 5).to(dtype), torch.randn(3, 40).to(dtype)
    writer = ProgramWriter(dtype, 5)
    other = writer.beside(40)
    writer.times(writer.stream, other, 7)
    rows, more = writer.select(writer.stream, fresh=True), writer.select(other)
    writer.narrow()
    writer.times(rows, more, 35)
    writer.scale(rows, 0.3)
    found = writer.finish(rows).run(x.clone(), replace(step(wanted), beside=beside))
    expected = x * beside[:, 7:12]
    expected = (expected if wanted is None else expected[wanted]) * (beside if wanted is None else beside[wanted])[
        :, 35:
    ]
    torch.testing.assert_close(found, expected * 0.3, rtol=0, atol=0)
