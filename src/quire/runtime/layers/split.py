"""Which part of a layer's inputs or outputs a rank holds (tensor parallelism)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.config.model import Heads
from quire.config.parallel import HeadShare, share_heads, share_of, share_size
from quire.config.recurrent import Recurrent
from quire.runtime.parallel.group import ONE_RANK, RankGroup


@dataclass(frozen=True, slots=True)
class Split:
    """The indices out of `total` that this rank holds, as ascending ranges."""

    total: int
    own: tuple[range, ...]

    @staticmethod
    def whole(total: int) -> Split:
        return Split(total, (range(total),))

    @property
    def count(self) -> int:
        return sum(map(len, self.own))

    @property
    def is_whole(self) -> bool:
        return self.count == self.total

    @property
    def index(self) -> Tensor:
        """All indices that this rank holds, int64."""
        return torch.cat([torch.arange(run.start, run.stop) for run in self.own])

    def times(self, width: int) -> Split:
        """Return the split of a dimension in which each index stands for `width` consecutive elements."""
        return Split(self.total * width, tuple(range(run.start * width, run.stop * width) for run in self.own))

    def of(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's part of a tensor along `dim`: a view if the split is one range."""
        if self.is_whole:
            return tensor
        parts = [tensor.narrow(dim, run.start, len(run)) for run in self.own]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def as_split(size: int | Split) -> Split:
    return size if isinstance(size, Split) else Split.whole(size)


def concat_splits(*splits: Split) -> Split:
    """Concatenate several splits into one."""
    runs: list[range] = []
    begin = 0
    for split in splits:
        runs += [range(begin + run.start, begin + run.stop) for run in split.own if len(run)]
        begin += split.total
    return Split(begin, tuple(runs))


@dataclass(frozen=True, slots=True)
class RecurrentSplits:
    """How this rank shares the heads of recurrent layers. `groups` are key heads, each with the value heads that use
    it."""

    groups: Split
    keys: Split  # elements of all key heads
    values: Split
    value_heads: Split


class RankSplits:
    """How one rank of a tensor parallel group splits layers. With one rank everything is whole. `whole_experts`: each
    rank holds some whole experts (expert parallelism) instead of a shard of every expert."""

    def __init__(self, group: RankGroup, *, whole_experts: bool = False) -> None:
        self.group = None if group is ONE_RANK else group  # None: nothing is summed
        self.whole_experts = whole_experts
        self._place = (group.index, group.size)

    def size(self, count: int) -> Split:
        """Split an intermediate size or a vocabulary."""
        return Split(count, (share_size(count, *self._place),))

    def experts(self, num: int) -> range:
        """Return the experts of which this rank holds weights."""
        return share_of(num, *self._place) if self.whole_experts else range(num)

    def expert_size(self, size: int) -> Split:
        """Split the intermediate size of an expert."""
        return Split.whole(size) if self.whole_experts else self.size(size)

    def heads(self, heads: Heads) -> Heads:
        """Return the number of heads of this rank."""
        share = self._share(heads)
        return Heads(len(share.query), len(share.kv), heads.dim, heads.latent)

    def query(self, heads: Heads, dim: int | None = None) -> Split:
        """Split the outputs of all query heads, `dim` per head."""
        return _of_heads(heads.num_query, self._share(heads).query, heads.dim if dim is None else dim)

    def kv(self, heads: Heads) -> Split:
        return _of_heads(heads.num_kv, self._share(heads).kv, heads.dim)

    def qkv(self, heads: Heads) -> Split:
        """Split queries, keys and values stored in one matrix."""
        kv = self.kv(heads)
        return concat_splits(self.query(heads), kv, kv)

    def num_holders(self, heads: Heads) -> int:
        """Return how many ranks hold the same key/value heads as this one."""
        own, size = self._share(heads).kv, self._place[1]
        return sum(share_heads(heads.num_query, heads.num_kv, rank, size).kv == own for rank in range(size))

    def recurrent(self, sizes: Recurrent) -> RecurrentSplits:
        share = share_heads(sizes.value_heads, sizes.key_heads, *self._place)
        return RecurrentSplits(
            _of_heads(sizes.key_heads, share.kv, 1),
            _of_heads(sizes.key_heads, share.kv, sizes.key_dim),
            _of_heads(sizes.value_heads, share.query, sizes.value_dim),
            _of_heads(sizes.value_heads, share.query, 1),
        )

    def _share(self, heads: Heads) -> HeadShare:
        return share_heads(heads.num_query, heads.num_kv, *self._place)


def _of_heads(num: int, own: range, dim: int) -> Split:
    return Split(num, (own,)).times(dim)
