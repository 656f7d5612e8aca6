"""W8A8 gemm of 65 and more rows on Hopper GPUs: int8 and float8 by the kernel of hopper_gemm.py."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cuda.hopper_gemm import Kernel, Tile, begin, hopper_gemm
from quire.kernels.cuda.scaled_gemm_plan import Work, choose_tile, few_tiles, takes_weight
from quire.kernels.triton.compiling import is_compiling_only
from quire.kernels.triton.launch import SMALL, check, num_processors


def scaled_gemm(
    x: Tensor,  # [rows, inputs] float8 or int8
    weight: Tensor,  # [outputs, inputs] of x's dtype; [2 * outputs, inputs], gate then up, with an activation
    *,
    x_scale: Tensor,  # [rows] float32
    weight_scale: Tensor,  # [weight rows] float32
    bias: Tensor | None = None,  # [weight rows] of out's dtype
    residual: Tensor | None = None,  # [rows, outputs] of out's dtype: added to the result; may be `out`
    activation: str | None = None,  # of ACTIVATIONS: the result is activation(gate) * up
    out: Tensor,  # [rows, outputs] float16, bfloat16 or float32
    tile: Tile | None = None,  # by default chosen for the shape
    dependent: bool = False,  # programmatic dependent launch; the previous kernel must not write the weight
) -> Tensor:
    """Return x @ weight.T with its epilogue. int8 is added up exactly; float8 by the tensor cores, which keep fewer
    bits than float32, as in cuBLAS. The epilogue is float32, rounded once. Deterministic. Inside `compiling_only`
    nothing is launched: this kernel, and all that other numbers of rows may need, are compiled in the background."""
    check(takes_weight(weight) and weight.dtype in SMALL, "weights of 8 bits, K and N multiples of 16, on a Hopper GPU")
    check(
        all(each.is_contiguous() and each.dtype == torch.float32 for each in (x_scale, weight_scale)), "scales: float32"
    )
    check(x_scale.shape == x.shape[:1] and weight_scale.shape == weight.shape[:1], "a scale per row")
    if len(x) == 0:
        return out
    (weight_rows, inputs), gated = weight.shape, activation is not None
    shape = Work(0, weight_rows, inputs, gated)
    processors = num_processors(x.device)
    chosen = tile or choose_tile(shape._replace(rows=len(x)), x.dtype, processors)
    kernel = Kernel(chosen, x.dtype, out.dtype, activation, bias is not None, residual is not None)
    begin(kernel, x.device)
    if is_compiling_only():
        for other in few_tiles(shape, x.dtype, processors):
            begin(kernel._replace(tile=other), x.device)
        return out
    hopper_gemm(
        x, weight, out, kernel,
        x_scale=x_scale, weight_scale=weight_scale, bias=bias, residual=residual, dependent=dependent,
    )  # fmt: skip
    return out
