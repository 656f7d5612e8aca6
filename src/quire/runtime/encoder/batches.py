"""Which texts are computed together, and their tokens as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.runtime.layers.texts import Texts


def batches_of(lengths: Sequence[int], max_tokens: int, max_texts: int) -> Iterator[list[int]]:
    """The numbers of texts that are computed together, the longest texts first.

    Neighbours have similar lengths. A batch has at most `max_tokens` tokens, were all its texts as long as the longest.
    """
    batch: list[int] = []
    for text in sorted(range(len(lengths)), key=lambda text: -lengths[text]):
        if batch and (len(batch) == max_texts or (len(batch) + 1) * lengths[batch[0]] > max_tokens):
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch


def pack(texts: Sequence[Sequence[int]], device: torch.device) -> Texts:
    """The tensors of a batch. No text is empty."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    longest, num_texts = int(lengths.max()), len(texts)
    is_token = np.arange(longest) < lengths[:, None]  # [texts, longest]
    places = np.flatnonzero(is_token)
    tokens = np.concatenate([np.asarray(text, np.int64) for text in texts])

    def there(numbers: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(numbers).to(device)

    if is_token.all():
        return Texts(there(tokens), there(places % longest), there(lengths), longest)
    mask = there(is_token).view(num_texts, 1, 1, longest)
    return Texts(there(tokens), there(places % longest), there(lengths), longest, there(places), mask)
