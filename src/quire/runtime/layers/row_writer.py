"""Traces layers into the phases of the GPU kernel that runs a step of one row (`kernels/cuda/row_phases.py`).

As with the programs of the compiled CPU kernels, layers are called with a symbol in place of a tensor. If a layer does
something with it that no phase supports, tracing stops with Untraceable.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.norm import Norm
from quire.runtime.attention.backend import LayerCache

if TYPE_CHECKING:
    from quire.kernels.cuda.row_phases import Phase
    from quire.runtime.layers.gemm import FusedMultiply
    from quire.runtime.layers.modules import HeadNorm


class Untraceable(Exception):
    """A layer does something that no phase of the row kernel supports."""


class RowSymbol:
    """Stands for a vector [1, width] during tracing. Every tensor operation on it raises Untraceable."""

    __slots__ = ("is_read", "kind", "vector", "width", "writer")

    def __init__(self, writer: RowWriter, kind: str, width: int, vector: Tensor | None) -> None:
        self.writer, self.kind, self.width = writer, kind, width
        self.vector = vector  # [width]; None: the residual stream
        self.is_read = False

    def _refuse(self, *_: object) -> NoReturn:
        raise Untraceable("a layer applies an operation to the row that no phase supports")

    def __getattr__(self, name: str) -> NoReturn:
        raise Untraceable(f"a layer uses {name!r} of the row")

    @classmethod
    def __torch_function__(cls, function: Any, *_: object) -> NoReturn:
        raise Untraceable(f"a layer calls {getattr(function, '__name__', function)!r} with the row")

    __len__ = __iter__ = __getitem__ = __setitem__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __pow__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


class StepPlaceholder:
    """Stands for the inputs of a step during tracing. Reading them raises Untraceable, because the trace serves all
    steps."""

    def _refuse(self, *_: object) -> NoReturn:
        raise Untraceable("a layer computes with the inputs of the step")

    def __getattr__(self, name: str) -> NoReturn:
        raise Untraceable(f"a layer reads {name!r} of the step")

    __len__ = __iter__ = __getitem__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


class RowWriter:
    """Collects the phases of a trace. Vectors between layers are reused: each is read by one phase, and then its memory
    serves the next vector of the same kind and width."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.phases: list[Phase] = []
        self.stream = RowSymbol(self, "stream", width, None)
        self.max_length = sys.maxsize  # longest sequence that the rotary tables cover
        self._dtype, self._device = dtype, device
        self._spare: dict[tuple[str, int], list[Tensor]] = {}
        self._num_unread = 0  # vectors that a phase writes and no phase reads yet

    def multiply(
        self, x: RowSymbol, multiply: FusedMultiply, *, norm: Norm | None = None, activation: str | None = None
    ) -> RowSymbol:
        """Append the gemm of x, or of RMSNorm(x); with an activation, activation(gate) * up of it. Returns the result's
        symbol."""
        outputs, kind = self._outputs(multiply), "gemv" if activation is None else "gated"
        out = self._new(kind, outputs if activation is None else outputs // 2)
        self._write_gemv(x, multiply, out, norm=norm, activation=activation)
        return out

    def add_gemv(self, target: RowSymbol, x: RowSymbol, multiply: FusedMultiply) -> None:
        """Append the gemm of x, added to the stream. Raises Untraceable if a vector computed from the stream is still
        unread: otherwise a slow thread block could still need the values that this phase overwrites."""
        if target is not self.stream or self._outputs(multiply) != target.width:
            raise Untraceable("a gemm is added to something other than the residual stream")
        self._write_gemv(x, multiply, target, adds=True)
        if self._num_unread:
            raise Untraceable("the stream is changed while a vector computed from it is still unread")

    def attend(
        self, x: RowSymbol, heads: Heads, cache: LayerCache, rule: AttentionRule, norm: HeadNorm | None,
        angles: Tensor | None,
    ) -> RowSymbol:  # fmt: skip
        """Append attention over x: query, key and value heads. angles: rotary table for every position, or None."""
        from quire.kernels.cuda.row_phases import AttentionPhase
        from quire.kernels.triton.rotary import HeadNorms

        if x.vector is None or x.width != heads.query_size + 2 * heads.kv_size:
            raise Untraceable("the input of attention is not queries, keys and values")
        if norm is not None and norm.of_values:
            raise Untraceable("value heads are normed")
        if angles is not None:
            self.max_length = min(self.max_length, len(angles))
        norms = None if norm is None else HeadNorms(norm.of_queries, norm.of_keys, norm.eps)
        out = self._new("attended", heads.query_size)
        assert out.vector is not None
        phase = AttentionPhase(
            x.vector, out.vector, heads.num_query, heads.num_kv, heads.dim, norms, angles, cache.key, cache.value,
            cache.scales, cache.table, rule,
        )  # fmt: skip
        self._read(x)
        self.phases.append(phase)
        return out

    def _write_gemv(
        self, x: RowSymbol, multiply: FusedMultiply, out: RowSymbol, *, norm: Norm | None = None,
        activation: str | None = None, adds: bool = False,
    ) -> None:  # fmt: skip
        from quire.kernels.cuda.row_phases import GemvPhase

        weight = multiply.row_weight
        assert weight is not None
        self._read(x)
        self.phases.append(GemvPhase(weight, x.vector, out.vector, multiply.bias, norm, activation, adds))

    def _outputs(self, multiply: FusedMultiply) -> int:
        from quire.kernels.cuda.row_phases import count_outputs

        weight = multiply.row_weight
        if weight is None:
            raise Untraceable(f"{type(multiply).__name__} has a weight format that no phase supports")
        return count_outputs(weight)

    def _new(self, kind: str, width: int) -> RowSymbol:
        spare = self._spare.setdefault((kind, width), [])
        vector = spare.pop() if spare else torch.zeros(width, dtype=self._dtype, device=self._device)
        self._num_unread += 1
        return RowSymbol(self, kind, width, vector)

    def _read(self, x: RowSymbol) -> None:
        if x.vector is None:
            return
        if x.is_read:
            raise Untraceable("a vector is read twice")
        x.is_read = True
        self._num_unread -= 1
        self._spare[x.kind, x.width].append(x.vector)
