"""The physical blocks: which are free, and how many tables hold each block that is not in the prefix tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from quire.types.errors import OutOfBlocks


class BlockPool:
    """Hands out physical block ids. Does not know tokens.

    A block is free, or private (held by the tables that list it, counted here), or cached (in the prefix tree, which
    counts its holders and keeps it without any). `num_free` counts the blocks that `take` can hand out: free blocks,
    and cached blocks without a holder, which the tree evicts when no free block is left. Blocks freed last are handed
    out first: their memory is warm, and memory that was never needed stays untouched.
    """

    names_memory = False  # True: blocks are ids without memory, and plans name `memory_of` them

    def __init__(self, num_blocks: int) -> None:
        self._holders = [0] * num_blocks  # tables that hold a private block
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_shared = 0  # private blocks with several holders
        self.evict: Callable[[int], list[int]] | None = None  # the prefix tree sets it: evicts this number of blocks
        self.num_free = num_blocks
        self.num_evictable = 0  # cached blocks without a holder
        self.num_evicted = 0  # since the start

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    @property
    def num_ids(self) -> int:
        """Block ids in tables are below this number."""
        return len(self._holders)

    def memory_of(self, block: int) -> int | None:
        """Return the block of memory that holds the tokens of a block; None: it has no memory any more."""
        return block

    @property
    def num_used(self) -> int:
        """Blocks that a table holds."""
        return len(self._holders) - self.num_free

    @property
    def version(self) -> tuple[int, int]:
        """How often cached prefixes may have become shorter, and longer, without a change of the tree."""
        return 0, 0

    @property
    def num_takeable(self) -> int:
        """How many blocks `take` can hand out."""
        return self.num_free

    @property
    def num_reusable(self) -> int:
        """Blocks of memory that hold cached tokens and that no table holds."""
        return self.num_evictable

    @property
    def num_shared(self) -> int:
        """Private blocks with more than one holder."""
        return self._num_shared

    def take(self, count: int) -> list[int]:
        """Hand out `count` private blocks, each with one holder. Raises OutOfBlocks and changes nothing."""
        if count > self.num_free:
            raise OutOfBlocks(f"kv cache: {count} blocks needed, {self.num_free} of {len(self._holders)} are free")
        free = self._free
        missing = count - len(free)
        if missing <= 0:
            taken = free[: -count - 1 : -1]
            del free[len(free) - count :]
        else:
            assert self.evict is not None
            taken = free[::-1]
            free.clear()
            taken += self.evict(missing)
            self.num_evictable -= missing
            self.num_evicted += missing
        self.num_free -= count
        holders = self._holders
        for block in taken:
            holders[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more holder of each of these private blocks."""
        holders = self._holders
        for block in blocks:
            count = holders[block]
            if count == 0:
                raise ValueError(f"block {block} is not private and cannot be shared")
            self._num_shared += count == 1
            holders[block] = count + 1

    def release(self, blocks: Sequence[int]) -> None:
        """Count one holder less of each of these private blocks, the last one first; free those without a holder."""
        holders = self._holders
        freed: list[int] = []
        for block in reversed(blocks):
            count = holders[block] - 1
            if count < 0:
                raise ValueError(f"block {block} was released more often than it was held")
            holders[block] = count
            if count == 0:
                freed.append(block)
            elif count == 1:
                self._num_shared -= 1
        self._add_unheld(freed)

    def _add_unheld(self, blocks: Sequence[int]) -> None:
        """Take back private blocks that have no holder any more."""
        self._free.extend(blocks)
        self.num_free += len(blocks)

    def hand_over(self, blocks: Sequence[int]) -> None:
        """Move these private blocks to the prefix tree, which counts their holders from now on. A block with several
        holders loses one here."""
        holders = self._holders
        for block in blocks:
            count = holders[block]
            if count == 1:  # as usual
                holders[block] = 0
                continue
            if count == 0:
                raise ValueError(f"block {block} is not private and cannot be cached")
            if count == 2:
                self._num_shared -= 1
            holders[block] = count - 1

    def note_evictable(self, count: int) -> None:
        """Note that `count` more cached blocks have no holder; fewer if negative."""
        self.num_evictable += count
        self.num_free += count

    def add_free(self, blocks: Sequence[int]) -> None:
        """Take back cached blocks without holders that the prefix tree has removed."""
        self.num_evictable -= len(blocks)
        self._free.extend(reversed(blocks))

    def num_unshared(self, blocks: Sequence[int]) -> int:
        """Return how many of these private blocks, from the first on, have exactly one holder."""
        if not self._num_shared:
            return len(blocks)
        holders = self._holders
        return next((place for place, block in enumerate(blocks) if holders[block] != 1), len(blocks))

    def holders(self, block: int) -> int:
        """Return how many tables hold a private block; 0 for a free or cached block."""
        return self._holders[block]

    def with_windows(self, num_blocks: int, num_sequences: int = 1) -> int:  # noqa: ARG002 - for groups of layers
        """Return the most blocks of memory that `num_sequences` sequences with `num_blocks` blocks of tokens take."""
        return num_blocks

    def at_rest(self, num_blocks: int) -> int:
        """Return `with_windows` for one sequence that computes nothing."""
        return num_blocks

    @property
    def num_free_states(self) -> int:
        """Free slots for the states of recurrent layers."""
        return 0

    def has_states(self, count: int) -> bool:  # noqa: ARG002 - for models with states
        """Whether `count` more sequences can get a state slot."""
        return True

    def begin_plan(self) -> None:
        """Note that another plan begins."""

    def take_assigned(self) -> Mapping[int, tuple[int, ...]]:
        """Return the window blocks handed out since the last call, by block."""
        return {}

    def resumable_tokens(self, blocks: Sequence[int], num_tokens: int) -> int:  # noqa: ARG002 - for groups of layers
        """Return after how many of a sequence's first `num_tokens` tokens, in these blocks, another sequence can
        continue."""
        return num_tokens

    def held_among(self, blocks: Iterable[int]) -> set[int]:
        """Return those of these blocks, into which a plan loads, that have a holder."""
        return {block for block in blocks if self._holders[block] > 0}

    def check(self, num_cached: int = 0) -> None:
        """Assert that the counts agree; `num_cached` blocks are in the prefix tree."""
        assert len(set(self._free)) == len(self._free)
        assert all(self._holders[block] == 0 for block in self._free)
        assert self.num_free == len(self._free) + self.num_evictable
        assert sum(count > 0 for count in self._holders) + len(self._free) + num_cached == len(self._holders)
        assert min(self._holders, default=0) >= 0
        assert self._num_shared == sum(count > 1 for count in self._holders)
