"""The block table of one sequence: append, fork, free, and the blocks it shares with the prefix tree."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefix_tree import Node, PrefixTree
from quire.engine.kvcache.run_history import Owner
from quire.types.step import BlockCopy

NO_STATE = -1
Move = tuple[int, int, int]  # position, slot, source


class BlockTable:
    """The blocks of one sequence, in order. A partly filled last block that other tables hold is copied before the
    sequence writes to it (copy-on-write).

    The first `num_cached` blocks belong to the prefix tree, up to the end of `node`'s run, which this table locks. All
    others are private: the pool counts their holders. `node` is None if the prefix cache is off.
    """

    __slots__ = ("_block_size", "_pool", "_tree", "blocks", "is_duplicate", "node", "num_tokens")
    state = NO_STATE  # the slot that holds the state of recurrent layers after all tokens that were planned

    def __init__(self, pool: BlockPool, block_size: int, tree: PrefixTree | None = None) -> None:
        self._pool, self._tree, self._block_size = pool, tree, block_size
        self.blocks: list[int] = []
        self.num_tokens = 0  # tokens there is room for; while the sequence is in an AheadSet, this count lags behind
        self.node: Node | None = None
        # Another table published a block of the same tokens first, so this one publishes nothing until it is freed.
        self.is_duplicate = False

    @property
    def capacity(self) -> int:
        """How many tokens fit into the blocks of this table."""
        return len(self.blocks) * self._block_size

    @property
    def num_cached(self) -> int:
        """How many of the first blocks belong to the prefix tree."""
        return 0 if self.node is None else self.node.end

    def start_with(self, node: Node) -> None:
        """Fill an empty table with all blocks from the root of the tree to the end of `node`, and lock them."""
        tree = self._tree
        assert not self.blocks
        assert tree is not None
        tree.lock(node)
        self.node, self.blocks = node, tree.path(node)
        self.num_tokens = node.end * self._block_size

    @property
    def num_window_blocks(self) -> int:
        """Window blocks that this table holds."""
        return 0

    @property
    def num_behind_window(self) -> int:
        """How many of the first blocks have no memory any more, because their tokens have left the window of all
        layers."""
        return 0

    def still_takes(self, num_blocks: int) -> int:
        """Return how many more blocks of memory the table takes when it grows to `num_blocks` blocks."""
        return num_blocks - len(self.blocks)

    def become_pinned(self) -> None:
        """Note that the table belongs to a pinned prompt and computes nothing."""

    def takes_draft(self, num_rows: int) -> bool:  # noqa: ARG002 - for GroupedTable
        """Whether draft tokens may be computed, if up to `num_rows` sequences run."""
        return True

    def plan_draft(self, start: int, count: int, num_rows: int) -> list[Move]:  # noqa: ARG002 - likewise
        """Return where the state after the `count` draft tokens from `start` on is written, as (position, slot,
        source)."""
        return []

    def settle_draft(self, num_tokens: int, lasting: Collection[int]) -> int:  # noqa: ARG002 - likewise
        """Note that a draft was verified: the first `num_tokens` tokens are computed and correct. Returns how many of
        them need not be computed again."""
        return num_tokens

    def fork(self) -> BlockTable:
        """Return a second table with the same blocks. No block is copied."""
        forked = type(self)(self._pool, self._block_size, self._tree)
        forked._share(self)
        return forked

    def borrow(self, other: BlockTable, num_tokens: int) -> None:
        """Share the private blocks with which another table continues this one, up to `num_tokens` tokens. The blocks
        of this table must be full."""
        assert self.num_tokens == self.capacity
        borrowed = other.blocks[len(self.blocks) : -(-num_tokens // self._block_size)]
        self._pool.share(borrowed)
        self.extend(borrowed, num_tokens)

    def replace_with(self, other: BlockTable) -> int:
        """Replace the blocks of this table with those of another. Returns how many of the first blocks are the same."""
        same, before = num_same(self.blocks, other.blocks), (self.blocks, self.node)
        self._share(other)
        self._give_back(*before)
        return same

    def _share(self, other: BlockTable) -> None:
        self.blocks, self.num_tokens, self.node = other.blocks.copy(), other.num_tokens, other.node
        self.is_duplicate = other.is_duplicate
        self._pool.share(self.blocks[self.num_cached :])
        if self.node is not None and self._tree is not None:
            self._tree.lock(self.node)

    def _give_back(self, blocks: list[int], node: Node | None) -> None:
        if private := blocks if node is None else blocks[node.end :]:
            self._pool.release(private)
        if node is not None and self._tree is not None:
            self._tree.unlock(node)

    def truncate(self, num_tokens: int) -> None:
        """Remove all tokens after the first `num_tokens`, and release the private blocks that are empty then."""
        kept = max(-(-num_tokens // self._block_size), self.num_cached)
        if kept < len(self.blocks):
            self._pool.release(self.blocks[kept:])
            del self.blocks[kept:]
        self.num_tokens = min(self.num_tokens, num_tokens)

    def extend(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Append private blocks that the caller took from the pool, up to `num_tokens` tokens. The blocks of this table
        must be full."""
        assert self.num_tokens == self.capacity
        self.blocks += blocks
        self.num_tokens = num_tokens

    def fill(self, num_tokens: int) -> bool:
        """Make room for more tokens in the last block, if they fit and no private block is shared. Returns whether
        there is room now; otherwise `append` makes it."""
        total = self.num_tokens + num_tokens
        if total > len(self.blocks) * self._block_size or self._pool.num_shared:
            return False
        self.num_tokens = total
        return True

    def append(self, num_tokens: int = 1) -> list[BlockCopy]:
        """Make room for more tokens. A partly filled last block that other tables hold is replaced by a copy
        (copy-on-write). Returns the block copies to run before the next forward pass.

        Raises OutOfBlocks and changes nothing if the pool has too few blocks.
        """
        blocks, size, pool, before = self.blocks, self._block_size, self._pool, self.num_tokens
        total = before + num_tokens
        missing = -(-total // size) - len(blocks)
        copies: list[BlockCopy] = []
        if before % size and num_tokens > 0 and pool.holders(blocks[-1]) != 1:
            (own, *fresh) = pool.take(missing + 1)
            copies.append(BlockCopy(blocks[-1], own))
            pool.release(blocks[-1:])
            blocks[-1] = own
            blocks += fresh
        elif missing > 0:
            blocks += pool.take(missing)
        self.num_tokens = total
        return copies

    def cache(self, node: Node, tokens: bytes, count: int, owner: Owner) -> Node:
        """Move the `count` full private blocks that follow `node` into the prefix tree. Returns their node.

        The table must hold `node` and all blocks up to it.
        """
        assert self._tree is not None
        start = node.end
        self.node = self._tree.insert(node, tokens, self.blocks[start : start + count], owner)
        return self.node

    def use_cached(self, node: Node) -> None:
        """Replace private blocks by the tree's blocks of the same tokens, up to the end of `node`. Private blocks that
        are in the tree themselves move there; the others are released."""
        tree, before, first = self._tree, self.node, self.num_cached
        assert tree is not None
        tree.lock(node)
        own, theirs = self.blocks[first : node.end], tree.path(node)
        self._pool.hand_over([block for block, other in zip(own, theirs[first:], strict=True) if block == other])
        self._pool.release([block for block, other in zip(own, theirs[first:], strict=True) if block != other])
        self.blocks[: node.end] = theirs
        if before is not None:
            tree.unlock(before)
        self.node = node

    def free(self) -> None:
        """Release all blocks, the last one first, so that the next table takes them in the same order."""
        self._give_back(self.blocks, self.node)
        self.blocks, self.num_tokens, self.node, self.is_duplicate = [], 0, None, False

    def check(self, *, lags: bool = False) -> None:
        """Assert that blocks and counts agree. `lags`: the sequence runs ahead, so `num_tokens` may be too small."""
        is_used = (len(self.blocks) - 1) * self._block_size < self.num_tokens
        assert not self.blocks or ((is_used or lags) and self.num_tokens <= self.capacity)
        assert self.num_tokens == 0 or self.blocks
        assert len(set(self.blocks)) == len(self.blocks)
        assert self.num_cached <= len(self.blocks)
        assert all(self._pool.holders(block) > 0 for block in self.blocks[self.num_cached :])
        if self.node is not None:
            assert self._tree is not None
            assert self.node.locks > 0 or self.node.parent is None
            assert self._tree.path(self.node) == self.blocks[: self.num_cached]


def num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many blocks at the start of two tables are the same."""
    if one == other:
        return len(one)
    differ = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
