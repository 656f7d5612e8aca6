"""A chain of decoder layers without attention: the time of the kernels one after the other, launched plainly and with
programmatic dependent launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.kernel_timing import READ_CEILING
from quire.kernels.norm import Norm
from quire.kernels.triton.gemm_skinny import Workspace, skinny_gemm
from quire.kernels.triton.measurement import graph_us
from quire.kernels.triton.norm import rms_norm
from quire.kernels.triton.quantize import quantize_rows
from quire.kernels.triton.rotary import LayerMemory, rotate_and_store

EPS = 1e-5
BLOCK = 16  # tokens per cache block


@dataclass(frozen=True, slots=True)
class Sizes:
    name: str
    hidden: int
    intermediate: int
    queries: int
    keys: int
    layers: int  # enough that weights are cold in the cache
    dim: int = 128


MODELS = (Sizes("8b", 4096, 14336, 32, 8, 6), Sizes("0.6b", 1024, 3072, 16, 8, 16))


class Chain:
    """Norm, qkv, rotary and cache write, output projection, norm, gated up projection, down projection.

    Row i is at position i of its sequence, so every row has blocks for as many positions as there are rows.
    """

    def __init__(
        self, sizes: Sizes, rows: int, kind: str, workspace: Workspace, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._rows, self._kind, self._workspace, self._dtype = rows, kind, workspace, dtype
        self._device = workspace.partials.device
        query_size = sizes.queries * sizes.dim
        qkv_size = query_size + 2 * sizes.keys * sizes.dim
        shapes = ((qkv_size, sizes.hidden), (sizes.hidden, query_size))
        shapes += ((2 * sizes.intermediate, sizes.hidden), (sizes.hidden, sizes.intermediate))
        self._weights = [[self._weight(*shape) for shape in shapes] for _ in range(sizes.layers)]
        self._norm = Norm(torch.rand(sizes.hidden, device=self._device).to(dtype), EPS)
        self._start = torch.randn(rows, sizes.hidden, device=self._device).to(dtype)
        self.residual = torch.empty_like(self._start)
        self._table = torch.rand(rows, sizes.dim, device=self._device)
        self.positions = torch.arange(rows, dtype=torch.int32, device=self._device)
        each = -(-rows // BLOCK)
        self.blocks = torch.arange(rows * each, dtype=torch.int32, device=self._device).view(rows, each)
        cache = torch.zeros(2, rows * each, sizes.keys, BLOCK, sizes.dim, dtype=dtype, device=self._device)
        self.memory = LayerMemory(*cache)
        self._qkv, self._query = self._empty(qkv_size), self._empty(query_size)
        self._normal, self._gated = self._empty(sizes.hidden), self._empty(sizes.intermediate)

    @property
    def layer_bytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight, _ in self._weights[0])

    def run(self, dependent: bool) -> None:
        self.residual.copy_(self._start)
        for weights in self._weights:
            self._layer(weights, dependent)

    def _layer(self, weights: list[tuple[Tensor, Tensor | None]], dependent: bool) -> None:
        qkv, output, gate_up, down = weights
        self._multiply(self.residual, qkv, self._qkv, dependent, norm=True)
        rotate_and_store(
            self._qkv, self._table, self.positions, self.positions, self.blocks, self.memory, query=self._query,
            dependent=dependent,
        )  # fmt: skip
        self._multiply(self._query, output, self.residual, dependent, residual=True)
        self._multiply(self.residual, gate_up, self._gated, dependent, norm=True, activation="silu")
        self._multiply(self._gated, down, self.residual, dependent, residual=True)

    def _multiply(
        self,
        x: Tensor,
        weight: tuple[Tensor, Tensor | None],
        out: Tensor,
        dependent: bool,
        norm: bool = False,
        residual: bool = False,
        activation: str | None = None,
    ) -> None:
        scale = None
        if self._rows > 1:
            x, scale = self._prepared(x, norm, dependent)
        skinny_gemm(
            x, weight[0], self._workspace, residual=out if residual else None, x_scale=scale, weight_scale=weight[1],
            activation=activation, norm=self._norm if norm and self._rows == 1 else None, out=out, dependent=dependent,
        )  # fmt: skip

    def _prepared(self, x: Tensor, norm: bool, dependent: bool) -> tuple[Tensor, Tensor | None]:
        """Return the input of a gemm. Several rows are normed and quantized by separate kernels."""
        if self._kind == "bf16":
            return (rms_norm(x, self._norm.weight, EPS, self._normal, None, dependent), None) if norm else (x, None)
        small = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=self._device)
        scale = torch.empty(self._rows, device=self._device)
        if norm:
            return rms_norm(x, self._norm.weight, EPS, small, scale, dependent), scale
        return quantize_rows(x, small, scale, dependent)

    def _weight(self, outputs: int, inputs: int) -> tuple[Tensor, Tensor | None]:
        weight = torch.empty(outputs, inputs, dtype=self._dtype, device=self._device).normal_(0.0, inputs**-0.5)
        return (weight, None) if self._kind == "bf16" else quantize_rows(weight)

    def _empty(self, size: int) -> Tensor:
        return torch.empty(self._rows, size, dtype=self._dtype, device=self._device)


def chains(workspace: Workspace) -> list[tuple[str, Callable[[], Chain]]]:
    return [
        (f"{sizes.name} M={rows} {kind}", lambda sizes=sizes, rows=rows, kind=kind: Chain(sizes, rows, kind, workspace))
        for sizes in MODELS
        for rows in (1, 16, 64)
        for kind in (("bf16", "float8") if sizes.name == "8b" else ("bf16",))
    ]


def measure_chain(name: str, make: Callable[[], Chain]) -> dict[str, object]:
    """Time a layer with plain and with dependent launches, and check that both give the same bits."""
    chain = make()
    found, plain, layers = {}, 0.0, len(chain._weights)
    for dependent in (False, True):
        chain.run(dependent)
        torch.cuda.synchronize()
        found[dependent] = chain.residual.clone()
    plain = graph_us([lambda: chain.run(False)]) / layers
    ahead = graph_us([lambda: chain.run(True)]) / layers
    return {
        "name": f"layer {name}", "us": plain, "dependent_us": ahead,
        "same": bool(torch.equal(found[False], found[True])),
        "floor_us": chain.layer_bytes / READ_CEILING * 1e6,
    }  # fmt: skip
