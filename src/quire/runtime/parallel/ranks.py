"""A worker's place among the ranks of its engine, and the groups in which it computes."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.parallel import NO_PARALLEL, RankPlace
from quire.runtime.parallel.group import ONE_RANK, RankGroup


@dataclass(frozen=True, slots=True)
class Ranks:
    place: RankPlace
    tensor: RankGroup  # the ranks of this stage, which share every layer
    pipeline: RankGroup  # the ranks with the same shard, one of each stage
    # The same ranks as `pipeline`, for token ids. Hidden states and tokens go opposite ways, and with NCCL an operation
    # of a group waits for the one before it: in one group, a send of each stage could wait for the other's.
    tokens: RankGroup = ONE_RANK

    def close(self) -> None:
        """Release the groups. Idempotent."""
        for group in (self.tensor, self.pipeline, self.tokens):
            group.close()


ALONE = Ranks(NO_PARALLEL.place(0), ONE_RANK, ONE_RANK)
