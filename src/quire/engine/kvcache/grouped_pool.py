"""The block pool for models with groups of layers: sliding window layers, recurrent layers, or both. Each block has
side blocks: the window blocks, in which layers with a sliding window keep its tokens, and the state of recurrent layers
after its last token."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from quire.config.kv_cache import KVGroups
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.state_slots import StateSlots
from quire.types.errors import OutOfBlocks

_GAINS = 1_024  # how many of the last gains of side blocks by cached blocks the pool remembers


class BlockPath(Protocol):
    """The blocks of a sequence, in order: a list, or the path to a node of the prefix tree."""

    def __getitem__(self, index: int, /) -> int: ...


class GroupedPool(BlockPool):
    """Hands out blocks together with their window blocks. Both come from one pool; `num_free` counts all of them.

    A block's window blocks live no longer than the block. Tables report which of their blocks enter and leave their
    sliding window (`enter_window`, `leave_window`). Window blocks are freed in two steps. When their block is in no
    table's window, they are idle: counted as free, but kept, so that a later request can continue there. They are
    evicted when memory is needed, before any cached block; those at the end of a finished sequence are evicted last.
    """

    def __init__(self, num_blocks: int, groups: KVGroups, block_size: int, max_chunk: int) -> None:
        super().__init__(num_blocks)
        self._max_chunk = max_chunk  # most tokens of one sequence that a step computes
        self.groups, self._width, self._block_size = groups, groups.num_window_blocks, block_size
        self.states = StateSlots(groups.num_states) if groups.num_states else None
        self._windows: dict[int, tuple[int, ...]] = {}  # block -> its window blocks
        self._readers: dict[int, int] = {}  # block -> number of tables in whose window it is; absent: idle
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest use first
        self._ends: OrderedDict[int, None] = OrderedDict()  # the same for blocks at the end of a finished sequence
        self._assigned: dict[int, tuple[int, ...]] = {}  # block -> window blocks that the workers do not know yet
        self._num_lost = self._num_gained = 0
        self._gained: deque[tuple[int, int]] = deque(maxlen=_GAINS)  # (number of blocks up to and including it, block)

    @property
    def version(self) -> tuple[int, int]:
        return self._num_lost + (0 if self.states is None else self.states.version), self._num_gained

    @property
    def num_takeable(self) -> int:
        return self.num_free // (1 + self._width)

    @property
    def num_used(self) -> int:
        return len(self._holders) - self.num_free - self._width * len(self._readers)

    @property
    def num_window_blocks(self) -> int:
        """Window blocks that some table holds."""
        return self._width * len(self._readers)

    # -------------------------------------------------------------------------------------------------- allocating
    def take(self, count: int) -> list[int]:
        needed = count * (1 + self._width)
        if needed > self.num_free:
            raise OutOfBlocks(f"kv cache: {needed} blocks needed, {self.num_free} of {self.num_blocks} are free")
        self._make_free(needed)
        free = self._free
        taken = free[: -needed - 1 : -1]
        del free[len(free) - needed :]
        self.num_free -= needed
        blocks, width = taken[:count], self._width
        for place, block in enumerate(blocks):
            self._holders[block] = 1
            if width:
                first = count + place * width
                self._windows[block] = self._assigned[block] = tuple(taken[first : first + width])
                self._readers[block] = 1
        return blocks

    def _make_free(self, count: int) -> None:
        """Evict until `count` blocks are on the free list: idle window blocks first, then cached blocks."""
        free = self._free
        while len(free) < count and self._idle:
            self._evict_windows(self._idle)
        while len(free) < count and self.num_evictable:
            free.extend(self._evict_cached(max((count - len(free)) // (1 + self._width), 1)))
        while len(free) < count:
            self._evict_windows(self._ends)

    def _evict_cached(self, count: int) -> list[int]:
        """Evict up to `count` cached blocks, and free their side blocks. Returns the blocks."""
        assert self.evict is not None
        count = min(count, self.num_evictable)
        evicted = self.evict(count)
        self.num_evictable -= count
        self.num_evicted += count
        for block in evicted:
            self._drop_sides(block)
        return evicted

    def _evict_windows(self, blocks: OrderedDict[int, None]) -> None:
        block, _ = blocks.popitem(last=False)
        self._free.extend(self._windows.pop(block))
        self._assigned.pop(block, None)
        self._num_lost += 1

    def _add_unheld(self, blocks: Sequence[int]) -> None:
        super()._add_unheld(blocks)
        for block in blocks:
            self._drop_sides(block)

    def add_free(self, blocks: Sequence[int]) -> None:
        super().add_free(blocks)
        for block in blocks:
            self._drop_sides(block)

    def _drop_sides(self, block: int) -> None:
        """Free the side blocks of a block that is now free."""
        windows = self._windows.pop(block, None)
        if windows is not None:
            if self._readers.pop(block, None) is not None:
                self.num_free += self._width
            self._idle.pop(block, None)
            self._ends.pop(block, None)
            self._assigned.pop(block, None)
            self._free.extend(windows)
            self._num_lost += 1
        if self.states is not None:
            self.states.forget(block)

    def with_windows(self, num_blocks: int, num_sequences: int = 1) -> int:  # noqa: ARG002 - for WindowPool
        return self.groups.blocks_needed(num_blocks, self._block_size, self._max_chunk)

    def at_rest(self, num_blocks: int) -> int:
        return self.groups.blocks_needed(num_blocks, self._block_size, 0)

    @property
    def num_free_states(self) -> int:
        return 0 if self.states is None else self.states.num_free

    def has_states(self, count: int) -> bool:
        return self.states is None or self.states.num_free >= count

    def begin_plan(self) -> None:
        if self.states is not None:
            self.states.begin_plan()

    def take_assigned(self) -> dict[int, tuple[int, ...]]:
        """Return the window blocks handed out since the last call, by block."""
        assigned, self._assigned = self._assigned, {}
        return assigned

    def held_among(self, blocks: Iterable[int]) -> set[int]:
        windows = {window for each in self._readers for window in self._windows.get(each, ())}
        return {block for block in blocks if block in windows or self._is_held(block)}

    def _is_held(self, block: int) -> bool:
        if block < self.num_blocks:
            return self._holders[block] > 0
        assert self.states is not None
        return self.states.is_held((block - self.num_blocks) // self.groups.blocks_per_state)

    # ------------------------------------------------------------------------------------------------------ windows
    def first_seen(self, position: int) -> int:
        """Return the first block of a sequence that its token at `position` sees in layers with a window."""
        return self.groups.first_seen(position) // self._block_size

    def enter_window(self, blocks: Sequence[int]) -> None:
        """Count one more table that has these blocks in its sliding window. Their window blocks must exist."""
        if self._width:
            readers = self._readers
            for block in blocks:
                if block not in readers:
                    readers[block] = 0
                    self._idle.pop(block, None)
                    self._ends.pop(block, None)
                    self.num_free -= self._width
                readers[block] += 1

    def leave_window(self, blocks: Sequence[int], *, at_end: bool = False) -> None:
        """Count one table less that has these blocks in its window. Window blocks that no table holds then become idle.
        `at_end`: the blocks are the table's last ones, and their window blocks are evicted late."""
        if self._width:
            readers = self._readers
            for block in blocks:
                readers[block] -= 1
                if not readers[block]:
                    del readers[block]
                    (self._ends if at_end else self._idle)[block] = None
                    self.num_free += self._width

    def num_taken(self, *, in_window: bool) -> int:
        """Return how many blocks of memory one block takes: with its window blocks if `in_window`, otherwise as
        `take_bare`."""
        return 1 + self._width if in_window else 1

    def take_bare(self) -> int:
        """Hand out one block without window blocks, for tokens outside of the window. Raises OutOfBlocks."""
        if not self.num_free:
            raise OutOfBlocks("kv cache: no block is free")
        self._make_free(1)
        block = self._free.pop()
        self.num_free -= 1
        self._holders[block] = 1
        return block

    def move_sides(self, block: int, other: int, count: int) -> None:
        """Move the side blocks of `block`, which only the caller holds and which is in no window, to `other`, which has
        the same tokens, as far as `other` lacks them. `count`: the blocks of the sequence up to and including this
        one."""
        if self._holders[block] > 1:
            return
        if block in self._windows and other not in self._windows:
            windows = self._windows.pop(block)
            self._windows[other] = self._assigned[other] = windows
            self._assigned.pop(block, None)
            for each in (self._idle, self._ends):
                if block in each:
                    each[other] = each.pop(block)
        if self.states is not None:
            self.states.move(block, other)
        self.note_gain(count, other)

    def note_gain(self, count: int, block: int) -> None:
        """Note that a block may have gained side blocks, so that requests may continue after it or soon after it. It is
        the last of the first `count` blocks of a sequence."""
        self._num_gained += 1
        self._gained.append((count, block))

    def gains_since(self, num_gained: int) -> list[tuple[int, int]] | None:
        """Return the entries of `note_gain` since the version with `num_gained` gains; None: too many to remember."""
        count = self._num_gained - num_gained
        return None if count > len(self._gained) else list(islice(reversed(self._gained), count))

    # ------------------------------------------------------------------------------------------------------ resuming
    def resumable_tokens(self, blocks: Sequence[int], num_tokens: int) -> int:
        size = self._block_size
        return self.longest_resumable(blocks, num_tokens // size) * size

    @property
    def blocks_in_window(self) -> int:
        """The most blocks whose window blocks one token sees."""
        window = self.groups.window
        return 0 if window is None else -(-window // self._block_size)

    def longest_resumable(self, blocks: BlockPath, count: int, above: int = 0) -> int:
        """Return after how many of the first `count` blocks of a sequence a request can continue, at least more than
        `above`; 0: after none. The last of these blocks within the window must have window blocks, and the last one a
        checkpoint.

        Reads the blocks from the last one backwards, and none before the window of the result.
        """
        while count > above:
            if self.states is not None and blocks[count - 1] not in self.states:
                count -= 1
                continue
            missing = self._last_missing(blocks, count)
            if missing is None:
                return count
            count = missing
        return 0

    def _last_missing(self, blocks: BlockPath, count: int) -> int | None:
        """Return the last of the first `count` blocks that is in the window of the next token but has no window
        blocks."""
        if not self._width:
            return None
        first = self.first_seen(count * self._block_size)
        return next((place for place in range(count - 1, first - 1, -1) if blocks[place] not in self._windows), None)

    def has_windows(self, block: int) -> bool:
        """Whether a block has its window blocks, if the model uses any."""
        return not self._width or block in self._windows

    def memory_blocks(self, block: int) -> tuple[int, ...]:
        """Return the blocks of memory that hold a block's tokens: itself, and its window blocks."""
        return block, *self._windows.get(block, ())

    def is_read(self, block: int) -> bool:
        """Whether a block is in the window of some table; always true without a window group."""
        return not self._width or block in self._readers

    def sides(self, block: int) -> Iterator[tuple[bytes, int]]:
        """Yield the side blocks of a block with their names. The names are the same for every block."""
        for place, window in enumerate(self._windows.get(block, ())):
            yield b"window %d" % place, window
        if self.states is not None and (slot := self.states.slot_of(block)) is not None:
            yield from self.state_blocks(slot)

    def state_blocks(self, slot: int) -> Iterator[tuple[bytes, int]]:
        """Yield the blocks of a state slot with their names."""
        first = self.num_blocks + slot * self.groups.blocks_per_state
        for place in range(self.groups.blocks_per_state):
            yield b"state %d" % place, first + place

    def check(self, num_cached: int = 0) -> None:
        windows = [window for each in self._windows.values() for window in each]
        assert len(set(windows) | set(self._free)) == len(windows) + len(self._free)
        assert self._windows.keys() == self._readers.keys() | self._idle.keys() | self._ends.keys()
        assert len(self._windows) == len(self._readers) + len(self._idle) + len(self._ends)
        idle = self._width * (len(self._idle) + len(self._ends))
        assert self.num_free == len(self._free) + self.num_evictable + idle
        held = sum(count > 0 for count in self._holders)
        assert held + len(self._free) + num_cached + len(windows) == len(self._holders)
        assert self._num_shared == sum(count > 1 for count in self._holders)
        if self.states is not None:
            self.states.check()
