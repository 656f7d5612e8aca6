"""The residual stream, and the values that layers hand on unfinished so that the next one can take them along.

A norm of the stream is handed on as `Normed`, the last product of a layer as `Projected`. A layer whose kernels join
them with its own work looks for these types; every other asks for the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from quire.kernels.native.program import Symbol

if TYPE_CHECKING:
    from quire.runtime.layers.adapted import ActiveAdapters
    from quire.runtime.layers.linear import Linear

Value = Any  # a tensor [tokens, size]; a Symbol while a program is written; rows that kernels quantized


class StreamNorm(Protocol):
    """A norm over the last dimension."""

    def of(self, x: Value) -> Value:
        """The norm of x [tokens, size]."""

    def of_sum(self, x: Tensor, change: Tensor) -> Tensor:
        """The norm of x + change [tokens, size], which is left in x."""


class Stream:
    """The residual stream x [tokens, hidden].

    A change may be left `pending` for the next norm, which reads the stream anyway. With `leaves_pending`, for kernels
    that add and norm at once, all are, but for those of a single row, whose norm its next product takes along. `beside`
    [tokens, size] is what layers read of tokens besides. `adapters` is told when the stream keeps only the wanted
    tokens.
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
        self.rows = rows  # [tokens], or None: below 0 for a token of padding, whose numbers mean nothing
        self.pending: Tensor | None = None
        self._wanted: Tensor | None = None
        self._narrows = False

    @property
    def is_empty(self) -> bool:
        """Whether no token is left: there is nothing to compute."""
        return isinstance(self.x, Tensor) and len(self.x) == 0

    def add(self, *changes: Value | Projected | PostNormed, scale: float = 1.0) -> None:
        """Add what layers computed from the stream as it was, each times `scale`."""
        if self._narrows:
            changes = tuple(self._narrow(changes))
        for change in changes:
            self.settle()
            self._add(change, scale)

    def renew(self, norm: StreamNorm) -> None:
        """Put its norm in its place, as models with norms after every layer do."""
        self.x = norm.of(self.settle())

    def scale(self, factor: float) -> None:
        """Multiply the stream."""
        x = self.settle()
        if isinstance(x, Symbol):
            x.writer.scale(x, factor)
        else:
            x.mul_(factor)

    def settle(self) -> Value:
        """Add what is pending, and return the stream."""
        if self.pending is not None:
            self.x.add_(self.pending)
            self.pending = None
        return self.x

    def take_pending(self) -> Tensor | None:
        """What is pending, for a kernel that adds it to the stream."""
        pending, self.pending = self.pending, None
        return pending

    def narrow_next(self, wanted: Tensor | None) -> None:
        """Keep only the tokens `wanted` [positions] when the next change comes: it is the last that attention needs all
        tokens for. None: all tokens are."""
        self._wanted, self._narrows = wanted, wanted is not None or isinstance(self.x, Symbol)

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
    """The norm of a stream, not computed yet."""

    stream: Stream
    norm: StreamNorm

    def value(self) -> Value:
        pending = self.stream.take_pending()
        return self.norm.of(self.stream.x) if pending is None else self.norm.of_sum(self.stream.x, pending)


@dataclass(frozen=True, slots=True)
class Projected:
    """A linear layer's product with x, not computed yet."""

    linear: Linear
    x: Value

    def value(self) -> Value:
        return self.linear(self.x)


@dataclass(frozen=True, slots=True)
class PostNormed:
    """The norm of what a layer computed, before it is added to the stream; not computed yet."""

    change: Value | Projected
    norm: StreamNorm

    def value(self) -> Value:
        return self.norm.of(value_of(self.change))


def sum_of(x: Value, y: Value) -> Value:
    """x + y [tokens, size]; x is overwritten."""
    if isinstance(x, Symbol):
        x.writer.add(x, y)
        return x
    return x.add_(y)


def value_of(x: Value | Normed | Projected | PostNormed) -> Value:
    """What was handed on, computed."""
    return x.value() if isinstance(x, Normed | Projected | PostNormed) else x


def _selected(change: Value | Projected | PostNormed, select: Any) -> Value | Projected | PostNormed:
    if isinstance(change, PostNormed):
        return PostNormed(_selected(change.change, select), change.norm)
    return Projected(change.linear, select(change.x)) if isinstance(change, Projected) else select(change)
