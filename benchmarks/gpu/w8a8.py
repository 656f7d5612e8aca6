"""Times an 8B model's gemms with int8 and float8 weights, by rows: python -m benchmarks.gpu.w8a8 --rows 16,64,192

Every gemm runs alone, over weights that are not in the cache; the times of a layer's gemms are summed. If the gate, or
the conversion of the int8 library, is not fused into the gemm, its kernel is counted too. "floor" is the time to read
the weights once at the peak read bandwidth.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.kernel_timing import READ_CEILING, relative_error
from quire.kernels.cuda.scaled_gemm import scaled_gemm
from quire.kernels.cuda.scaled_gemm_plan import FEWEST_ROWS, takes_weight
from quire.kernels.reference.gemm import gemm
from quire.kernels.triton.activation import gate
from quire.kernels.triton.compiling import compiling_only
from quire.kernels.triton.gemm_skinny import Workspace, skinny_gemm
from quire.kernels.triton.gemm_skinny_plan import MOST_ROWS
from quire.kernels.triton.gemm_trials import Layer
from quire.kernels.triton.measurement import graph_us, num_copies
from quire.kernels.triton.measurement_cases import Sizes
from quire.kernels.triton.quantize import quantize_rows
from quire.runtime.quantization.fp8 import ScaledRows, multiply_scaled

CUDA = torch.device("cuda")
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LAYERS = Sizes().layers()[:-1]  # without the head
LARGEST_ERROR = 0.02
Ways = dict[str, Callable[[ScaledRows], object]]  # by name: the gemm with one weight


def quantized(x: Tensor, kind: str) -> ScaledRows:
    return ScaledRows(*quantize_rows(x, torch.empty(x.shape, dtype=DTYPES[kind], device=x.device)))


def ways(layer: Layer, x: ScaledRows, workspace: Workspace, residual: Tensor | None, out: Tensor) -> Ways:
    """Return the gemm by each kernel that supports it. All write `out`, except the library's where nothing follows."""

    def by_library(weight: ScaledRows) -> Tensor:
        made = multiply_scaled(x, weight, torch.bfloat16)
        if layer.activation is not None:
            return gate(made, layer.activation, out)
        return made if residual is None else torch.add(residual, made, out=out)

    def by_kernel(kernel: Callable[..., Tensor], weight: ScaledRows) -> Tensor:
        return kernel(
            x.numbers, weight.numbers, x_scale=x.scale, weight_scale=weight.scale, residual=residual,
            activation=layer.activation, out=out, dependent=True,
        )  # fmt: skip

    found: Ways = {"library": by_library}
    if len(x.numbers) <= MOST_ROWS:
        found["skinny"] = partial(by_kernel, partial(skinny_gemm, workspace=workspace))
    if len(x.numbers) >= FEWEST_ROWS:
        found["hopper"] = partial(by_kernel, scaled_gemm)
    return found


def compile_all(kinds: list[str], rows_of: list[int], workspace: Workspace) -> None:
    """Compile every kernel that will be timed, many at once."""
    with compiling_only():
        for kind, rows, layer in itertools.product(kinds, rows_of, LAYERS):
            weight = ScaledRows(*_empty(kind, layer.weight_rows, layer.inputs))
            out = torch.empty(rows, layer.outputs, dtype=torch.bfloat16, device=CUDA)
            x = ScaledRows(*_empty(kind, rows, layer.inputs))
            for name, way in ways(layer, x, workspace, out if layer.residual else None, out).items():
                if name != "library":
                    way(weight)


def _empty(kind: str, rows: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.empty(rows, size, dtype=DTYPES[kind], device=CUDA), torch.empty(rows, device=CUDA)


def measured(layer: Layer, rows: int, kind: str, workspace: Workspace) -> Iterator[tuple[str, float]]:
    """Yield microseconds by name."""
    numbers, shape = torch.randn(rows, layer.inputs, device=CUDA).bfloat16(), (layer.weight_rows, layer.inputs)
    copies = num_copies(layer.weight_rows * layer.inputs)
    plain = [torch.randn(shape, dtype=torch.bfloat16, device=CUDA) * layer.inputs**-0.5 for _ in range(copies)]
    yield "floor", layer.weight_rows * layer.inputs / READ_CEILING * 1e6
    yield "bf16 library", graph_us([partial(_plain, layer, numbers, weight) for weight in plain])
    weights = [quantized(weight, kind) for weight in plain]
    del plain
    x = quantized(numbers, kind)
    residual = torch.randn(rows, layer.outputs, device=CUDA).bfloat16() if layer.residual else None
    out = torch.empty(rows, layer.outputs, dtype=torch.bfloat16, device=CUDA)
    wanted = gemm(
        x.numbers, weights[0].numbers, x_scale=x.scale, weight_scale=weights[0].scale, residual=residual,
        activation=layer.activation,
    )  # fmt: skip
    for name, way in ways(layer, x, workspace, residual, out).items():
        if name != "library" and (error := relative_error(way(weights[0]), wanted)) > LARGEST_ERROR:
            raise SystemExit(f"{name} is wrong: {layer.name}, {rows} rows, {kind}: off by {error:.3f}")
        yield name, graph_us([partial(way, weight) for weight in weights])


def _plain(layer: Layer, x: Tensor, weight: Tensor) -> Tensor:
    made = torch.mm(x, weight.t())
    return made if layer.activation is None else gate(made, layer.activation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="2,16,32,64,96,128,160,192,256,512,2048", help="numbers of rows")
    parser.add_argument("--kinds", default="int8,fp8", help="of int8, fp8")
    parser.add_argument("--layers", action="store_true", help="print every gemm, not only their sum")
    options = parser.parse_args()
    if not takes_weight(torch.empty(64, 64, dtype=torch.int8, device=CUDA)):
        raise SystemExit("this GPU is not a Hopper GPU")
    workspace = Workspace.make(CUDA)
    kinds, rows_of = options.kinds.split(","), [int(rows) for rows in options.rows.split(",")]
    compile_all(kinds, rows_of, workspace)
    for kind in kinds:
        for rows in rows_of:
            sums: dict[str, float] = {}
            for layer in LAYERS:
                found = dict(measured(layer, rows, kind, workspace))
                sums = {name: sums.get(name, 0.0) + us for name, us in found.items()}
                if options.layers:
                    print(f"  {kind} {rows:4d} rows {layer.name:9s} {_line(found)}", flush=True)
            print(f"{kind} {rows:4d} rows, us of a layer: {_line(sums)}", flush=True)


def _line(found: dict[str, float]) -> str:
    return "  ".join(f"{name} {us:6.1f}" for name, us in found.items())


if __name__ == "__main__":
    main()
