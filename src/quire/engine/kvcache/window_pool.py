"""The block pool of models in which every layer has a sliding window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.config.kv_cache import KVGroups
from quire.engine.kvcache.grouped_pool import GroupedPool
from quire.types.errors import OutOfBlocks

_IDS_PER_BLOCK = 8  # ids per block of memory from which cached ids are evicted before new ids are made


class WindowPool(GroupedPool):
    """A GroupedPool for models without any layer that keeps all tokens. The blocks in block tables and in the prefix
    tree are only ids, one for each block of tokens. An id has memory, its single window block, only while it is in the
    window of some table or idle (see GroupedPool).

    Tables and the tree list the ids of all tokens, so prefixes are found and shared as in any pool. Ids are created
    when they are needed. `num_blocks`, `num_free` and `num_used` count memory, and plans name memory only
    (`memory_of`).
    """

    names_memory = True

    def __init__(self, num_blocks: int, groups: KVGroups, block_size: int, max_chunk: int) -> None:
        super().__init__(num_blocks, groups, block_size, max_chunk)
        self._width, self._num_memory = 1, num_blocks
        self._free_ids = self._free.copy()  # `_free` lists the free memory

    @property
    def num_blocks(self) -> int:
        return self._num_memory

    @property
    def num_takeable(self) -> int:
        return self.num_free

    @property
    def num_used(self) -> int:
        return len(self._readers)

    @property
    def num_reusable(self) -> int:
        return len(self._idle) + len(self._ends)

    @property
    def num_shared(self) -> int:
        """Ids in the window of more than one table."""
        return sum(count > 1 for count in self._readers.values())

    def memory_of(self, block: int) -> int | None:
        memory = self._windows.get(block)
        return None if memory is None else memory[0]

    def memory_blocks(self, block: int) -> tuple[int, ...]:
        return self._windows.get(block, ())

    def with_windows(self, num_blocks: int, num_sequences: int = 1) -> int:
        return min(num_blocks, num_sequences * super().with_windows(num_blocks))

    # -------------------------------------------------------------------------------------------------- allocating
    def take(self, count: int) -> list[int]:
        if count > self.num_free:
            raise OutOfBlocks(f"kv cache: {count} blocks needed, {self.num_free} of {self.num_blocks} are free")
        self._make_free(count)
        self.num_free -= count
        blocks = self._take_ids(count)
        for block in blocks:
            self._windows[block] = (self._free.pop(),)
            self._readers[block] = 1
        return blocks

    def num_taken(self, *, in_window: bool) -> int:
        return int(in_window)

    def take_bare(self) -> int:
        return self._take_ids(1)[0]

    def _take_ids(self, count: int) -> list[int]:
        free, total = self._free_ids, self.num_ids
        if len(free) < count and self.num_evictable and total > _IDS_PER_BLOCK * self.num_blocks:
            free.extend(self._evict_cached(count))
        if (missing := count - len(free)) > 0:
            self._holders += [0] * missing
            free[:0] = range(total + missing - 1, total - 1, -1)
        taken = free[: -count - 1 : -1]
        del free[len(free) - count :]
        for block in taken:
            self._holders[block] = 1
        return taken

    def _make_free(self, count: int) -> None:
        free = self._free
        while len(free) < count and self._idle:
            self._evict_windows(self._idle)
        while len(free) < count and self.num_evictable:
            self._free_ids.extend(self._evict_cached(count - len(free)))
        while len(free) < count:
            self._evict_windows(self._ends)

    def note_evictable(self, count: int) -> None:
        self.num_evictable += count

    def add_free(self, blocks: Sequence[int]) -> None:
        self.num_evictable -= len(blocks)
        self._free_ids.extend(reversed(blocks))
        for block in blocks:
            self._drop_sides(block)

    def _add_unheld(self, blocks: Sequence[int]) -> None:
        self._free_ids.extend(blocks)
        for block in blocks:
            self._drop_sides(block)

    def take_assigned(self) -> dict[int, tuple[int, ...]]:
        """Return nothing: plans name memory, so workers need not know which id it belongs to."""
        self._assigned.clear()
        return {}

    def held_among(self, blocks: Iterable[int]) -> set[int]:
        memory = {self._windows[block][0] for block in self._readers}
        return {block for block in blocks if block in memory or (block >= self.num_blocks and self._is_held(block))}

    def check(self, num_cached: int = 0) -> None:
        memory = [each for (each,) in self._windows.values()]
        assert sorted([*memory, *self._free]) == list(range(self.num_blocks))
        assert self._windows.keys() == self._readers.keys() | self._idle.keys() | self._ends.keys()
        assert len(self._windows) == len(self._readers) + len(self._idle) + len(self._ends)
        assert self.num_free == len(self._free) + len(self._idle) + len(self._ends)
        free_ids = set(self._free_ids)
        assert len(free_ids) == len(self._free_ids)
        assert not free_ids & self._windows.keys()
        assert sum(count > 0 for count in self._holders) + len(free_ids) + num_cached == self.num_ids
        assert self._num_shared == sum(count > 1 for count in self._holders)
        if self.states is not None:
            self.states.check()
