"""The compiled decoder refuses what it has no kernel for; that it computes rightly is shown where models are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.native.loader import why_not_native
from quire.kernels.native.ops import BYTES, NIBBLES, PLAIN, PackedWeight

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))

HIDDEN, HEADS, DIM, INTERMEDIATE, BLOCK = 32, 2, 16, 32, 4


def run_one_token(dtype: torch.dtype, odd_format: int) -> tuple[Tensor, Tensor]:
    """Ones through two layers of zero weights, the last down-projection in `odd_format`: the rows and the keys."""
    from quire.kernels.native.decoder import DecoderShape, LayerWeights, LinearWeights, NativeDecoder

    def zeros(outputs: int, inputs: int, kind: int = BYTES) -> LinearWeights:
        data = torch.zeros(8 * (outputs + 64) * inputs, dtype=torch.uint8)  # enough in any format
        return LinearWeights(PackedWeight(dtype, kind, outputs, inputs, data), None)

    def layer(kind: int) -> LayerWeights:
        norm, attended = torch.ones(HIDDEN, dtype=dtype), HEADS * DIM
        return LayerWeights(
            norm, None, norm, zeros(3 * attended, HIDDEN), zeros(HIDDEN, attended), zeros(2 * INTERMEDIATE, HIDDEN),
            zeros(HIDDEN, INTERMEDIATE, kind),
        )  # fmt: skip

    caches = [(torch.ones(1, HEADS, BLOCK, DIM, dtype=dtype), torch.ones(1, HEADS, BLOCK, DIM, dtype=dtype))] * 2
    shape = DecoderShape(HIDDEN, HEADS, HEADS, DIM, INTERMEDIATE, 1e-5)
    decoder = NativeDecoder(shape, [layer(BYTES), layer(odd_format)], caches, dtype)
    x, angles = torch.ones(1, HIDDEN, dtype=dtype), torch.ones(1, 1, DIM, dtype=dtype)
    slots, tables, spans = torch.tensor([0, BLOCK]), torch.zeros(1, dtype=torch.int64), torch.tensor([[0, 1, 1, 0]])
    try:
        decoder.run(x, angles, angles, slots, tables, spans)
    except ValueError:
        assert torch.equal(x, torch.ones_like(x)), "a refused step changed its rows"
        assert torch.equal(caches[0][0], torch.ones_like(caches[0][0])), "a refused step wrote keys"
        raise
    return x, caches[0][0]


@pytest.mark.parametrize("kind", [PLAIN, NIBBLES, BYTES])
def test_every_format_runs_in_float32(kind: int) -> None:
    x, keys = run_one_token(torch.float32, kind)
    assert torch.equal(x, torch.ones_like(x))  # every product is zero, so the residual stream passes by
    assert keys[0, :, 0].eq(0).all()
    assert keys[0, :, 1:].eq(1).all()


@pytest.mark.parametrize("odd_format", [3, -1])
def test_a_weight_without_a_float32_kernel_is_refused_before_any_layer_runs(odd_format: int) -> None:
    with pytest.raises(ValueError, match="float32 rows"):
        run_one_token(torch.float32, odd_format)


def test_bfloat16_runs_on_tile_units_and_is_refused_without_them() -> None:
    from quire.kernels.native.ops import has_tile_units

    if has_tile_units():
        x, _ = run_one_token(torch.bfloat16, PLAIN)
        assert torch.equal(x, torch.ones_like(x))
    else:
        with pytest.raises(ValueError, match="bfloat16 rows"):
            run_one_token(torch.bfloat16, PLAIN)
