"""How an engine is split over ranks: tensor parallel within a layer, pipeline parallel between layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ExecutorName = Literal["single", "processes", "ray", "torchrun"]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """`tensor` ranks share every layer, and `pipeline` stages have some of the layers each. Ranks are numbered stage by
    stage: the ranks of a stage are neighbours."""

    tensor: int = 1
    pipeline: int = 1
    expert: bool = False  # the ranks of a stage have whole experts each, and not a part of every expert
    executor: ExecutorName = "single"

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline

    def place(self, rank: int) -> RankPlace:
        return RankPlace(rank, rank % self.tensor, rank // self.tensor, self)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands."""

    rank: int  # among all
    shard: int  # among the ranks of its stage, from 0
    stage: int
    config: ParallelConfig

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.config.pipeline - 1

    def layers(self, num_layers: int) -> range:
        """The layers of its stage."""
        return share_of(num_layers, self.stage, self.config.pipeline)


NO_PARALLEL = ParallelConfig()


def share_of(count: int, index: int, size: int, multiple: int = 1) -> range:
    """Return which of `count` things in a row belong to the index-th of `size` owners. Shares begin at multiples, and
    differ by at most one of these; the first ones are larger."""
    units = -(-count // multiple)
    each, more = divmod(units, size)
    begin = index * each + min(index, more)
    end = begin + each + (index < more)
    return range(min(begin * multiple, count), min(end * multiple, count))


_MULTIPLES = (128, 64, 32, 16, 8, 4, 2)  # at which shares begin: of tiles, and of groups of quantized weights
_EVEN = 16  # shares of at least so many multiples differ by little


def share_size(count: int, index: int, size: int) -> range:
    """Return the share of an intermediate size or of a vocabulary. Shares begin at a multiple that suits kernels, where
    they stay nearly equal."""
    multiple = next((each for each in _MULTIPLES if count % (each * size) == 0 or count >= _EVEN * each * size), 1)
    return share_of(count, index, size, multiple)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of a rank: contiguous query heads, and the key/value heads that they read."""

    query: range
    kv: range


def share_heads(num_query: int, num_kv: int, index: int, size: int) -> HeadShare:
    """Return the heads of the index-th of `size` ranks. Raises ValueError if there are fewer query heads than ranks.

    With at least as many key/value heads as ranks, a rank has whole groups: a key/value head with all its query heads.
    With fewer, several ranks have the same key/value head and share its query heads.
    """
    group = num_query // num_kv
    if size <= num_kv:
        kv = share_of(num_kv, index, size)
        return HeadShare(range(kv.start * group, kv.stop * group), kv)
    owner = next(head for head in range(num_kv) if index in share_of(size, head, num_kv))
    ranks = share_of(size, owner, num_kv)
    if len(ranks) > group:
        raise ValueError(f"{num_query} query heads cannot be shared by {size} ranks")
    own = share_of(group, index - ranks.start, len(ranks))
    return HeadShare(range(owner * group + own.start, owner * group + own.stop), range(owner, owner + 1))
