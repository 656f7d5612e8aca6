"""The tree finds the longest cached prefix token by token, within one salt, whatever is split, extended or evicted."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cached_tables import CachedTables, pack
from quire.engine.kvcache.prefix_tree import NO_MATCH, Node
from quire.engine.kvcache.run_history import MAX_GHOSTS, Eviction, Owner
from quire.engine.kvcache.table import BlockTable


def found(cache: CachedTables, tokens: Sequence[int], salt: str = "") -> tuple[list[int], int]:
    """The blocks of a match, a partial one included, and how many tokens agree."""
    match = cache.match(tokens, salt)
    blocks = [] if match.node is None else cache.tree.path(match.node)[: match.num_blocks]
    return blocks if match.partial is None else [*blocks, match.partial], match.num_tokens


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def node_of(table: BlockTable) -> Node:
    assert table.node is not None
    return table.node


# -------------------------------------------------------------------------------------------------------- matching
def test_a_match_ends_at_the_first_token_that_differs() -> None:
    cache = CachedTables(8, 4)
    one, two = cache.hold([1, 2, 3, 4, 5, 6, 7, 8]).blocks
    assert found(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == ([one, two], 8)
    assert found(cache, [1, 2, 3, 4, 5, 6, 0, 8, 9]) == ([one, two], 6)
    assert found(cache, [1, 2, 3, 4, 9]) == ([one], 4)
    assert found(cache, [1, 2]) == ([one], 2)
    assert found(cache, [2, 1]) == ([], 0)
    assert found(cache, []) == ([], 0)
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8], limit=7).num_tokens == 7
    assert cache.match([1, 2, 3, 4], "other") == NO_MATCH


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_it_agrees_with_a_search_through_everything(size: int) -> None:
    rng, cache, cached = random.Random(size), CachedTables(400, size), []
    for _ in range(60):
        tokens = [rng.randrange(3) for _ in range(rng.randint(0, 5 * size))]
        cache.hold(tokens).free()
        cached.append(tokens[: len(tokens) // size * size])
    cache.check()
    for _ in range(300):
        asked = [rng.randrange(3) for _ in range(rng.randint(0, 6 * size))]
        assert found(cache, asked)[1] == max(common(asked, tokens) for tokens in cached)


def test_salts_never_meet_however_they_are_spelled() -> None:
    cache, tokens = CachedTables(16, 2), [7, 7, 7, 7]
    held = {}
    for salt in ["", "a", "b", "aa", "a\0", "\udc80"]:
        assert found(cache, tokens, salt) == ([], 0)
        held[salt] = cache.hold(tokens, salt)
    for salt, table in held.items():
        assert found(cache, tokens, salt) == (table.blocks, 4)
    assert len({block for table in held.values() for block in table.blocks}) == 12
    cache.check()


def test_a_salt_cannot_be_continued_by_tokens() -> None:
    cache = CachedTables(4, 1)
    cache.hold([0x61616161, 5])
    assert found(cache, [5], "aaaa") == ([], 0)


def test_the_child_that_agrees_furthest_is_found_among_many() -> None:
    cache, rng = CachedTables(300, 4), random.Random(1)
    blocks = {tuple(rng.randrange(4) for _ in range(4)) for _ in range(200)}
    for block in blocks:
        cache.hold(block).free()
    for _ in range(300):
        asked = [rng.randrange(5) for _ in range(4)]
        match = cache.match(asked, limit=3)
        assert match.num_tokens == max(common(asked[:3], block) for block in blocks)
        assert match.closest is not None
        assert common(asked[:3], cache.tokens_to(match.closest, 0)) == match.num_tokens
        assert match.partial == (match.closest.blocks[0] if match.num_tokens else None)


def test_evicted_blocks_are_not_found() -> None:
    cache = CachedTables(4, 2)
    cache.hold([1, 2, 3, 4]).free()
    assert cache.evict(1) == [(1, 2, 3, 4)]
    assert found(cache, [1, 2, 3, 4])[1] == 2
    assert cache.evict(1) == [(1, 2)]
    assert (found(cache, [1, 2, 3, 4]), len(cache.tree)) == (([], 0), 0)


# ------------------------------------------------------------------------------------------------------- splitting
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_run_is_split_while_tables_hold_it(cut: int) -> None:
    cache = CachedTables(16, 2)
    tokens = list(range(8))
    first = cache.hold(tokens)
    second, blocks = first.fork(), list(first.blocks)
    other = cache.hold([*tokens[: 2 * cut], 90, 91])
    cache.check()
    for table in (first, second, other):
        table.check()
    head = node_of(other).parent
    assert head is not None
    assert (len(head.blocks), head.locks, node_of(first).locks) == (cut, 3, 2)
    assert node_of(first).parent is head
    assert first.blocks == second.blocks == blocks
    assert other.blocks[:cut] == blocks[:cut]
    assert cache.tree.num_shared == 4  # the whole run: two tables hold its end, three its beginning
    first.free()
    assert cache.tree.num_shared == cut
    second.free()
    cache.check()
    assert cache.pool.num_evictable == 4 - cut
    assert cache.evict(4 - cut) == [tuple(tokens[: 2 * end]) for end in range(4, cut, -1)]
    other.free()
    assert cache.pool.num_used == 0


@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo", "size-aware"])
def test_a_run_that_nobody_holds_is_split_and_evicted_from_its_end(eviction: str) -> None:
    cache = CachedTables(12, 2, eviction)  # type: ignore[arg-type]
    cache.use(1, 2, 3, 4)
    match = cache.match([1, 1, 2, 2, 3, 9])
    assert (match.num_blocks, match.num_tokens) == (2, 5)
    head = cache.tree.node_at(match.node, 2)  # type: ignore[arg-type]
    cache.check()
    assert (head.locks, [len(node.blocks) for node in (head, *head.children.values())]) == (0, [2, 2])
    assert found(cache, [1, 1, 2, 2, 3, 3, 4, 4])[1] == 8
    assert [path[::2] for path in cache.evict(4)] == [(1, 2, 3, 4), (1, 2, 3), (1, 2), (1,)]


def test_node_at_finds_every_end_on_the_way_to_a_node_and_splits_only_inside_a_run() -> None:
    cache = CachedTables(16, 1)
    table = cache.hold([1, 2, 3, 4, 5, 6])
    cache.hold([1, 2, 9])
    node = node_of(table)
    assert cache.tree.node_at(node, 6) is node
    assert cache.tree.node_at(node, 2) is node.parent
    assert cache.tree.node_at(node, 0) is cache.tree.root("")
    inner = cache.tree.node_at(node, 4)
    assert (inner.start, inner.end, node.start, node.end) == (2, 4, 4, 6)
    assert cache.tree.path(inner) == table.blocks[:4]
    assert cache.tree.node_at(node, 4) is inner
    cache.check()
    table.check()


def test_a_match_that_points_into_a_run_says_that_it_is_outdated_when_the_run_is_split() -> None:
    cache = CachedTables(16, 2)
    table = cache.hold(list(range(8)))
    match = cache.match([0, 1, 2, 3, 4, 5, 9])  # six tokens
    node = match.node
    assert node is node_of(table)
    before = node.changes
    cache.hold([0, 1, 90, 91])
    assert node.changes > before
    again = cache.match([0, 1, 2, 3, 4, 5, 9])
    assert (again.node, again.num_blocks, again.num_tokens) == (node, 3, 6)
    assert cache.tree.path(node)[:3] == table.blocks[:3]


@pytest.mark.parametrize("tokens", [[0, 1, 2, 3, 5, 5], [0, 1], [0, 1, 7, 7, 7, 7]])
def test_a_node_changes_whenever_a_match_that_ends_there_becomes_longer(tokens: list[int]) -> None:
    """Whatever is published: as long as a match's node has not changed, the same tokens match as they did."""
    rng, cache = random.Random(len(tokens)), CachedTables(200, 2)
    cache.hold([0, 1, 2, 3]).free()
    match = cache.match(tokens)
    assert match.node is not None
    changes = match.node.changes
    for _ in range(60):
        length = rng.randint(1, len(tokens))
        cache.hold([token if rng.random() < 0.8 else rng.choice([5, 7]) for token in tokens[:length]]).free()
        assert match.node is not None
        if match.node.changes == changes and not match.node.is_detached:
            assert cache.match(tokens) == match
        else:
            match = cache.match(tokens)
            changes = match.node.changes  # type: ignore[union-attr]
    assert cache.match(tokens).num_tokens == len(tokens) // 2 * 2


