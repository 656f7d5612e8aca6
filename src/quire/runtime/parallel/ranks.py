"""Where a worker stands among the ranks of its engine, and the groups in which it computes."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.parallel import NO_PARALLEL, RankPlace
from quire.runtime.parallel.group import ONE_RANK, RankGroup


@dataclass(frozen=True, slots=True)
class Ranks:
    place: RankPlace
    tensor: RankGroup  # the ranks of this stage, which share every layer
    pipeline: RankGroup  # the ranks with the same shard, one of each stage
    # The same ranks: token ids go back over it. Where an operation of a group waits for the one before it, as with
    # NCCL, it must be another group than `pipeline`, as hidden states and tokens go opposite ways. None: `pipeline`.
    tokens: RankGroup | None = None


ALONE = Ranks(NO_PARALLEL.place(0), ONE_RANK, ONE_RANK)
