"""Contiguous allocation for the baseline policies (static, orca-*): a sequence reserves a run of adjacent blocks."""

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


class RunPool(BlockPool):
    """A block pool that hands out runs of adjacent blocks, first fit. Blocks are never shared."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free = []
        self._runs = [(0, num_blocks)]  # free runs as (first block, length), in order, never adjacent

    @property
    def longest_run(self) -> int:
        """The length of the longest free run."""
        return max((length for _, length in self._runs), default=0)

    def take_run(self, num_blocks: int) -> list[int]:
        """Take the first free run that is long enough. Raises OutOfBlocks if there is none."""
        for place, (start, length) in enumerate(self._runs):
            if length >= num_blocks:
                self._runs[place : place + 1] = (
                    [(start + num_blocks, length - num_blocks)] if length > num_blocks else []
                )
                self._holders[start : start + num_blocks] = [1] * num_blocks
                self.num_free -= num_blocks
                return list(range(start, start + num_blocks))
        raise OutOfBlocks(f"kv cache: {num_blocks} blocks in a row needed, {self.longest_run} are the most")

    def release_run(self, blocks: list[int]) -> None:
        """Free a run and merge it with adjacent free runs."""
        assert all(self._holders[block] == 1 for block in blocks)
        self._holders[blocks[0] : blocks[-1] + 1] = [0] * len(blocks)
        self.num_free += len(blocks)
        insort(self._runs, (blocks[0], len(blocks)))
        joined: list[tuple[int, int]] = []
        for start, length in self._runs:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self._runs = joined

    def check(self, num_cached: int = 0) -> None:
        assert num_cached == 0
        free = [block for start, length in self._runs for block in range(start, start + length)]
        assert free == [block for block, count in enumerate(self._holders) if count == 0]
        assert all(length > 0 for _, length in self._runs)
        assert all(sum(one) < other[0] for one, other in zip(self._runs, self._runs[1:], strict=False))
        assert self.num_free == len(free)
        assert max(self._holders, default=0) <= 1


class ReservedTable(BlockTable):
    """A block table that holds one run from `reserve` until `free`, whether its blocks are used or not."""

    __slots__ = ("_allocator",)

    def __init__(self, allocator: RunAllocator, block_size: int) -> None:
        super().__init__(allocator.pool, block_size)
        self._allocator = allocator

    def reserve(self, num_tokens: int) -> None:
        """Take a run for this many tokens. Raises OutOfBlocks if no free run is long enough."""
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


class RunAllocator:
    """Gives runs of blocks to tables. With `frees_together`, a run that a table releases is freed only when all tables
    have released theirs: a static batch frees its memory as a whole."""

    def __init__(self, pool: RunPool, *, frees_together: bool) -> None:
        self.pool = pool
        self._frees_together = frees_together
        self._num_live = 0  # runs that a table holds
        self._released: list[list[int]] = []  # runs that are not free yet

    @property
    def released(self) -> list[int]:
        """Blocks that no table holds and that are not free yet."""
        return [block for run in self._released for block in run]

    def take(self, num_blocks: int) -> list[int]:
        run = self.pool.take_run(num_blocks)
        self._num_live += 1
        return run

    def release(self, run: list[int]) -> None:
        self._num_live -= 1
        self._released.append(run)
        if not self._frees_together or not self._num_live:
            for each in self._released:
                self.pool.release_run(each)
            self._released = []