# ------------------------------------------------------------------------------------------------------- extending
def test_a_run_that_only_its_holder_holds_is_extended_in_place() -> None:
    cache = CachedTables(16, 2)
    table = cache.hold([1, 2])
    node = node_of(table)
    for length in (4, 6, 8):
        table.append(2)
        cache.publish(table, list(range(1, length + 1)))
        assert node_of(table) is node
        assert node.blocks == table.blocks
        assert found(cache, list(range(1, 20))) == (table.blocks, length)
        cache.check()
    assert len(list(cache.tree.nodes())) == 1


def test_a_run_that_others_hold_or_that_leads_on_gets_a_child() -> None:
    cache = CachedTables(16, 2)
    table = cache.hold([1, 2])
    other = cache.hold([1, 2])
    table.append(2)
    cache.publish(table, [1, 2, 3, 4])
    assert node_of(table).parent is node_of(other)
    table.free()
    other.append(2)
    cache.publish(other, [1, 2, 5, 6])  # alone again, but its run has a child
    assert {tuple(child.tokens) for child in next(iter(cache.tree.root("").children.values())).children.values()} == {
        tuple(pack([3, 4])),
        tuple(pack([5, 6])),
    }
    cache.check()


def test_a_run_that_was_evicted_in_part_remembers_it_when_other_tokens_follow() -> None:
    cache = CachedTables(16, 2)
    cache.hold([1, 2, 3, 4, 5, 6]).free()
    assert len(cache.evict(2)) == 2
    table = cache.hold([1, 2, 7, 8])
    assert len(list(cache.tree.nodes())) == 2
    assert remembered(cache, [1, 2, 3, 4]) == Eviction(0.0, 2, Owner(""))
    assert found(cache, [1, 2, 7, 8, 5, 6]) == (table.blocks, 4)
    assert found(cache, [1, 2, 3, 4])[1] == 2
    cache.check()


