"""Repetitions of the last tokens of one row, found on the host: one scan for the last token, then only its places, or
all of the row while these are many."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from quire.runtime.sampling.samples import Longs

_SCAN_SHARE = 32  # a scan of the row costs as much as looking at 1 / _SCAN_SHARE of its places


def repetitions(
    tokens: npt.NDArray[np.int32], most: int, breakers: Collection[int] = ()
) -> tuple[Longs, npt.NDArray[np.uint8]]:
    """Return the places, but the last, up to which one token or more equal the last ones, and how many do, at most
    `most`, which is below 256. A breaker equals nothing."""
    width = len(tokens) - 1
    if width < 1 or most < 1 or int(tokens[-1]) in breakers:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint8)
    equal = tokens[:-1] == tokens[-1]
    lengths, found = equal.view(np.uint8).copy(), np.flatnonzero(equal)
    places = found if len(found) * _SCAN_SHARE <= width else None
    for back in range(1, min(most, width)):
        last = int(tokens[-1 - back])
        if last in breakers:
            break
        if places is None:
            equal[back:] &= tokens[: width - back] == last
            equal[:back] = False
            lengths += equal
            if np.count_nonzero(equal) * _SCAN_SHARE <= width:
                places = np.flatnonzero(equal)
            continue
        places = places[places >= back]
        places = places[tokens[places - back] == last]
        if not len(places):
            break
        lengths[places] += 1
    return found, lengths[found]
