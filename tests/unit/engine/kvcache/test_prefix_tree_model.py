"""Tree, pool and tables under random operations, against a dictionary of token tuples and a memory of tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from cached_tables import CachedTables, pack, unpack
from quire.config.tiers import EVICTION_NAMES, EvictionName
from quire.engine.kvcache.keys import TOKEN_BYTES, chain_keys, root_key
from quire.engine.kvcache.prefix_tree import Node
from quire.engine.kvcache.run_history import MAX_GHOSTS
from quire.engine.kvcache.table import BlockTable
from quire.types.errors import OutOfBlocks

SALTS = ("", "a", "b")
Path = tuple[str, tuple[int, ...]]  # a salt, and the tokens from the root to the end of a block


@dataclass(eq=False)
class Held:
    """A table, the tokens it was written with, and how many of its blocks the model takes to be cached."""

    table: BlockTable
    salt: str
    tokens: list[int]
    num_cached: int = 0
    is_detached: bool = False  # the tree was cleared since

    def paths(self, size: int) -> Iterator[Path]:
        """Of the cached blocks."""
        for count in range(1, self.num_cached + 1):
            yield self.salt, tuple(self.tokens[: count * size])


@dataclass
class Model:
    """What is cached, as a dictionary: the tokens from the root to a block's end lead to the block."""

    size: int
    blocks: dict[Path, int] = field(default_factory=dict)
    released: dict[Path, tuple[int, int]] = field(default_factory=dict)  # when it was let go of, the last block first
    tables: list[Held] = field(default_factory=list)
    gone: set[Path] = field(default_factory=set)  # what was evicted and not computed since
    evictions: int = 0
    time: int = 0

    def holders(self) -> Counter[Path]:
        return Counter(path for each in self.tables if not each.is_detached for path in each.paths(self.size))

    def let_go(self, before: Counter[Path]) -> None:
        """Note what nobody holds any more."""
        self.time += 1
        after = self.holders()
        for path in before:
            if path not in after:
                self.released[path] = self.time, -len(path[1])

    def longest(self, salt: str, tokens: list[int], limit: int) -> int:
        """How many of the first `limit` tokens agree with what is cached, by looking at everything."""
        most = 0
        for other, cached in self.blocks:
            if other == salt:
                pairs = enumerate(zip(cached, tokens[:limit], strict=False))
                same = next((i for i, (a, b) in pairs if a != b), min(len(cached), limit))
                most = max(most, same)
        return most

    def is_leaf(self, path: Path) -> bool:
        salt, tokens = path
        return not any(
            other == salt and len(more) > len(tokens) and more[: len(tokens)] == tokens for other, more in self.blocks
        )


