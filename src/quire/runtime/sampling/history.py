"""The tokens every row holds so far, as the worker keeps them on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """A view of the worker's persistent rows: the sampler reads it and never writes it."""

    tokens: Tensor  # [num_rows, capacity] int32 or int64: prompt, then output
    lengths: Tensor  # [num_rows] int: tokens known of each row
    num_prompt: Tensor  # [num_rows] int: how many of those are prompt
