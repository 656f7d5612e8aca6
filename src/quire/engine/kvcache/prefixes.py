"""The prefix cache: what sequences leave behind, and what later ones find of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from quire.config.engine import CacheConfig
from quire.engine.kvcache.eviction.base import IdleOrder
from quire.engine.kvcache.eviction.registry import make_order
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


OnEvict = Callable[[Node], None]
OnKeep = Callable[[Sequence[Node]], None]


def _nobody_asks(nodes: Sequence[Node]) -> None:
    """Without tiers, nobody copies what is kept."""


class PrefixCache:
    """Joins tree and pool: a block is in the tree exactly while the pool keeps it.

    Whoever holds a block of the tree holds all blocks on the way to it. `on_keep` is told of nodes that entered the
    tree, in order of depth.
    """

    def __init__(
        self, tree: PrefixTree, pool: BlockPool, block_size: int, order: IdleOrder, on_keep: OnKeep = _nobody_asks
    ) -> None:
        self._tree, self._pool, self._block_size, self._order = tree, pool, block_size, order
        self._on_keep = on_keep

    def find(self, salt: str, tokens_of: TokensOf, limit: int) -> Match:
        nodes, num_tokens = self._tree.match(salt, tokens_of, limit)
        return Match(tuple(nodes), num_tokens) if nodes else NO_MATCH

    def adopt(self, table: BlockTable, match: Match) -> None:
        num_whole = match.num_tokens // self._block_size
        trail = match.nodes[num_whole - 1] if num_whole else self._tree.root
        table.adopt([node.block for node in match.nodes], match.num_tokens, trail)
        self._order.used(match.nodes)

    def keep(
        self, table: BlockTable, salt: str, tokens_of: TokensOf, num_tokens: int, *, leaving: bool = False
    ) -> None:
        tree, size, node, blocks = self._tree, self._block_size, table.trail, table.blocks
        if node is None or node not in tree or num_tokens // size <= node.depth or (table.is_second and not leaving):
            return
        first, last, replaced = node.depth, num_tokens // size, False
        keys = tree.keys(first, salt, tokens_of(first * size, last * size))
        for index, key in enumerate(keys, first):
            child = node.child(key)
            if child is None:
                break
            if child.block != blocks[index]:  # another sequence computed the same tokens, and was first
                if not leaving:
                    table.trail, table.is_second = node, True
                    return
                table.replace(index, child.block)
                replaced = True
            node = child
        fresh = blocks[node.depth : last]
        if replaced:  # other holders of a block would not hold the way to it
            fresh = list(takewhile(lambda block: self._pool.holders(block) == 1, fresh))
        self._pool.keep(fresh)
        grown = tree.grow(node, keys[node.depth - first :], fresh)
        table.trail = grown[-1] if grown else node
        self._order.entered(grown)
        self._on_keep(grown)

    def reset(self) -> int:
        self._tree.clear()
        return self._pool.forget_kept()

    def check(self) -> None:
        tree, pool = self._tree, self._pool
        tree.check()
        nodes = tree.nodes()
        assert {node.block for node in nodes} == {block for block in range(pool.num_blocks) if pool.is_kept(block)}
        for node in nodes:
            parent = node.parent
            if parent is None or parent is tree.root:
                continue
            assert pool.holders(parent.block) > 0 or pool.holders(node.block) == 0
        self._order.check(tree)


def make_tree(cache: CacheConfig) -> PrefixTree:
    """An empty tree. It stays empty where prefixes are not cached."""
    return PrefixTree(cache.block_size, bytes.fromhex(cache.namespace))


def make_prefixes(
    cache: CacheConfig, tree: PrefixTree, *, on_evict: OnEvict | None = None, on_keep: OnKeep = _nobody_asks
) -> tuple[BlockPool, Prefixes]:
    """A pool, and the cache over it.

    `on_evict` is told of a leaf whose block is given away next: it is still in the tree, and its content still there.
    """
    if not cache.enable_prefix_caching:
        return BlockPool(cache.num_blocks), NoPrefixCache()

    def forget(block: int) -> None:
        if on_evict is not None:
            on_evict(tree.node(block))
        tree.remove(block)

    order = make_order(cache, tree)
    pool = BlockPool(cache.num_blocks, tree.remove if on_evict is None else forget, order)
    return pool, PrefixCache(tree, pool, cache.block_size, order, on_keep)
