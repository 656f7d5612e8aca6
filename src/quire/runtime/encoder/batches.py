"""Divides texts into batches, and packs their tokens into tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.runtime.layers.texts import Texts


def batches_of(lengths: Sequence[int], max_tokens: int, max_texts: int) -> Iterator[list[int]]:
    """Yield the indices of the texts of each batch, the longest texts first.

    Texts of a batch have similar lengths. Its number of texts times the length of its longest is at most `max_tokens`,
    unless it has only one text.
    """
    batch: list[int] = []
    for text in sorted(range(len(lengths)), key=lambda text: -lengths[text]):
        if batch and (len(batch) == max_texts or (len(batch) + 1) * lengths[batch[0]] > max_tokens):
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch


def pack(texts: Sequence[Sequence[int]], device: torch.device, first_parts: Sequence[int] = ()) -> Texts:
    """Return the tensors of a batch. No text is empty. `first_parts`: how many tokens of each text have type 0; the
    others have type 1. If empty, all tokens have type 0."""
    counts = list(map(len, texts))
    lengths = np.fromiter(counts, np.int64, len(counts))
    num_tokens, starts = int(lengths.sum()), np.repeat(lengths.cumsum() - lengths, lengths)
    tokens = np.fromiter(chain.from_iterable(texts), np.int64, num_tokens)
    positions = np.arange(num_tokens) - starts
    runs = tuple((len(list(same)), length) for length, same in groupby(counts))

    def upload(numbers: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(numbers).to(device)

    types = None
    if first_parts:
        types = upload((positions >= np.repeat(np.asarray(first_parts, np.int64), lengths)).astype(np.int64))
    if len(runs) == 1 or device.type == "cpu":
        return Texts(upload(tokens), upload(positions), upload(lengths), runs, types)
    longest, num_texts = max(counts), len(counts)
    is_token = np.arange(longest) < lengths[:, None]  # [texts, longest]
    places, mask = upload(np.flatnonzero(is_token)), upload(is_token).view(num_texts, 1, 1, longest)
    return Texts(upload(tokens), upload(positions), upload(lengths), runs, types, places, mask)
