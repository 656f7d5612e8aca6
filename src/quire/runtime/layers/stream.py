"""The residual stream, and lazy values that layers hand to the next layer so that it can fuse them.

A norm of the stream is passed on as `Normed`, the output gemm of a layer as `Projected`. A layer whose kernels can fuse
them checks for these types; every other layer calls `value()` for the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from quire.kernels.native.program import Symbol

if TYPE_CHECKING:
    from quire.runtime.layers.adapted import ActiveAdapters
    from quire.runtime.layers.layer_norm import LayerNorm
    from quire.runtime.layers.linear import Linear

Value = Any  # a tensor [tokens, size], a Symbol while a program is traced, or quantized rows


class StreamNorm(Protocol):
    """A norm over the last dimension."""

    def of(self, x: Value) -> Value:
        """Return the norm of x [tokens, size]."""

    def of_sum(self, x: Tensor, change: Tensor) -> Tensor:
        """Add `change` [tokens, size] to x in place and return the norm of the sum."""


class Stream:
    """The residual stream x [tokens, hidden].

    A change may be left `pending` for the next norm, which reads the stream anyway. With `leaves_pending`, for kernels
    that fuse addition and norm, every change is left pending, except for a single row: there the next gemm computes the
    norm. `beside` [tokens, size] are the side inputs of all layers. `adapters` is notified when the stream is narrowed
    to the wanted tokens.
    """

    def __init__(
        self,
        x: Value,
        rows: Tensor | None = None,
        beside: Value | None = None,
        adapters: ActiveAdapters | None = None,
        *,
        leaves_pending: bool = False,
    ) -> None:
        self.x, self.beside, self._adapters, self._leaves_pending = x, beside, adapters, leaves_pending
        self.rows = rows  # [tokens] or None: negative for a padding token, whose values are undefined
        self.pending: Tensor | None = None
        self._wanted: Tensor | None = None
        self._narrows = False

    @property
    def is_empty(self) -> bool:
        """Whether no token is left, so that there is nothing to compute."""
        return isinstance(self.x, Tensor) and len(self.x) == 0

    def add(self, *changes: Value | Projected | PostNormed, scale: float = 1.0) -> None:
        """Add the outputs of layers, each times `scale`. All were computed from the stream before this call."""
        if self._narrows:
            changes = tuple(self._narrow(changes))
        for change in changes:
            self.settle()
            self._add(change, scale)

    def replace_by_norm(self, norm: LayerNorm) -> None:
        """Replace the stream by its norm, for models with a norm after every residual addition."""
        self.x = norm.replace(self.settle())

    def scale(self, factor: float) -> None:
        """Multiply the stream by `factor` in place."""
        x = self.settle()
        if isinstance(x, Symbol):
            x.writer.scale(x, factor)
        else:
            x.mul_(factor)

    def settle(self) -> Value:
        """Add the pending change, if any, and return the stream."""
        if self.pending is not None:
            self.x.add_(self.pending)
            self.pending = None
        return self.x

    def take_pending(self) -> Tensor | None:
        """Return the pending change and clear it. The caller must add it to the stream."""
        pending, self.pending = self.pending, None
        return pending

    def narrow_next(self, wanted: Tensor | None) -> None:
        """Keep only the tokens `wanted` [positions] when the next change is added: the last attention, which needs all
        tokens, has run by then. None keeps all tokens."""
        self._wanted, self._narrows = wanted, wanted is not None or isinstance(self.x, Symbol)

    def narrow(self, wanted: Tensor | None) -> Value:
        """Keep only the tokens `wanted` [positions], now that all layers have run, and return the stream."""
        self.narrow_next(wanted)
        if self._narrows:
            self._narrow(())
        return self.settle()

    def narrowed(self, *changes: Value | Projected) -> list[Value]:
        """Return what was computed from the stream, with the stream narrowed to the wanted tokens if the next change
        would narrow it."""
        return self._narrow(changes) if self._narrows else list(changes)

    def branch(self, x: Value) -> Stream:
        """Return a stream of the same tokens that begins with x [tokens, size], which it overwrites."""
        return Stream(x, self.rows, self.beside, self._adapters, leaves_pending=self._leaves_pending)

    def _narrow(self, changes: tuple[Value | Projected | PostNormed, ...]) -> list[Value | Projected | PostNormed]:
        self._narrows, wanted = False, self._wanted
        x = self.settle()
        if self._adapters is not None:
            self._adapters.narrow()
        if isinstance(x, Symbol):
            self.x = x.writer.select(x, fresh=True)
            self.beside = None if self.beside is None else x.writer.select(self.beside)
            narrowed = [_selected(change, x.writer.select) for change in changes]
            x.writer.narrow()
            return narrowed
        assert wanted is not None
        self.x = x.index_select(0, wanted)
        self.beside = None if self.beside is None else self.beside.index_select(0, wanted)
        self.rows = None  # no padding is wanted
        return [_selected(change, lambda rows: rows.index_select(0, wanted)) for change in changes]

    def _add(self, change: Value | Projected | PostNormed, scale: float) -> None:
        if self.is_empty:
            return
        if isinstance(change, Projected) and change.linear.fused is not None and scale == 1.0:
            self.pending = change.linear.add_to(self.x, change.x)
            return
        value = value_of(change)
        if isinstance(self.x, Symbol):
            self.x.writer.add(self.x, value, scale)
            return
        value = value if scale == 1.0 else value.mul_(scale)
        if self._leaves_pending and len(self.x) > 1:
            self.pending = value
        else:
            self.x.add_(value)


@dataclass(frozen=True, slots=True)
class Normed:
    """A norm of the stream that is not computed yet."""

    stream: Stream
    norm: StreamNorm

    def value(self) -> Value:
        pending = self.stream.take_pending()
        return self.norm.of(self.stream.x) if pending is None else self.norm.of_sum(self.stream.x, pending)


@dataclass(frozen=True, slots=True)
class Projected:
    """The gemm of a linear layer with x that is not computed yet."""

    linear: Linear
    x: Value

    def value(self) -> Value:
        return self.linear(self.x)


@dataclass(frozen=True, slots=True)
class PostNormed:
    """The norm of a layer's output before it is added to the stream; not computed yet."""

    change: Value | Projected
    norm: StreamNorm

    def value(self) -> Value:
        return self.norm.of(value_of(self.change))


def add_in_place(x: Value, y: Value) -> Value:
    """Return x + y [tokens, size]; x is overwritten."""
    if isinstance(x, Symbol):
        x.writer.add(x, y)
        return x
    return x.add_(y)


def value_of(x: Value | Normed | Projected | PostNormed) -> Value:
    """Return the tensor of a lazy value, or x itself."""
    return x.value() if isinstance(x, Normed | Projected | PostNormed) else x


def _selected(change: Value | Projected | PostNormed, select: Any) -> Value | Projected | PostNormed:
    if isinstance(change, PostNormed):
        return PostNormed(_selected(change.change, select), change.norm)
    return Projected(change.linear, select(change.x)) if isinstance(change, Projected) else select(change)