# ------------------------------------------------------------------------------------------------------ forgetting
def test_a_node_from_before_a_clearing_is_detached_and_found_no_more() -> None:
    cache = CachedTables(8, 2)
    held = cache.hold([1, 2, 3, 4])
    cache.hold([5, 6]).free()
    root, node = cache.tree.root(""), node_of(held)
    assert cache.tree.clear() == 1
    assert root.is_detached
    assert node.is_detached
    assert found(cache, [1, 2, 3, 4]) == ([], 0)
    fresh = cache.hold([1, 2])
    assert fresh.blocks[0] not in held.blocks
    assert not node_of(fresh).is_detached
    cache.pool.check(len(cache.tree))
    held.check()
    held.free()
    cache.check()
    assert cache.pool.num_used == 1
    assert len(cache.tree) == 1


def test_forks_of_a_table_from_before_a_clearing_give_everything_back() -> None:
    cache = CachedTables(8, 2)
    held = cache.hold([1, 2, 3, 4])
    cache.tree.clear()
    forks = [held.fork(), held.fork()]
    assert cache.tree.num_shared == 2
    forks[0].replace_with(cache.hold([9, 9]))
    for table in (held, *forks):
        table.check()
        table.free()
        cache.pool.check(len(cache.tree))
    assert cache.tree.num_shared == 0
    assert cache.pool.num_used == 1  # what was cached after the clearing


def test_a_salt_of_which_nothing_is_cached_or_held_leaves_no_trace() -> None:
    cache = CachedTables(4, 2)
    for number in range(50):
        salt = f"tenant {number}"
        table = cache.begin([1, 2, 3], salt)
        assert cache.tree.has(salt)
        table.free()
        assert not cache.tree.has(salt)
        cache.hold([1, 2], salt).free()
        assert cache.tree.has(salt)
    cache.evict(4)
    assert not any(cache.tree.has(f"tenant {number}") for number in range(50))


