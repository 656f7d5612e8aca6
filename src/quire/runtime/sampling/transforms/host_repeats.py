"""Repetitions of the last tokens of one row, found on the host: one scan for the last token, then only its places."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from quire.runtime.sampling.samples import Longs


def repetitions(
    tokens: npt.NDArray[np.int32], most: int, breakers: Collection[int] = ()
) -> Iterator[tuple[int, Longs]]:
    """Yield for each length from 1 to `most` the places, but the last, up to which so many tokens equal the last ones,
    until there are none. A breaker equals nothing."""
    if not len(tokens) or int(tokens[-1]) in breakers:
        return
    places = np.flatnonzero(tokens[:-1] == tokens[-1])
    for length in range(1, most + 1):
        if not len(places):
            return
        yield length, places
        if length + 1 >= len(tokens) or int(tokens[-1 - length]) in breakers:
            return
        places = places[places >= length]
        places = places[tokens[places - length] == tokens[-1 - length]]
