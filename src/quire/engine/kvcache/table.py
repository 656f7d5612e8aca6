"""A sequence's view of the cache: fork, append, free."""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.radix import Node
from quire.types.errors import OutOfBlocks
from quire.types.step import BlockCopy


class BlockTable:
    """The blocks of one sequence, in order. A partial tail that is shared or kept is copied before its first write.

    `trail` is the deepest of its blocks that the prefix tree knows, or the root; None: it leaves no prefix behind. Of
    one that `is_second`, the tree has the next block from another table: it leaves nothing more before its end.
    """

    __slots__ = ("_block_size", "_pool", "blocks", "is_second", "num_tokens", "trail")

    def __init__(self, pool: BlockPool, block_size: int, *, blocks: Iterable[int] = (), num_tokens: int = 0) -> None:
        self._pool, self._block_size = pool, block_size
        self.blocks, self.num_tokens = list(blocks), num_tokens
        self.trail: Node | None = None
        self.is_second = False

    @property
    def capacity(self) -> int:
        """Tokens the held blocks have room for."""
        return len(self.blocks) * self._block_size

    def fork(self, num_tokens: int | None = None) -> BlockTable:
        """A second holder of every block, or of those that hold the first `num_tokens`; copies nothing."""
        count = self.num_tokens if num_tokens is None else num_tokens
        blocks = self.blocks if num_tokens is None else self.blocks[: -(-count // self._block_size)]
        shared = [self._pool.share(block) for block in blocks]
        forked = BlockTable(self._pool, self._block_size, blocks=shared, num_tokens=count)
        forked.trail, forked.is_second = self.trail, self.is_second
        while forked.trail is not None and forked.trail.depth * self._block_size > count:
            forked.trail, forked.is_second = forked.trail.parent, False
        return forked

    def follow(self, other: BlockTable) -> int:
        """Hold what another table holds instead; returns the first slot that changed. What is alike is kept."""
        own, theirs = self.blocks, other.blocks
        same = min(len(own), len(theirs))
        while same and own[same - 1] != theirs[same - 1]:  # tables that came from one differ at the end
            same -= 1
        if own[:same] != theirs[:same]:
            same = 0
        for block in theirs[same:]:
            self._pool.share(block)
        while len(own) > same:
            self._pool.release(own.pop())
        own += theirs[same:]
        self.num_tokens, self.trail, self.is_second = other.num_tokens, other.trail, other.is_second
        return same

    def truncate(self, num_tokens: int) -> None:
        """Forget what is beyond the first `num_tokens`; blocks that held nothing else are given back."""
        while (len(self.blocks) - 1) * self._block_size >= num_tokens and self.blocks:
            self._pool.release(self.blocks.pop())
        self.num_tokens = min(self.num_tokens, num_tokens)

    def adopt(self, blocks: Iterable[int], num_tokens: int, trail: Node) -> None:
        """Begin an empty table with blocks that are held or idle already."""
        assert not self.blocks
        self.blocks = [self._pool.share(block) for block in blocks]
        self.num_tokens, self.trail = num_tokens, trail

    def extend(self, blocks: Iterable[int], num_tokens: int) -> None:
        """Go on after full blocks with blocks that were taken or shared for it, up to `num_tokens` tokens."""
        assert self.num_tokens == self.capacity
        self.blocks += blocks
        self.num_tokens = num_tokens

    def replace(self, slot: int, block: int) -> None:
        """Hold another block in a slot, which has the same content."""
        own, self.blocks[slot] = self.blocks[slot], self._pool.share(block)
        self._pool.release(own)

    def append(self, num_tokens: int = 1) -> list[BlockCopy]:
        """Make room for more tokens; return the copies to run before the next forward.

        Raises OutOfBlocks and changes nothing if the pool cannot serve it.
        """
        pool, blocks = self._pool, self.blocks
        total = self.num_tokens + num_tokens
        unshare = num_tokens > 0 and self._must_copy_tail()
        missing = -(-total // self._block_size) - len(blocks)
        if missing + unshare > pool.num_free:
            raise OutOfBlocks(f"kv cache: {missing + unshare} blocks needed, {pool.num_free} free")
        copies = [self._unshare_tail()] if unshare else []
        self.num_tokens = total
        for _ in range(missing):
            blocks.append(pool.take())
        return copies

    def append_block(self) -> int:
        """Begin a new block with its first token; the blocks held so far count as full from now on."""
        block = self._pool.take()
        blocks = self.blocks
        self.num_tokens = len(blocks) * self._block_size + 1
        blocks.append(block)
        return block

    def free(self) -> None:
        """Give every block back, tail first, so that the next table gets them in the order they had."""
        while self.blocks:
            self._pool.release(self.blocks.pop())
        self.num_tokens, self.trail, self.is_second = 0, None, False

    def _must_copy_tail(self) -> bool:
        return self.num_tokens % self._block_size != 0 and not self._pool.is_writable(self.blocks[-1])

    def _unshare_tail(self) -> BlockCopy:
        source, target = self.blocks[-1], self._pool.take()
        self.blocks[-1] = target
        self._pool.release(source)
        return BlockCopy(source, target)

    def check(self) -> None:
        assert (len(self.blocks) - 1) * self._block_size < self.num_tokens <= self.capacity or not self.blocks
        assert self.num_tokens == 0 or self.blocks
        assert len(set(self.blocks)) == len(self.blocks)
        assert all(self._pool.holders(block) > 0 for block in self.blocks)
