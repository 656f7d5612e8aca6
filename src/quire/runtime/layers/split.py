"""Which part of a layer's inputs or outputs a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.config.model import Heads, Recurrent
from quire.config.parallel import HeadShare, share_heads, share_of, share_size
from quire.runtime.parallel.group import ONE_RANK, RankGroup


@dataclass(frozen=True, slots=True)
class Split:
    """Rising runs of numbers out of `total` that belong to this rank."""

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
        """All own numbers."""
        return torch.cat([torch.arange(run.start, run.stop) for run in self.own])

    def times(self, width: int) -> Split:
        """Where each of the numbers stands for `width`."""
        return Split(self.total * width, tuple(range(run.start * width, run.stop * width) for run in self.own))

    def of(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The own part of a tensor along a dimension: a view where it is one run."""
        if self.is_whole:
            return tensor
        parts = [tensor.narrow(dim, run.start, len(run)) for run in self.own]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def as_split(size: int | Split) -> Split:
    return size if isinstance(size, Split) else Split.whole(size)


def behind(*splits: Split) -> Split:
    """Several, one behind the other, as one."""
    runs: list[range] = []
    begin = 0
    for split in splits:
        runs += [range(begin + run.start, begin + run.stop) for run in split.own if len(run)]
        begin += split.total
    return Split(begin, tuple(runs))


@dataclass(frozen=True, slots=True)
class RecurrentSplits:
    """Of the heads of recurrent layers: `groups` are key heads with the value heads that share them."""

    groups: Split
    keys: Split  # all numbers of key heads
    values: Split
    value_heads: Split


class RankSplits:
    """How one rank of a tensor parallel group splits layers. With one rank everything is whole. `whole_experts`: a rank
    has some experts, and not a part of every expert."""

    def __init__(self, group: RankGroup, *, whole_experts: bool = False) -> None:
        self.group = None if group is ONE_RANK else group  # None: nothing is summed
        self.whole_experts = whole_experts
        self._place = (group.index, group.size)

    def size(self, count: int) -> Split:
        """Of an intermediate size, or of a vocabulary."""
        return Split(count, (share_size(count, *self._place),))

    def experts(self, num: int) -> range:
        """Those that this rank holds, or has a part of."""
        return share_of(num, *self._place) if self.whole_experts else range(num)

    def expert_size(self, size: int) -> Split:
        """Of the intermediate size of an expert that this rank holds."""
        return Split.whole(size) if self.whole_experts else self.size(size)

    def heads(self, heads: Heads) -> Heads:
        """The heads of this rank."""
        share = self._share(heads)
        return Heads(len(share.query), len(share.kv), heads.dim, heads.latent)

    def query(self, heads: Heads, dim: int | None = None) -> Split:
        """Of all query heads, each of `dim` numbers."""
        return _of_heads(heads.num_query, self._share(heads).query, heads.dim if dim is None else dim)

    def kv(self, heads: Heads) -> Split:
        return _of_heads(heads.num_kv, self._share(heads).kv, heads.dim)

    def qkv(self, heads: Heads) -> Split:
        """Of queries, keys and values in one matrix."""
        kv = self.kv(heads)
        return behind(self.query(heads), kv, kv)

    def num_holders(self, heads: Heads) -> int:
        """How many ranks hold the key/value heads of this one."""
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
