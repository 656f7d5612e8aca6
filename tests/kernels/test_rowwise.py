"""Norms, gates, quantization and embeddings against plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.reference import activation as reference_activation
from quire.kernels.reference import elementwise, embedding, norm, quantize
from quire.kernels.triton.activation import activate_rows, gate
from quire.kernels.triton.embedding import embed, embed_newest, take_newest
from quire.kernels.triton.launch import row_block
from quire.kernels.triton.layer_norm import layer_norm
from quire.kernels.triton.norm import add_rms_norm, rms_norm
from quire.kernels.triton.quantize import quantize_rows
from triton_cases import DEVICE, DTYPES, TOLERANCE, rand

SHAPES = [(1, 64), (3, 80), (5, 576)]


def assert_same_quantized(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Scales agree, and numbers to one float8 step: a last bit of the input may fall on the other side."""
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-2, atol=0)
    torch.testing.assert_close(found[0].float(), wanted[0].float(), rtol=0.13, atol=2.0**-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_a_norm_is_that_of_torch(rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = rand(rows, size, dtype=dtype), rand(size, dtype=dtype, seed=1)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), elementwise.rms_norm(x, weight, 1e-5), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_a_norm_with_residual_leaves_the_sum_behind(rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual, weight = (rand(rows, size, dtype=dtype, seed=i) for i in (0, 1, 2))
    found_sum, wanted_sum, weight = residual.clone(), residual.clone(), weight[0]
    found = add_rms_norm(x, found_sum, weight, 1e-6)
    wanted = norm.add_rms_norm(x, wanted_sum, weight, 1e-6)
    torch.testing.assert_close(found_sum, wanted_sum, rtol=0, atol=0)
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_norm_writes_float8_with_a_scale_per_row() -> None:
    x, weight = rand(4, 192, scale=3.0), rand(192, seed=1)
    out, scale = torch.empty(4, 192, dtype=torch.float8_e4m3fn, device=DEVICE), torch.empty(4, device=DEVICE)
    rms_norm(x, weight, 1e-5, out, scale)
    assert_same_quantized((out, scale), quantize.quantize_rows(elementwise.rms_norm(x, weight, 1e-5)))


def test_a_norm_reads_rows_that_lie_apart() -> None:
    wide, weight = rand(3, 200), rand(64, seed=1)
    torch.testing.assert_close(rms_norm(wide[:, :64], weight, 1e-5), elementwise.rms_norm(wide[:, :64], weight, 1e-5))


def test_a_float8_norm_without_a_scale_is_refused() -> None:
    x = rand(1, 64)
    with pytest.raises(ValueError, match="come together"):
        rms_norm(x, x[0], 1e-5, torch.empty(1, 64, dtype=torch.float8_e4m3fn, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_a_layer_norm_is_that_of_torch(rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight_bias = rand(rows, size, dtype=dtype) + 3.0, rand(2, size, dtype=dtype, seed=1)
    found, wanted = layer_norm(x, weight_bias, 1e-5), elementwise.layer_norm(x, weight_bias, 1e-5)
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(wanted, F.layer_norm(x, (size,), *weight_bias, 1e-5), rtol=1e-2, atol=1e-2)


def test_a_layer_norm_reads_rows_that_lie_apart_and_takes_none() -> None:
    wide, weight_bias = rand(3, 200), rand(2, 64, seed=1)
    wanted = elementwise.layer_norm(wide[:, :64], weight_bias, 1e-5)
    torch.testing.assert_close(layer_norm(wide[:, :64], weight_bias, 1e-5), wanted)
    assert layer_norm(wide[:0, :64], weight_bias, 1e-5).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize(("rows", "size"), [(1, 32), (3, 1100), (0, 32)])
def test_rows_are_activated_in_place_as_by_torch(rows: int, size: int, activation: str, dtype: torch.dtype) -> None:
    x = rand(rows, size, dtype=dtype, scale=2.0)
    wanted = reference_activation.activate(x, activation)
    activate_rows(x, activation)
    torch.testing.assert_close(x, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_no_activation_makes_a_number_of_nan(activation: str) -> None:
    x = rand(2, 32)
    x[1, 3] = float("nan")
    activate_rows(x, activation)
    assert x.isnan().nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize(("rows", "size"), [(1, 32), (3, 1100)])
def test_a_gate_is_that_of_torch(rows: int, size: int, activation: str, dtype: torch.dtype) -> None:
    x = rand(rows, 2 * size, dtype=dtype, scale=2.0)
    torch.testing.assert_close(
        gate(x, activation), reference_activation.gate(x, activation), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_adds_a_change_first(dtype: torch.dtype) -> None:
    x, change = (rand(3, 2 * 1100, dtype=dtype, seed=seed) for seed in (1, 2))
    wanted = gate((x.float() + change.float()).to(dtype), "silu")
    torch.testing.assert_close(gate(x, "silu", change=change), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("size", [300, 17_000])  # at once, and in pieces
def test_a_gate_writes_float8_with_a_scale_per_row(size: int) -> None:
    x = rand(2, 2 * size)
    out, scale = torch.empty(2, size, dtype=torch.float8_e4m3fn, device=DEVICE), torch.empty(2, device=DEVICE)
    gate(x, "silu", out, scale)
    assert_same_quantized((out, scale), quantize.quantize_rows(reference_activation.gate(x, "silu")))


@pytest.mark.parametrize("size", [48, 9000])
def test_rows_are_quantized_by_their_own_largest_number(size: int) -> None:
    x = rand(3, size) * torch.tensor([[1.0], [100.0], [0.0]], device=DEVICE)
    found, scale = quantize_rows(x)
    wanted, wanted_scale = quantize.quantize_rows(x)
    torch.testing.assert_close(scale, wanted_scale, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=0)


@pytest.mark.parametrize("size", [64, 20_000])
def test_rows_are_quantized_to_whole_numbers(size: int) -> None:
    x = rand(3, size) * torch.tensor([1e-3, 1.0, 50.0], device=DEVICE)[:, None]
    found = quantize_rows(x, torch.empty(x.shape, dtype=torch.int8, device=DEVICE))
    wanted = quantize.quantize_rows_int8(x)
    torch.testing.assert_close(found[1], wanted[1])
    assert (found[0].int() - wanted[0].int()).abs().max() <= 1
    assert (found[0] == wanted[0]).float().mean() > 0.99


@pytest.mark.parametrize(("dtype", "most"), [(torch.float8_e4m3fn, 448.0), (torch.int8, 127.0)])
def test_rows_are_quantized_as_the_reference_does_where_a_reciprocal_rounds_otherwise(
    dtype: torch.dtype, most: float
) -> None:
    def nearest(x: torch.Tensor) -> torch.Tensor:
        return x.round() if dtype == torch.int8 else x.to(dtype).float()

    generator = torch.Generator().manual_seed(0)
    amax = torch.rand(1 << 20, generator=generator) + 0.5
    between = torch.randint(1, 127, amax.shape, generator=generator) + 0.5  # two whole numbers,
    if dtype != torch.int8:
        between = 17.0 + 2 * torch.randint(0, 8, amax.shape, generator=generator)  # or two float8 of 16 to 32
    number = between / most * amax
    once, twice = (number * factor for factor in (torch.full_like(amax, most) / amax, amax.reciprocal() * most))
    by_scale = number / (amax / most)
    differs = (nearest(once) != nearest(twice)) | (nearest(once) != nearest(by_scale))
    rows = torch.stack((amax, number), dim=1)[differs][:4].to(DEVICE)
    assert len(rows) == 4
    found, _ = quantize_rows(rows, torch.empty(rows.shape, dtype=dtype, device=DEVICE))
    wanted, _ = quantize.quantize_rows_int8(rows) if dtype == torch.int8 else quantize.quantize_rows(rows)
    assert torch.equal(found.float(), wanted.float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("size", [64, 20_000])  # in registers at once, and in several pieces
def test_a_row_with_a_nan_stays_bad_and_alone(size: int, dtype: torch.dtype) -> None:
    x = rand(3, size)
    x[1, 5] = float("nan")
    gate_up = torch.cat((x, rand(3, size, seed=1)), dim=1)
    made = {
        "rows": quantize_rows(x, torch.empty(3, size, dtype=dtype, device=DEVICE)),
        "gate": _scaled(lambda out, scale: gate(gate_up, "silu", out, scale), size, dtype),
    }
    if size == 64:
        weight = rand(size, seed=2)
        made["norm"] = _scaled(lambda out, scale: rms_norm(x, weight, 1e-5, out, scale), size, dtype)
    for name, (numbers, scale) in made.items():
        values = numbers.float() * scale[:, None]
        assert values[1].isnan().any(), name
        assert values[[0, 2]].isfinite().all(), name


def _scaled(run: Callable[[Tensor, Tensor], Tensor], size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out, scale = torch.empty(3, size, dtype=dtype, device=DEVICE), torch.empty(3, device=DEVICE)
    run(out, scale)
    return out, scale


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_lines_of_the_table_and_zero_outside(dtype: torch.dtype) -> None:
    table = rand(10, 48, dtype=dtype)
    ids = torch.tensor([3, 9, -1, 10, 0], device=DEVICE)
    torch.testing.assert_close(embed(ids, table), embedding.embed(ids, table), rtol=0, atol=0)


def test_a_decode_step_starts_from_the_newest_token_of_each_row() -> None:
    table, tokens = rand(32, 40), torch.randint(0, 32, (4, 7), dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([3, 0, 7, 1], device=DEVICE)
    rows = torch.tensor([2, 0, -1, 3, 1], dtype=torch.int32, device=DEVICE)
    out = torch.full((5, 40), 9.0, device=DEVICE)
    positions = torch.full((5,), 9, dtype=torch.int32, device=DEVICE)
    embed_newest(rows, tokens, lengths, table, out, positions)
    ids, wanted_positions = embedding.newest_tokens(rows, tokens, lengths)
    torch.testing.assert_close(out, embedding.embed(ids, table), rtol=0, atol=0)
    assert positions.tolist() == wanted_positions.tolist() == [6, 2, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_or_from_vectors_that_are_known_already(dtype: torch.dtype) -> None:
    vectors, lengths = rand(5, 40, dtype=dtype), torch.tensor([3, 0, 7, 1], device=DEVICE)
    rows = torch.tensor([2, 0, -1, 3, 1], dtype=torch.int32, device=DEVICE)
    out, positions = torch.full_like(vectors, 9.0), torch.full((5,), 9, dtype=torch.int64, device=DEVICE)
    kept = vectors.clone()
    kept[[2, 4]] = 0.0  # padding, and a row that is empty
    vectors[2] = float("nan")
    take_newest(rows, lengths, vectors, out, positions)
    torch.testing.assert_close(out, kept, rtol=0, atol=0)
    assert positions.tolist() == [6, 2, 0, 0, 0]


@pytest.mark.parametrize("size", [1, 256, 300, 576, 1024, 3072, 4096, 5120, 11008, 14336, 17408, 18944, 28672, 53248])
def test_blocks_of_a_row_lose_few_lanes(size: int) -> None:
    block, warps = row_block(size)
    assert block == 256 * warps <= 4096
    blocks = -(-size // block)
    assert blocks <= 16
    assert blocks * block - size < max(256, size * 0.1)
