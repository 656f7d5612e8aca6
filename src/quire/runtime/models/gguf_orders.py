"""Orders of rows, columns and heads, for GGUF files that store them in another order than Hugging Face's
checkpoints. An order lists the stored index of each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]


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
