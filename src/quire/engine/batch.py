"""What a step has to say, put together for all its rows at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.engine.paced import Judged
from quire.engine.scheduler.rows import RowBook
from quire.types.step import NO_ROWS, Ints, TokenLogprobs

Batch = tuple[npt.NDArray[np.int64], Ints, tuple[tuple[int, TokenLogprobs], ...]]  # sample handles, tokens, logprobs
NOTHING: Batch = (np.empty(0, dtype=np.int64), NO_ROWS, ())


class Gathered(NamedTuple):
    """The row book's columns for some rows, as of one version of the book."""

    rows: Ints
    version: int
    leases: npt.NDArray[np.int64]
    handles: npt.NDArray[np.int64]
    heard: npt.NDArray[np.bool_] | None  # [rows], False where nothing is said before the end; None: nowhere
    end_ids: Ints  # [rows, k]
    limits: Ints

    @classmethod
    def of(cls, rows: Ints, book: RowBook) -> Gathered:
        handles = book.handles[rows]
        heard = handles >= 0 if book.num_unheard else None
        return cls(rows, book.version, book.leases[rows], handles, heard, book.end_ids[rows], book.limits[rows])


NOBODY = Gathered(NO_ROWS, -1, NOTHING[0], NOTHING[0], None, NO_ROWS, NO_ROWS)


def say(
    gathered: Gathered, tokens: Ints, judged: list[Judged], logprobs: tuple[tuple[int, TokenLogprobs], ...]
) -> Batch:
    """What a step has to say: a token of each row that runs ahead, then all that paced ones grew by, each in order."""
    handles = gathered.handles
    if gathered.heard is not None:
        handles, tokens = handles[gathered.heard], tokens[gathered.heard]
    said = [(sequence.handle, verdict.tokens) for sequence, verdict in judged if not sequence.group.is_ranked]
    if said:
        handles = np.concatenate([handles, np.repeat([handle for handle, _ in said], [len(t) for _, t in said])])
        tokens = np.concatenate([tokens, np.array([token for _, t in said for token in t], dtype=np.int32)])
    return handles, tokens, logprobs