def test_a_root_that_was_dropped_and_came_again_is_told_from_the_one_before() -> None:
    """A match that ended at the first root must not stand for the second, under which more is cached."""
    cache = CachedTables(4, 2)
    table = cache.begin([1, 2, 3], "salt")
    match = cache.match([1, 2, 3], "salt")
    assert match.node is not None
    changes = match.node.changes
    table.free()
    cache.hold([1, 2], "salt").free()
    assert match.node.is_detached or match.node.changes != changes
    assert cache.match([1, 2, 3], "salt").num_tokens == 2


# ---------------------------------------------------------------------------------------------------------- ghosts
def remembered(cache: CachedTables, tokens: Sequence[int]) -> Eviction | None:
    """What the tree remembers of an eviction where a match of these tokens ends."""
    match = cache.match(tokens)
    if match.node is None or match.node.ghosts is None or match.node.end != match.num_blocks:
        return None
    start = match.num_blocks * cache.size
    return match.node.ghosts.get(pack(tokens[start : start + cache.size]))


def test_what_was_evicted_is_remembered_where_it_was() -> None:
    cache = CachedTables(8, 2)
    keeps = cache.hold([7, 7])
    cache.use(1, 2, 3)
    cache.tree.now = 5.0
    assert [path[::2] for path in cache.evict(1)] == [(1, 2, 3)]
    assert remembered(cache, [1, 1, 2, 2, 3, 3]) == Eviction(5.0, 1, Owner(""))
    assert remembered(cache, [1, 1, 2, 2, 4, 4]) is None
    cache.tree.now = 6.0
    assert [path[::2] for path in cache.evict(2)] == [(1, 2), (1,)]
    eviction = remembered(cache, [1, 1, 2, 2, 3, 3])
    assert eviction is not None
    assert eviction.at == 6.0
    keeps.free()


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_all_blocks_that_were_evicted_from_a_place_on_are_counted(at_once: int) -> None:
    cache = CachedTables(8, 2)
    keeps = cache.hold([7, 7])
    cache.use(1, 2, 3, 4)
    for _ in range(3 // at_once):
        cache.evict(at_once)
    eviction = remembered(cache, [1, 1, 2, 2, 3, 3, 4, 4])
    assert eviction is not None
    assert eviction.num_blocks == 3 // at_once * at_once
    keeps.free()


def test_what_followed_an_evicted_block_is_not_remembered_at_another_place() -> None:
    """The run 1, 2, 3 loses its last two blocks, one after the other: 1, 3 was never cached."""
    cache = CachedTables(8, 2)
    cache.use(1, 2, 3)
    cache.evict(1)
    cache.evict(1)
    assert remembered(cache, [1, 1, 2, 2]) is not None
    assert remembered(cache, [1, 1, 3, 3]) is None


def test_a_place_remembers_the_last_few_evictions_only() -> None:
    cache = CachedTables(40, 2)
    held = cache.hold([1, 1])
    for name in range(2, 22):
        cache.use(1, name)
    assert len(cache.evict(20)) == 20
    ghosts = node_of(held).ghosts
    assert ghosts is not None
    assert len(ghosts) == MAX_GHOSTS
    assert [remembered(cache, [1, 1, name, name]) is not None for name in range(2, 22)] == [False] * 12 + [True] * 8


def test_what_is_computed_again_is_no_longer_remembered_as_evicted() -> None:
    cache = CachedTables(8, 2)
    held = cache.hold([1, 1])
    other = cache.hold([1, 1, 9, 9])
    cache.use(1, 2)
    cache.evict(1)
    assert remembered(cache, [1, 1, 2, 2]) is not None
    again = cache.hold([1, 1, 2, 2])
    assert node_of(held).ghosts == {}
    again.free()
    other.free()
    assert len(cache.evict(2)) == 2
    assert remembered(cache, [1, 1, 9, 9]) is not None


def test_a_split_leaves_what_is_remembered_at_the_end_of_the_run() -> None:
    cache = CachedTables(8, 2)
    cache.use(1, 2, 3)
    cache.evict(1)
    held = cache.hold([1, 1, 9, 9])  # splits the run 1, 2
    assert remembered(cache, [1, 1, 2, 2, 3, 3]) is not None
    assert remembered(cache, [1, 1, 3, 3]) is None
    held.free()