class Play(CachedTables):
    """Carries random operations out on both, and compares them after each."""

    def __init__(self, seed: int, size: int, eviction: EvictionName, num_blocks: int = 24) -> None:
        super().__init__(num_blocks, size, eviction, namespace=b"space")
        self.rng, self.model, self.eviction = random.Random(f"{seed} {size} {eviction}"), Model(size), eviction
        self.memory = [[-1] * size for _ in range(num_blocks)]
        self.done: Counter[str] = Counter()

    # ----------------------------------------------------------------------------------------------- the tree's doing
    def note_eviction(self, node: Node, index: int) -> None:
        super().note_eviction(node, index)
        model, path = self.model, (node.salt, self.evicted[-1])
        assert model.blocks[path] == node.blocks[index]
        assert path not in model.holders(), "a block that is held was evicted"
        assert model.is_leaf(path), "a block was evicted before those that follow it"
        if self.eviction == "lru":
            assert path == min(model.released, key=model.released.__getitem__)
        del model.blocks[path], model.released[path]
        model.gone.add(path)
        model.evictions += 1

    # ----------------------------------------------------------------------------------------------------- operations
    def draw(self, length: int) -> list[int]:
        return [self.rng.randrange(2) for _ in range(length)]

    def known(self) -> tuple[str, list[int]]:
        """Tokens that are cached, perhaps cut off, perhaps with others behind them; often they are new."""
        rng, model = self.rng, self.model
        if not model.blocks or rng.random() < 0.2:
            return rng.choice(SALTS), self.draw(rng.randint(1, 4 * self.size))
        salt, tokens = rng.choice(list(model.blocks))
        return salt, [*tokens[: rng.randint(0, len(tokens))], *self.draw(rng.randint(1, 2 * self.size))]

    def hold_cached(self) -> None:
        """A table begins with what is cached of some tokens."""
        salt, tokens = self.known()
        limit = self.rng.randint(0, len(tokens))
        table = self.begin(tokens, salt, limit)
        count = self.model.longest(salt, tokens, limit) // self.size
        assert len(table.blocks) == count == table.num_cached
        held = Held(table, salt, tokens[: count * self.size], count)
        assert table.blocks == [self.model.blocks[path] for path in held.paths(self.size)]
        self.model.tables.append(held)
        for path in held.paths(self.size):
            self.model.released.pop(path, None)

    def append(self, held: Held) -> None:
        tokens = self.draw(self.rng.randint(1, 2 * self.size + 2))
        before = list(held.table.blocks), held.table.num_tokens, self.pool.num_free
        try:
            copies = held.table.append(len(tokens))
        except OutOfBlocks:
            assert (held.table.blocks, held.table.num_tokens, self.pool.num_free) == before
            return
        for copy in copies:
            self.memory[copy.target] = list(self.memory[copy.source])
        for token in tokens:
            block = held.table.blocks[len(held.tokens) // self.size]
            assert self.pool.holders(block) == 1, "a block that others hold was written"
            self.memory[block][len(held.tokens) % self.size] = token
            held.tokens.append(token)

    def publish_with_siblings(self, held: Held) -> None:
        """A table caches its full blocks, and tables that share blocks of their own with it do so too."""
        if held.is_detached:
            return
        family, shared, before = [held], set(held.table.blocks[held.num_cached :]), self.model.holders()
        while more := [
            each
            for each in self.model.tables
            if each not in family and shared.intersection(each.table.blocks[each.num_cached :])
        ]:
            family += more
            shared.update(block for each in more for block in each.table.blocks[each.num_cached :])
        tails = {each.table.blocks[-1] for each in family if len(each.tokens) % self.size}
        if any(tails.intersection(each.table.blocks[: len(each.tokens) // self.size]) for each in family):
            return  # what is full for one is not for another: such blocks are cached when that has copied its own
        for each in family:
            self.publish(each.table, each.tokens)
            self._cached(each, len(each.tokens) // self.size)
        self.model.let_go(before)

    def _cached(self, held: Held, count: int) -> None:
        held.num_cached = count
        for path, block in zip(held.paths(self.size), held.table.blocks, strict=False):
            assert self.model.blocks.setdefault(path, block) == block, "the same tokens were cached twice"
            self.model.gone.discard(path)
            self.model.released.pop(path, None)

    def fork(self, held: Held) -> None:
        forked = Held(held.table.fork(), held.salt, list(held.tokens), held.num_cached, held.is_detached)
        self.model.tables.append(forked)

    def follow(self, held: Held) -> None:
        other, before = self.rng.choice(self.model.tables), self.model.holders()
        blocks = list(held.table.blocks)
        same = held.table.replace_with(other.table)
        assert blocks[:same] == other.table.blocks[:same]
        held.salt, held.tokens, held.num_cached = other.salt, list(other.tokens), other.num_cached
        held.is_detached = other.is_detached
        self.model.let_go(before)

    def truncate(self, held: Held) -> None:
        least = held.num_cached * self.size
        length = self.rng.randint(least, max(least, len(held.tokens)))
        held.table.truncate(length)
        del held.tokens[length:]

    def free(self, held: Held) -> None:
        before = self.model.holders()
        self.model.tables.remove(held)
        held.table.free()
        self.model.let_go(before)

    def take_blocks(self) -> None:
        unused = self.pool.num_free - self.pool.num_evictable
        count = self.rng.randint(unused, min(unused + 3, self.pool.num_free))
        self.pool.release(self.pool.take(count))

    def split(self) -> None:
        """A run is cut somewhere on the way to its end, whoever holds it."""
        salt, tokens = self.known()
        match = self.match(tokens, salt)
        if match.node is not None and match.num_blocks:
            end = self.rng.randint(1, match.num_blocks)
            num_nodes = len(list(self.tree.nodes()))
            node = self.tree.node_at(match.node, end)
            assert node.end == end
            if len(list(self.tree.nodes())) > num_nodes:
                self._used(node)

    def _used(self, node: Node) -> None:
        """What is split off a run that nobody holds counts as used now, and the way to it."""
        self.model.time += 1
        above: Node | None = node
        while above is not None and above.locks == 0:
            for index in range(len(above.blocks)):
                tokens = self.tokens_to(above, index)
                self.model.released[above.salt, tokens] = self.model.time, -len(tokens)
            above = above.parent

    def clear(self) -> None:
        unheld = len(self.model.blocks) - len(self.model.holders())
        assert self.tree.clear() == unheld
        self.model.blocks.clear()
        self.model.released.clear()
        self.model.gone.clear()
        for held in self.model.tables:
            held.is_detached = True

    def play(self) -> None:
        """One operation."""
        rng, tables = self.rng, self.model.tables
        names = ["hold_cached"] * 5 + ["take_blocks"] * 2 + ["split", "split"] + ["clear"] * (rng.random() < 0.03)
        if tables:
            names += ["append"] * 6 + ["publish_with_siblings"] * 6 + ["free"] * (2 if len(tables) < 8 else 8)
            names += ["fork", "fork", "follow", "truncate"]
        name = rng.choice(names)
        self.done[name] += 1
        if name in ("hold_cached", "take_blocks", "split", "clear"):
            getattr(self, name)()
        else:
            getattr(self, name)(rng.choice(tables))

    # ------------------------------------------------------------------------------------------------------ comparing
    def compare(self) -> None:
        self.check()
        model, pool, tree = self.model, self.pool, self.tree
        holders, private = model.holders(), Counter[int]()
        detached: Counter[int] = Counter()
        for held in model.tables:
            held.table.check()
            assert held.table.num_tokens == len(held.tokens)
            assert held.table.num_cached == held.num_cached
            stored = [token for block in held.table.blocks for token in self.memory[block]]
            assert stored[: len(held.tokens)] == held.tokens, "a table reads what another wrote"
            private.update(held.table.blocks[held.num_cached :])
            if held.is_detached:
                detached.update(held.table.blocks[: held.num_cached])
        for (_, tokens), block in model.blocks.items():
            assert tuple(self.memory[block]) == tokens[-self.size :], "a cached block was overwritten"
        assert len(tree) == len(model.blocks) + len(detached)
        assert pool.num_evictable == len(model.blocks) - len(holders) == len(tree.evictable_blocks())
        assert pool.num_used == len(private) + len(holders) + len(detached)
        assert pool.num_free == pool.num_blocks - pool.num_used
        assert pool.num_shared == sum(count > 1 for count in private.values())
        assert tree.num_shared == sum(count > 1 for counts in (holders, detached) for count in counts.values())
        assert pool.num_evicted == model.evictions
        assert [pool.holders(block) for block in range(pool.num_blocks)] == [private[b] for b in range(pool.num_blocks)]

    def compare_match(self) -> None:
        salt, tokens = self.known()
        limit, model = self.rng.randint(0, len(tokens)), self.model
        match, wanted = self.match(tokens, salt, limit), model.longest(salt, tokens, limit)
        assert (match.num_tokens, match.num_blocks) == (wanted, wanted // self.size)
        assert (match.partial is None) == (wanted % self.size == 0)
        paths = [(salt, tuple(tokens[: count * self.size])) for count in range(1, match.num_blocks + 1)]
        if match.node is None:
            assert not paths
            return
        assert self.tree.path(match.node)[: match.num_blocks] == [model.blocks[path] for path in paths]
        if match.partial is not None:
            whole, rest = match.num_blocks * self.size, wanted % self.size
            assert self.memory[match.partial][:rest] == tokens[whole:wanted]
            assert match.closest is not None
            assert match.partial in match.closest.blocks

    def compare_ghosts(self) -> None:
        """What is remembered of evictions is remembered where it was, and it is not there any more."""
        for node in [*self.tree.nodes(), *(self.tree.root(salt) for salt in SALTS if self.tree.has(salt))]:
            ghosts = node.ghosts or {}
            assert len(ghosts) <= MAX_GHOSTS
            for first_block, ghost in ghosts.items():
                tokens = (*self.tokens_to(node, len(node.blocks) - 1), *unpack(first_block))
                following = [
                    path for path in self.model.gone if path[0] == node.salt and path[1][: len(tokens)] == tokens
                ]
                assert (node.salt, tokens) in following
                assert 0 < ghost.num_blocks <= len(following)

    def compare_keys(self) -> None:
        """Content hashes are those of the tokens, however runs were split, extended and evicted."""
        for node in self.tree.nodes():
            if self.rng.random() < 0.3:
                tokens = self.tokens_to(node, len(node.blocks) - 1)
                width, data = self.size * TOKEN_BYTES, pack(tokens)
                parts = [data[place : place + width] for place in range(0, len(data), width)]
                keys = list(chain_keys(root_key(b"space", node.salt), parts))
                index = self.rng.randrange(len(node.blocks))
                assert self.tree.key_of(node, index) == keys[node.start + index]


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations_leave_tree_pool_and_tables_as_a_dictionary_says(
    eviction: EvictionName, size: int, seed: int
) -> None:
    game = Play(seed, size, eviction)
    for number in range(1_000):
        game.play()
        game.compare()
        game.compare_match()
        game.compare_ghosts()
        if number % 10 == 0:
            game.compare_keys()
    assert game.model.evictions > 20
    assert min(game.done[name] for name in ("hold_cached", "append", "publish_with_siblings", "split", "free")) > 10
    for held in list(game.model.tables):
        game.free(held)
        game.compare()
    assert game.pool.num_used == 0
