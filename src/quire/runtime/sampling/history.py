"""The token history of every row, in the worker's device memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """A read-only view of the worker's persistent rows for the sampler."""

    tokens: Tensor  # [num_rows, capacity] int32 or int64: prompt, then output
    lengths: Tensor  # [num_rows] int: known tokens of each row
    num_prompt: Tensor  # [num_rows] int: prompt tokens of each row
