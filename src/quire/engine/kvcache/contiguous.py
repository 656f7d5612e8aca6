"""Contiguous allocation for the baseline policies (static, orca-*): a sequence reserves an extent, a range of adjacent
blocks."""

from __future__ import annotations

from bisect import insort

from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.table import BlockTable
from quire.types.errors import OutOfBlocks
from quire.types.step import BlockCopy


def reserved_tokens(policy: str, num_prompt: int, limit: int, max_model_len: int) -> int:
    """Return how many token slots a sequence of at most `limit` tokens reserves; 0 if the policy reserves none.

    A static batch reserves for each sequence what its longest one needs, so for "static" this is a lower bound.
    """
    if policy == "orca-max":
        return max_model_len
    if policy == "orca-pow2":
        return min(num_prompt + (1 << (limit - num_prompt - 1).bit_length()), max_model_len)
    return limit if policy in ("orca-oracle", "static") else 0


class ExtentPool(BlockPool):
    """A block pool that hands out extents of adjacent blocks, first fit. Blocks are never shared."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free = []
        self._extents = [(0, num_blocks)]  # free extents as (first block, length), in order, never adjacent

    @property
    def longest_extent(self) -> int:
        """The length of the longest free extent."""
        return max((length for _, length in self._extents), default=0)

    def take_extent(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks from the first free extent that is long enough. Raises OutOfBlocks if there is
        none."""
        for place, (start, length) in enumerate(self._extents):
            if length >= num_blocks:
                self._extents[place : place + 1] = (
                    [(start + num_blocks, length - num_blocks)] if length > num_blocks else []
                )
                self._holders[start : start + num_blocks] = [1] * num_blocks
                self.num_free -= num_blocks
                return list(range(start, start + num_blocks))
        raise OutOfBlocks(f"kv cache: {num_blocks} blocks in a row needed, {self.longest_extent} are the most")

    def release_extent(self, blocks: list[int]) -> None:
        """Free an extent and merge it with adjacent free extents."""
        assert all(self._holders[block] == 1 for block in blocks)
        self._holders[blocks[0] : blocks[-1] + 1] = [0] * len(blocks)
        self.num_free += len(blocks)
        insort(self._extents, (blocks[0], len(blocks)))
        joined: list[tuple[int, int]] = []
        for start, length in self._extents:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self._extents = joined

    def check(self, num_cached: int = 0) -> None:
        assert num_cached == 0
        free = [block for start, length in self._extents for block in range(start, start + length)]
        assert free == [block for block, count in enumerate(self._holders) if count == 0]
        assert all(length > 0 for _, length in self._extents)
        assert all(sum(one) < other[0] for one, other in zip(self._extents, self._extents[1:], strict=False))
        assert self.num_free == len(free)
        assert max(self._holders, default=0) <= 1


class ReservedTable(BlockTable):
    """A block table that holds one extent from `reserve` until `free`, whether its blocks are used or not."""

    __slots__ = ("_allocator",)

    def __init__(self, allocator: ExtentAllocator, block_size: int) -> None:
        super().__init__(allocator.pool, block_size)
        self._allocator = allocator

    def reserve(self, num_tokens: int) -> None:
        """Take an extent for this many tokens. Raises OutOfBlocks if no free extent is long enough."""
        assert not self.blocks
        self.blocks = self._allocator.take(-(-num_tokens // self._block_size))

    def truncate(self, num_tokens: int) -> None:
        self.num_tokens = min(self.num_tokens, num_tokens)

    def free(self) -> None:
        if self.blocks:
            self._allocator.release(self.blocks)
        self.blocks, self.num_tokens = [], 0

    def append(self, num_tokens: int = 1) -> list[BlockCopy]:
        self.num_tokens += num_tokens
        assert self.num_tokens <= self.capacity
        return []

    def check(self, *, lags: bool = False) -> None:  # noqa: ARG002 - BlockTable's signature
        assert self.num_tokens <= self.capacity
        assert self.blocks == list(range(self.blocks[0], self.blocks[0] + len(self.blocks)))
        assert all(self._pool.holders(block) == 1 for block in self.blocks)


class ExtentAllocator:
    """Gives extents of an ExtentPool to tables. With `frees_together`, an extent that a table releases is freed only
    when all tables have released theirs, because a static batch frees its memory as a whole."""

    def __init__(self, pool: ExtentPool, *, frees_together: bool) -> None:
        self.pool = pool
        self._frees_together = frees_together
        self._num_live = 0  # extents that a table holds
        self._released: list[list[int]] = []  # extents that are not free yet

    @property
    def released(self) -> list[int]:
        """Blocks that no table holds and that are not free yet."""
        return [block for extent in self._released for block in extent]

    def take(self, num_blocks: int) -> list[int]:
        extent = self.pool.take_extent(num_blocks)
        self._num_live += 1
        return extent

    def release(self, extent: list[int]) -> None:
        self._num_live -= 1
        self._released.append(extent)
        if not self._frees_together or not self._num_live:
            for each in self._released:
                self.pool.release_extent(each)
            self._released = []
