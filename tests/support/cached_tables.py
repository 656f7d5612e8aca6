"""A block pool, a prefix tree and block tables over them, without an engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quire.config.engine import CacheConfig
from quire.config.tiers import EvictionName
from quire.engine.kvcache.eviction import make_eviction_policy
from quire.engine.kvcache.keys import TOKEN_BYTES
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefix_tree import Match, Node, PrefixTree
from quire.engine.kvcache.run_history import Owner
from quire.engine.kvcache.table import BlockTable


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as the prefix tree has them."""
    return array("i", tokens).tobytes()


def unpack(tokens: bytes) -> tuple[int, ...]:
    return tuple(array("i", tokens))


class CachedTables:
    """Tables that begin with what is cached, and cache what they compute. Evicted blocks are noted as the tokens from
    the root to their end."""

    def __init__(
        self, num_blocks: int, block_size: int = 2, eviction: EvictionName = "lru", namespace: bytes = b""
    ) -> None:
        self.size, self.pool = block_size, BlockPool(num_blocks)
        policy = make_eviction_policy(CacheConfig(block_size, num_blocks, eviction=eviction))
        self.tree = PrefixTree(self.pool, block_size, policy, namespace)
        self.tree.on_evict = self.note_eviction
        self.evicted: list[tuple[int, ...]] = []

    def note_eviction(self, node: Node, index: int) -> None:
        """The tree is about to evict a block: the last of a leaf that nobody holds."""
        assert not node.is_detached
        assert not node.children
        assert node.locks == 0
        assert self.pool.holders(node.blocks[index]) == 0
        self.evicted.append(self.tokens_to(node, index))

    def tokens_to(self, node: Node, index: int) -> tuple[int, ...]:
        """The tokens from the root to the end of a run's `index`-th block."""
        tokens, above = node.tokens[: (index + 1) * self.size * TOKEN_BYTES], node.parent
        while above is not None:
            tokens = above.tokens[: len(above.blocks) * self.size * TOKEN_BYTES] + tokens
            above = above.parent
        return unpack(tokens)

    # ------------------------------------------------------------------------------------------------------ tables
    def match(self, tokens: Sequence[int], salt: str = "", limit: int | None = None) -> Match:
        return self.tree.match(salt, pack(tokens), len(tokens) if limit is None else limit)

    def begin(self, tokens: Sequence[int], salt: str = "", limit: int | None = None) -> BlockTable:
        """A table of the whole blocks that are cached of the first `limit` tokens: of all, if not given."""
        match = self.match(tokens, salt, limit)
        table = BlockTable(self.pool, self.size, self.tree)
        node = self.tree.root(salt) if match.node is None else self.tree.node_at(match.node, match.num_blocks)
        table.start_with(node)
        self.tree.used(node)
        return table

    def publish(self, table: BlockTable, tokens: Sequence[int], owner: str = "") -> None:
        """Cache the full blocks of a table's tokens; of blocks that are cached already, it holds the cached ones."""
        assert table.node is not None
        data, last, width = pack(tokens), len(tokens) // self.size, self.size * TOKEN_BYTES
        deepest, count = self.tree.descend(table.node, data, last)
        if count > table.num_cached:
            table.use_cached(self.tree.node_at(deepest, count))
        if last > count:
            table.cache(table.node, data[count * width : last * width], last - count, Owner(owner))

    def hold(self, tokens: Sequence[int], salt: str = "", owner: str = "") -> BlockTable:
        """A table of these tokens: what is cached is found, the rest is computed and cached."""
        table = self.begin(tokens, salt)
        table.append(len(tokens) - table.num_tokens)
        self.publish(table, tokens, owner)
        return table

    def use(self, *names: int, salt: str = "", owner: str = "") -> None:
        """A prompt of one block for each name comes and goes."""
        self.hold([name for name in names for _ in range(self.size)], salt, owner).free()
        self.check()

    # ---------------------------------------------------------------------------------------------------- evicting
    def evict(self, count: int) -> list[tuple[int, ...]]:
        """Take so many blocks more than are free, and give them back; returns what that evicted."""
        before = len(self.evicted)
        self.pool.release(self.pool.take(self.pool.num_free - self.pool.num_evictable + count))
        self.check()
        return self.evicted[before:]

    def check(self) -> None:
        self.pool.check(len(self.tree))
        self.tree.check()
