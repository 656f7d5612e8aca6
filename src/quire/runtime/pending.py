"""Numbers that are still on a device while the host goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Pending(Generic[T_co]):
    """A part of a step's result that is not on the host yet: its tensors, and what they mean once they are there."""

    tensors: tuple[Tensor, ...]
    read: Callable[..., T_co]  # is given the tensors, in their order, on the host

    def finish(self, on_host: Sequence[Tensor]) -> T_co:
        """What the part is, given copies of its tensors on the host; these may be overwritten afterwards."""
        return self.read(*on_host)


def gathered(parts: Sequence[Pending[T]]) -> Pending[tuple[T, ...]]:
    """Several parts as one: what each of them is."""
    return Pending(tuple(tensor for part in parts for tensor in part.tensors), partial(_each, tuple(parts)))


def _each(parts: tuple[Pending[T], ...], *on_host: Tensor) -> tuple[T, ...]:
    numbers = iter(on_host)
    return tuple(part.finish(tuple(islice(numbers, len(part.tensors)))) for part in parts)
