"""The physical blocks and who counts as holding them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.engine.kvcache.eviction.base import IdleOrder
from quire.engine.kvcache.eviction.lru import LeastRecent
from quire.types.errors import OutOfBlocks


def _nobody_asks(block: int) -> None:
    """Who keeps nothing needs no word of an eviction."""


class BlockPool:
    """Hands out physical block ids and counts their holders. Knows nothing of tokens.

    What was freed last goes out first: its memory is warm, and memory that was never needed stays untouched. A block
    marked by `keep` is idle, not free, once nobody holds it: only when nothing is free is the one that `order` says
    taken back, after `on_evict` was told.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[int], None] = _nobody_asks, order: IdleOrder | None = None
    ) -> None:
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept = bytearray(num_blocks)
        self._idle: IdleOrder = LeastRecent() if order is None else order  # kept and not held
        self._on_evict = on_evict
        self._num_shared = 0
        self.num_free = num_blocks  # blocks that can be taken, idle ones included
        self.num_evicted = 0  # since the start

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders) - self.num_free

    @property
    def num_shared(self) -> int:
        """Blocks with more than one holder."""
        return self._num_shared

    def take(self) -> int:
        if self._free:
            block = self._free.pop()
        elif self.num_free:
            block = self._idle.evict()
            self._kept[block] = False
            self.num_evicted += 1
            self._on_evict(block)
        else:
            raise OutOfBlocks(f"kv cache: all {len(self._holders)} blocks are in use")
        self._holders[block] = 1
        self.num_free -= 1
        return block

    def share(self, block: int) -> int:
        """One more holder of a block that is held or idle."""
        holders = self._holders[block]
        if holders == 0:
            if not self._kept[block]:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._idle.remove(block)
            self.num_free -= 1
        self._num_shared += holders == 1
        self._holders[block] = holders + 1
        return block

    def release(self, block: int) -> None:
        holders = self._holders[block] - 1
        if holders < 0:
            raise ValueError(f"block {block} was released more often than it was held")
        self._holders[block] = holders
        if holders == 0:
            self.num_free += 1
            if self._kept[block]:
                self._idle.add(block)
            else:
                self._free.append(block)
        elif holders == 1:
            self._num_shared -= 1

    def keep(self, blocks: Iterable[int]) -> None:
        """From now on these held blocks outlive their holders, and nobody may write to them."""
        for block in blocks:
            if self._holders[block] == 0:
                raise ValueError(f"block {block} is held by nobody and cannot be kept")
            self._kept[block] = True

    def forget_kept(self) -> int:
        """Keep no block any longer; returns how many idle ones that freed."""
        freed = len(self._idle)
        self._free.extend(self._idle)
        self._idle.clear()
        self._kept = bytearray(len(self._kept))
        return freed

    def is_writable(self, block: int) -> bool:
        """Whether its one holder may write to it."""
        return self._holders[block] == 1 and not self._kept[block]

    def is_kept(self, block: int) -> bool:
        return bool(self._kept[block])

    def holders(self, block: int) -> int:
        return self._holders[block]

    def all_holders(self) -> tuple[int, ...]:
        """The number of holders of every block, by its id."""
        return tuple(self._holders)

    def idle_blocks(self) -> tuple[int, ...]:
        """Idle longest first."""
        return tuple(self._idle)

    def check(self) -> None:
        assert sorted([*self._free, *self._idle]) == [block for block, count in enumerate(self._holders) if count == 0]
        assert self.num_free == len(self._free) + len(self._idle)
        assert all(self._kept[block] for block in self._idle)
        assert not any(self._kept[block] for block in self._free)
        assert min(self._holders, default=0) >= 0
        assert self._num_shared == sum(count > 1 for count in self._holders)
