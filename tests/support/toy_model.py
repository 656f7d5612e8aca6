"""A pretend model: what comes next is a hash of all that came before. Every answer can be told in advance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

VOCAB = 97
_PRIME = 2**61 - 1
_KNOWN = 64  # tokens between the digests that are kept
_FACTORS = 7 * np.arange(VOCAB) + 11


def digest(history: Sequence[int], start: int = 0) -> int:
    num_known = len(history) // _KNOWN * _KNOWN
    value = _digest_known(tuple(history[:num_known]), start) if num_known else start
    for token in history[num_known:]:
        value = (value * 1_000_003 + token + 1) % _PRIME
    return value


@lru_cache(maxsize=10_000)
def _digest_known(history: tuple[int, ...], start: int) -> int:
    """Of a long history, which is asked for once for each token that follows."""
    value = _digest_known(history[:-_KNOWN], start) if len(history) > _KNOWN else start
    for token in history[-_KNOWN:]:
        value = (value * 1_000_003 + token + 1) % _PRIME
    return value


def next_token(history: Sequence[int], seed: int, index: int, allowed: npt.NDArray[np.bool_] | None = None) -> int:
    """What the pretend model says after `history`. Sample index and seed matter, as they would when sampling.

    Of the allowed tokens it says the one that it would have said, or the next higher one.
    """
    wanted = digest(history, seed % 1_000_003 + 31 * index) % VOCAB
    if allowed is None:
        return wanted
    return int(np.argmax(np.roll(allowed, -wanted)) + wanted) % VOCAB


def logprob(history: Sequence[int], token: int) -> float:
    return float(all_logprobs(history)[token])


def all_logprobs(history: Sequence[int]) -> npt.NDArray[np.float32]:
    """How likely each token is after `history`: [VOCAB]. Few enough different values that equals occur."""
    value = digest(history) % 1_000_003
    return (-((value * _FACTORS) % 4_093) / 512).astype(np.float32)


def continuation(
    prompt: Sequence[int], length: int, *, seed: int = 0, index: int = 0, end_ids: Sequence[int] = ()
) -> list[int]:
    """The answer any correct engine must give."""
    history, start = list(prompt), len(prompt)
    while len(history) - start < length:
        history.append(next_token(history, seed, index))
        if history[-1] in end_ids:
            break
    return history[start:]
