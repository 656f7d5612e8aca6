"""The prefix cache: what sequences leave behind, and what later ones find of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.radix import Node, PrefixTree, TokensOf
from quire.engine.kvcache.table import BlockTable


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix that was found. `nodes` hold its `num_tokens` tokens; the last may hold more than agree."""

    nodes: tuple[Node, ...] = ()
    num_tokens: int = 0


NO_MATCH = Match()


class Prefixes(Protocol):
    """What the scheduler needs of a prefix cache."""

    def find(self, salt: str, tokens_of: TokensOf, limit: int) -> Match:
        """What is cached of a sequence's first `limit` tokens. Changes nothing."""

    def adopt(self, table: BlockTable, match: Match) -> None:
        """An empty table begins with what was found, as one more holder of its blocks."""

    def keep(
        self, table: BlockTable, salt: str, tokens_of: TokensOf, num_tokens: int, *, leaving: bool = False
    ) -> None:
        """Let others find the full blocks of a sequence's first `num_tokens` tokens, which planned steps compute.

        A table that is `leaving`, to be freed next, gives up second copies of cached blocks for the cached ones.
        """

    def reset(self) -> int:
        """Forget everything; returns how many blocks that freed. What is held now is never found again."""

    def check(self) -> None: ...


class NoPrefixCache:
    """Finds and keeps nothing."""

    def find(self, salt: str, tokens_of: TokensOf, limit: int) -> Match:  # noqa: ARG002 - Prefixes' signature
        return NO_MATCH

    def adopt(self, table: BlockTable, match: Match) -> None: ...

    def keep(
        self, table: BlockTable, salt: str, tokens_of: TokensOf, num_tokens: int, *, leaving: bool = False
    ) -> None: ...

    def reset(self) -> int:
        return 0

    def check(self) -> None: ...


class PrefixCache:
    """Joins tree and pool: a block is in the tree exactly while the pool keeps it.

    Whoever holds a block of the tree holds all blocks on the way to it, and tables are freed tail first. So the block
    that has been idle longest is always a leaf, and evicting it is O(1).
    """

    def __init__(self, tree: PrefixTree, pool: BlockPool, block_size: int) -> None:
        self._tree, self._pool, self._block_size = tree, pool, block_size

    def find(self, salt: str, tokens_of: TokensOf, limit: int) -> Match:
        nodes, num_tokens = self._tree.match(salt, tokens_of, limit)
        return Match(tuple(nodes), num_tokens) if nodes else NO_MATCH

    def adopt(self, table: BlockTable, match: Match) -> None:
        num_whole = match.num_tokens // self._block_size
        trail = match.nodes[num_whole - 1] if num_whole else self._tree.root
        table.adopt([node.block for node in match.nodes], match.num_tokens, trail)

    def keep(
        self, table: BlockTable, salt: str, tokens_of: TokensOf, num_tokens: int, *, leaving: bool = False
    ) -> None:
        tree, size, node, blocks = self._tree, self._block_size, table.trail, table.blocks
        if node is None or node not in tree or num_tokens // size <= node.depth:
            return
        first, last, replaced = node.depth, num_tokens // size, False
        keys = tree.keys(first, salt, tokens_of(first * size, last * size))
        for index, key in enumerate(keys, first):
            child = node.child(key)
            if child is None:
                break
            if child.block != blocks[index]:  # another sequence computed the same tokens, and was first
                if not leaving:
                    table.trail = node
                    return
                table.replace(index, child.block)
                replaced = True
            node = child
        fresh = blocks[node.depth : last]
        if replaced:  # other holders of a block would not hold the way to it
            fresh = list(takewhile(lambda block: self._pool.holders(block) == 1, fresh))
        self._pool.keep(fresh)
        table.trail = tree.grow(node, keys[node.depth - first :], fresh)

    def reset(self) -> int:
        self._tree.clear()
        return self._pool.forget_kept()

    def check(self) -> None:
        tree, pool = self._tree, self._pool
        tree.check()
        nodes = tree.nodes()
        assert {node.block for node in nodes} == {block for block in range(pool.num_blocks) if pool.is_kept(block)}
        age = {block: place for place, block in enumerate(pool.idle_blocks())}
        for node in nodes:
            parent = node.parent
            if parent is None or parent is tree.root:
                continue
            assert pool.holders(parent.block) > 0 or pool.holders(node.block) == 0
            assert parent.block not in age or age[node.block] < age[parent.block]


def make_prefixes(num_blocks: int, block_size: int, *, enabled: bool) -> tuple[BlockPool, Prefixes]:
    """A pool, and the cache over it."""
    if not enabled:
        return BlockPool(num_blocks), NoPrefixCache()
    tree = PrefixTree(block_size)
    pool = BlockPool(num_blocks, on_evict=tree.remove)
    return pool, PrefixCache(tree, pool, block_size)
