"""Tensors of layers that GGUF files store in another layout than Hugging Face's checkpoints: which stored tensors they
are made of, and how."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.config.model import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

Order = NDArray[np.int64]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rearranged:
    """A tensor of a layer, made of stored ones.

    `parts`: their names, as `GgufFamily` translates them, and the shapes that they must have; sizes of 1 may be left
    out. `rows` and `columns`: for each row or column of the tensor the stored one, of a single part; None: as stored.
    `restore` makes the tensor of the numbers of its parts, whose rows are in order then; None: they are its numbers,
    and a quantized matrix stays quantized.
    """

    parts: Mapping[str, Shape]
    shape: Shape
    rows: Order | None = None
    columns: Order | None = None
    restore: Callable[..., Tensor] | None = None

    @property
    def first(self) -> str:
        return next(iter(self.parts))


def shared_gates(config: ModelConfig, names: Collection[str]) -> dict[str, Rearranged]:
    """The gates of shared experts: matrices of one row, which files may store as vectors."""
    shape = (1, config.hidden_size)
    return {name: Rearranged({name: shape}, shape) for name in names if name.endswith(".mlp.shared_expert_gate.weight")}


def in_order(order: Order) -> Order | None:
    """None where nothing moves."""
    return None if np.array_equal(order, np.arange(len(order))) else order


def expand_order(order: Order, size: int) -> Order:
    """The order of rows, given the order of heads that have `size` rows each."""
    return (order[:, None] * size + np.arange(size)).reshape(-1)


def grouped_heads(groups: int, heads: int) -> Order:
    """For each head, where those of a group are side by side, the stored one, where the first heads of all groups come
    first, then the second ones."""
    return np.arange(heads).reshape(heads // groups, groups).T.reshape(-1)


def apart(groups: int, sizes: tuple[int, ...]) -> list[Order]:
    """The rows of each of several parts, where a group has its rows of all parts side by side."""
    rows = np.arange(groups * sum(sizes)).reshape(groups, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]
