"""Describes layer tensors that GGUF files store in another layout than Hugging Face's checkpoints."""

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
    """A layer tensor that is computed from stored tensors.

    `parts`: their names, as `GgufFamily` translates them, and the shapes they must have; dimensions of size 1 may be
    missing. `rows` and `columns`: the stored row or column of each row or column of the tensor, if it has a single
    part; None: in order. `restore` computes the tensor from the dequantized parts, after reordering; without it the
    values are unchanged and a quantized matrix stays quantized.
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
    """Describe the gates of shared experts: matrices of one row, which files may store as vectors."""
    shape = (1, config.hidden_size)
    return {name: Rearranged({name: shape}, shape) for name in names if name.endswith(".mlp.shared_expert_gate.weight")}


def in_order(order: Order) -> Order | None:
    """Return the order, or None if it is the identity."""
    return None if np.array_equal(order, np.arange(len(order))) else order


def expand_order(order: Order, size: int) -> Order:
    """Return the order of rows, given the order of heads with `size` rows each."""
    return (order[:, None] * size + np.arange(size)).reshape(-1)


def grouped_heads(groups: int, heads: int) -> Order:
    """Return the order that makes the heads of each group adjacent, for files that store the first heads of all groups,
    then the second ones."""
    return np.arange(heads).reshape(heads // groups, groups).T.reshape(-1)


def ungrouped_rows(groups: int, sizes: tuple[int, ...]) -> list[Order]:
    """Return the row indices of each part, for a matrix that stores the rows of all parts group by group."""
    rows = np.arange(groups * sum(sizes)).reshape(groups, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]
