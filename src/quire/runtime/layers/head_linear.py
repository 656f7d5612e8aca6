"""Per-head gemms: each head of a row is multiplied by its own matrix."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.native.program import Symbol
from quire.kernels.native.weights import LinearWeights
from quire.runtime.layers.gemm import Gemm, Multiply
from quire.runtime.layers.native import NativeMultiply
from quire.runtime.layers.stream import Value


class HeadLinear(Protocol):
    """Maps heads [tokens, heads, inputs] to [tokens, heads, outputs]. The `rest` elements after the inputs of each head
    are copied unchanged after its outputs."""

    def __call__(self, x: Value) -> Value:
        """Multiply x [tokens, at least heads * (inputs + rest)] -> [tokens, heads * (outputs + rest)]."""


class DenseHeads:
    """torch.bmm with weights [heads, outputs, inputs]."""

    def __init__(self, weight: Tensor, rest: int) -> None:
        self._weight, self._rest = weight, rest
        self._transposed = weight.transpose(1, 2)  # [heads, inputs, outputs], a view

    def __call__(self, x: Tensor) -> Tensor:
        heads, outputs, inputs = self._weight.shape
        by_head = heads_of(x, heads, inputs + self._rest)
        out = x.new_empty(len(x), heads, outputs + self._rest)
        out[..., :outputs] = torch.bmm(by_head[..., :inputs].transpose(0, 1), self._transposed).transpose(0, 1)
        out[..., outputs:] = by_head[..., inputs:]
        return out.flatten(1)


class PackedHeads:
    """One packed gemm per head; compiled gemms become one operation of a program."""

    def __init__(self, weight: Tensor, rest: int, gemm: Gemm) -> None:
        self._num, self._outputs, self._inputs = weight.shape
        self._rest = rest
        self._multiply: list[Multiply] = [gemm.pack(each.to(gemm.held).contiguous(), None) for each in weight]

    def __call__(self, x: Value) -> Value:
        if isinstance(x, Symbol):
            return self._trace_program(x)
        by_head = heads_of(x, self._num, self._inputs + self._rest)
        out = x.new_empty(len(x), self._num, self._outputs + self._rest)
        for head, multiply in enumerate(self._multiply):
            out[:, head, : self._outputs] = multiply(by_head[:, head, : self._inputs].contiguous())
        out[..., self._outputs :] = by_head[..., self._inputs :]
        return out.flatten(1)

    def _trace_program(self, x: Symbol) -> Symbol:
        """Append the operation to the program that is being traced."""
        natives = [each for each in self._multiply if isinstance(each, NativeMultiply)]
        if len(natives) < self._num:
            return x.writer.call(partial(_multiply, self), (x,), self._num * (self._outputs + self._rest))
        return x.writer.multiply_heads(x, [LinearWeights(each.weight, None) for each in natives], self._rest)


class TritonHeads:
    """All heads in one Triton launch. `dependent_rows`: fewest tokens with programmatic dependent launch."""

    def __init__(self, weight: Tensor, rest: int, *, dependent_rows: int) -> None:
        self.weight, self._rest, self._dependent_rows = weight.contiguous(), rest, dependent_rows

    def __call__(self, x: Tensor, *, out: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """Multiply. With `out`, write there; rows whose length is 0 in `lengths` [tokens] keep their contents."""
        from quire.kernels.triton.latent import multiply_heads

        dependent = len(x) >= self._dependent_rows
        return multiply_heads(x, self.weight, self._rest, out=out, lengths=lengths, dependent=dependent)


def heads_of(x: Tensor, num: int, dim: int) -> Tensor:  # [tokens, num, dim]
    """Return a view of the first num * dim elements of each row as heads."""
    return x.as_strided((len(x), num, dim), (x.stride(0), dim, 1))


def _multiply(heads: PackedHeads, x: Tensor, given: object) -> Value:  # noqa: ARG001
    """Run inside a program as a Python call."""
    return heads(x)
