"""What requests find in an engine, what they are told of it, and that nobody reads what another has overwritten."""

from __future__ import annotations

from collections import Counter

import pytest

from cached_tables import pack
from fake_tiers import FakeTiers
from harness import Harness
from quire.config.tiers import EVICTION_NAMES, EvictionName, TierConfig
from quire.engine.kvcache.prefix_tree import Match, Node, PrefixTree
from quire.types.request import Abort, Branch
from toy_model import continuation

ENDS = tuple(range(0, 90, 3))  # answers end soon


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ask(engine: Harness, name: str, prompt: list[int], **params: object) -> None:
    """Submit a request and run the engine until all requests are over."""
    engine.submit(name, prompt, **{"max_tokens": 1, **params})  # type: ignore[arg-type]
    engine.run()


def entries(engine: Harness, name: str, kind: str) -> list[tuple[int, str]]:
    """Amounts and notes of a request's ledger."""
    return [(entry.amount, entry.note) for entry in engine.finished[name].ledger if entry.kind == kind]


def block(*names: int, size: int = 4) -> list[int]:
    """A block of equal tokens for each name."""
    return [name for name in names for _ in range(size)]


# -------------------------------------------------------------------------------------------- why no more was found
def test_a_miss_names_the_request_whose_prompt_differs_and_the_first_token_that_does() -> None:
    engine = Harness()
    ask(engine, "a", block(1, 2, 3))
    ask(engine, "b", block(1, 2, 4))
    ask(engine, "c", [*block(1), 2, 2, 5, 5, 5])
    ask(engine, "d", [*block(1), *block(2), *block(4), *block(9)])
    assert entries(engine, "b", "missed") == [(9, "from here on it differs from request a")]
    assert entries(engine, "c", "missed") == [(7, "from here on it differs from request a")]
    assert entries(engine, "d", "cached") == [(12, "")]
    assert entries(engine, "d", "missed") == [(13, "nothing more is cached")]


def test_a_request_that_finds_all_but_its_last_token_misses_nothing() -> None:
    engine = Harness()
    ask(engine, "a", block(1, 2))
    for name, prompt in (("same", block(1, 2)), ("longer", [*block(1, 2), 7]), ("shorter", block(1, 2)[:6])):
        ask(engine, name, prompt)
        assert entries(engine, name, "cached") == [(len(prompt) - 1, "")]
        assert entries(engine, name, "missed") == []


@pytest.mark.parametrize("other", [{"salt": "other"}, {"salt": "other", "n": 2}])
def test_a_request_of_another_salt_is_told_that_nothing_is_cached(other: dict[str, object]) -> None:
    engine = Harness()
    ask(engine, "a", block(1, 2, 3))
    ask(engine, "b", block(1, 2, 3), **other)
    assert entries(engine, "b", "missed") == [(1, "nothing is cached")]


def test_a_request_that_reads_nothing_is_told_nothing() -> None:
    engine, without = Harness(), Harness(caching=False)
    ask(engine, "a", block(1, 2, 3))
    ask(engine, "b", block(1, 2, 3), prompt_logprobs=0)
    ask(without, "c", block(1, 2, 3))
    assert entries(engine, "b", "missed") == entries(without, "c", "missed") == []


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_miss_names_what_was_evicted_when_and_by_which_policy(eviction: EvictionName, at_once: bool) -> None:
    clock = Clock()
    engine = Harness(num_blocks=12, eviction=eviction, clock=clock, max_model_len=48)
    ask(engine, "pinned", block(1), pin="first")
    ask(engine, "a", [*block(1, 2, 3, 4), 5])
    clock.now += 10.0
    filler = [number % 90 for number in range(50, 50 + 4 * 11)]
    if at_once:
        ask(engine, "filler", filler, max_tokens=1)  # takes all blocks but the pinned one
    else:
        ask(engine, "filler", filler[:4], max_tokens=40)  # takes them one by one
    clock.now += 2.5
    ask(engine, "again", [*block(1, 2, 3, 4), 5])
    assert entries(engine, "again", "cached") == [(4, "")]
    assert entries(engine, "again", "missed") == [(5, f"12 tokens from here on were evicted 2.5 s ago by {eviction}")]


def test_a_prompt_that_was_never_cached_is_not_said_to_be_evicted() -> None:
    """The second and third blocks of "a" are evicted one after the other; the prompt goes on with the third alone."""
    engine = Harness(num_blocks=12, max_model_len=48)
    ask(engine, "a", block(1, 2, 3))
    ask(engine, "filler", [60, 61, 62, 63], max_tokens=40)  # eleven blocks
    ask(engine, "other", [*block(1, 3), 7])
    assert entries(engine, "other", "cached") == [(4, "")]
    ((_, note),) = entries(engine, "other", "missed")
    assert "evicted" not in note


# ----------------------------------------------------------------------------------------------------- looking up
@pytest.fixture
def matches(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often the tree was searched for each prompt, by its length."""
    counted: Counter[int] = Counter()
    match = PrefixTree.match

    def count(tree: PrefixTree, salt: str, tokens: bytes, limit: int) -> Match:
        counted[limit + 1] += 1
        return match(tree, salt, tokens, limit)

    monkeypatch.setattr(PrefixTree, "match", count)
    return counted


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "spf", "fair"])
def test_a_waiting_request_is_looked_up_once_while_nothing_changes(policy: str, matches: Counter[int]) -> None:
    engine = Harness(policy=policy, max_num_seqs=2, max_num_batched_tokens=64)
    ask(engine, "cached", block(1, 2, 3))
    for number in range(2):
        engine.submit(f"runs {number}", [50 + number], max_tokens=40)
    for _ in range(3):
        engine.step()
    matches.clear()
    lengths = range(13, 18)
    for length in lengths:
        engine.submit(f"waits {length}", [*block(1, 2, 3), *range(60, 48 + length)], max_tokens=2)
    for _ in range(20):
        engine.step()
    assert len(engine.core._scheduler.waiting) == 5
    assert all(matches[length] <= 1 for length in lengths)
    engine.run()


def test_a_waiting_request_is_looked_up_again_when_its_match_may_have_become_longer(matches: Counter[int]) -> None:
    engine = Harness(policy="lpm", max_num_seqs=2, max_num_batched_tokens=64)
    ask(engine, "cached", block(1, 2))
    scheduler = engine.core._scheduler
    engine.submit("runs", [50], max_tokens=60)
    engine.step()
    engine.submit("beside", [*block(1, 2, 3), 9], max_tokens=1)  # publishes more of the same prefix
    engine.submit("waits", [*block(1, 2, 3, 4), 5], max_tokens=1, n=2)  # has no two rows before the others end
    (group,) = [each for each in scheduler.waiting if each.request.request_id == "waits"]
    assert scheduler.num_cached(group) == 8
    assert scheduler.num_cached(group) == 8
    assert matches[17] == 1
    engine.step()
    assert scheduler.num_cached(group) == 12
    assert matches[17] == 2
    engine.core.abort(Abort("runs"))
    engine.run()
    assert entries(engine, "waits", "cached") == [(12, "")]


def test_a_lookup_that_was_made_before_its_blocks_were_evicted_is_made_again() -> None:
    engine = Harness(num_blocks=12, policy="lpm", max_num_seqs=1, max_model_len=48)
    ask(engine, "cached", block(1, 2, 3, 4))
    scheduler = engine.core._scheduler
    engine.submit("runs", [60, 61, 62, 63], max_tokens=40)
    engine.step()
    engine.submit("waits", [*block(1, 2, 3, 4), 5], max_tokens=1)
    (group,) = scheduler.waiting
    found = [scheduler.num_cached(group)]
    while len(scheduler.running):
        engine.step()
        if not group.is_running:
            blocks = scheduler.tree.match("", group.prompt, 16).num_tokens
            assert scheduler.num_cached(group) == blocks
            found.append(blocks)
    assert found[0] == 16
    assert found[-1] < 16
    engine.run()


# ------------------------------------------------------------------------------------------------ who waits for whom
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "spf", "fair", "priority"])
def test_twins_of_a_prompt_in_work_wait_for_it_and_find_all_of_it(policy: str) -> None:
    engine = Harness(policy=policy, max_num_batched_tokens=16)
    shared = [place * 7 % 50 for place in range(40)]
    for number in range(4):
        engine.submit(f"r{number}", [*shared, 60 + number, 61], max_tokens=3, seed=1)
    engine.run()
    first, *others = sorted(engine.finished, key=lambda name: bool(entries(engine, name, "cached")))
    assert entries(engine, first, "cached") == []
    for name in others:
        assert entries(engine, name, "cached") == [(40, "")]
        assert entries(engine, name, "admitted") == [(0, f"waited: request {first} computes the same prefix")]
        assert engine.answer(name) == continuation([*shared, 60 + int(name[1]), 61], 3, seed=1)
    computed = sum(chunk.num_tokens for plan in engine.executor.plans for chunk in plan.chunks)
    assert computed == 40 + 4 * 2


# ---------------------------------------------------------------------------------------------------- publishing
def test_a_copy_of_cached_blocks_is_searched_for_only_when_its_sequence_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, searched = Harness(max_num_batched_tokens=8), list[int]()
    ask(engine, "first", [*block(1, 2, 3, 4, 5, 6), 9])
    descend = PrefixTree.descend

    def count(tree: PrefixTree, node: Node, tokens: bytes, num_blocks: int) -> tuple[Node, int]:
        searched.append(num_blocks)
        return descend(tree, node, tokens, num_blocks)

    engine.submit("copy", [*block(1, 2, 3, 4, 5, 6), 9], prompt_logprobs=0, max_tokens=1)
    monkeypatch.setattr(PrefixTree, "descend", count)
    engine.run()
    assert len(engine.finished["copy"].ledger) > 5  # several chunks
    assert searched == [6]
    assert engine.core.stats().blocks.cached == 6


def test_tiers_are_told_once_of_each_block_that_becomes_cached_in_the_order_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Harness(tiers=TierConfig(32, write="through"), max_num_batched_tokens=8)
    tiers, told = engine.core._scheduler.tiers, list[tuple[int, int]]()
    publish = tiers.on_publish

    def note(node: Node, first: int) -> None:
        told.append((node.start + first, node.end))
        publish(node, first)

    monkeypatch.setattr(tiers, "on_publish", note)
    ask(engine, "a", [*block(1, 2, 3), 7])
    ask(engine, "b", [*block(1, 2, 3, 4), 7])
    ask(engine, "c", [*block(1, 9), 7])
    assert told == [(0, 2), (2, 3), (3, 4), (1, 2)]


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
def test_a_block_that_is_found_in_part_counts_as_used(eviction: EvictionName) -> None:
    """The last token of a prompt is computed anew, so the last block of one that comes again is found but for it."""
    engine = Harness(num_blocks=16, eviction=eviction)
    ask(engine, "once", block(2))
    for number in range(3):
        ask(engine, f"again {number}", block(1))
    ask(engine, "later", block(3))
    scheduler = engine.core._scheduler
    order = {"lru": [2, 1, 3], "fifo": [2, 1, 3]}.get(eviction, [2, 3, 1])
    assert engine.core.stats().blocks.cached == 3
    for gone in range(1, 4):
        scheduler.pool.release(scheduler.pool.take(13 + gone))
        assert [name for name in (1, 2, 3) if scheduler.tree.match("", pack(block(name)), 4).num_blocks] == sorted(
            order[gone:]
        )


# ----------------------------------------------------------------------------------------------------- siblings
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n", [2, 3])
def test_what_samples_share_stays_theirs_when_one_of_them_ends(n: int, depth: int) -> None:
    """All compute their own copy of a prompt that is cached in part, and share what follows. What the first to end
    leaves to the cache, the others still use."""
    engine = Harness(num_blocks=36, depth=depth, max_model_len=80)
    ask(engine, "cached", [*block(1), 9])
    prompt = [*block(1), *range(20, 36)]
    engine.submit("samples", prompt, n=n, prompt_logprobs=0, max_tokens=40, seed=1, end_ids=ENDS[:9])
    number = 0
    while "samples" not in engine.finished:
        engine.step()
        if engine.core.stats().waiting == 0 and number < 30:
            number += 1
            engine.submit(f"other {number}", [number + 40] * 12, max_tokens=2, seed=1)  # wants blocks
    engine.run()
    lengths = {len(sample.token_ids) for sample in engine.finished["samples"].samples}
    assert len(lengths) > 1
    for index in range(n):
        wanted = continuation(prompt, 40, seed=1, index=index, end_ids=ENDS[:9])
        assert engine.answer("samples", index) == wanted


@pytest.mark.parametrize("depth", [1, 2])
def test_what_samples_of_a_branch_borrow_stays_theirs_when_one_of_them_ends(depth: int) -> None:
    """A request that computed a cached prompt again caches nothing before its end. Its branches borrow what it says."""
    engine, story = Harness(num_blocks=40, depth=depth, max_model_len=80), [place * 7 % 90 for place in range(12)]
    ask(engine, "cached", story)
    engine.submit("origin", story, max_tokens=40, prompt_logprobs=0, seed=1)
    while len(engine.streams.get(engine.handles["origin"], [])) < 14:
        engine.step()
    said = [*story, *engine.streams[engine.handles["origin"]][:13]]
    source = Branch("origin", 0, len(said))
    engine.submit("branch", [*said, 7], n=2, max_tokens=30, seed=4, end_ids=ENDS[:9], source=source)
    engine.step()
    engine.core.abort(Abort("origin"))
    number = 0
    while "branch" not in engine.finished:
        engine.step()
        if engine.core.stats().waiting == 0 and number < 30:
            number += 1
            engine.submit(f"other {number}", [number + 40] * 12, max_tokens=2, seed=1)  # wants blocks
    engine.run()
    answers = [continuation([*said, 7], 30, seed=4, index=index, end_ids=ENDS[:9]) for index in range(2)]
    assert [engine.answer("branch", index) for index in range(2)] == answers
    assert len(answers[0]) != len(answers[1])


# --------------------------------------------------------------------------------------------------- host memory
def host_engine(host_blocks: int = 32, **settings: object) -> Harness:
    return Harness(
        tiers=TierConfig(host_blocks),
        behind=FakeTiers(host_blocks, 4),
        preemption="recompute",
        **settings,  # type: ignore[arg-type]
    )


def test_a_branch_that_finds_less_in_host_memory_than_it_borrows_loads_nothing() -> None:
    engine, story = host_engine(num_blocks=32, max_model_len=64), [place * 7 % 90 for place in range(12)]
    ask(engine, "cached", story[:9])
    engine.submit("origin", story, max_tokens=20, prompt_logprobs=0, seed=1)  # computes blocks of its own
    engine.step()
    pool = engine.core._scheduler.pool
    pool.release(pool.take(pool.num_free))  # what is cached goes to host memory
    engine.step()
    said = [*story, *engine.streams[engine.handles["origin"]]]
    engine.submit("branch", [*said, 3], max_tokens=4, seed=2, source=Branch("origin", 0, len(said)))
    engine.run()
    assert engine.core.dead is None
    assert engine.core.stats().tiers.saved > 0
    assert engine.answer("branch") == continuation([*said, 3], 4, seed=2)
    assert engine.answer("origin") == continuation(story, 20, seed=1)


def test_a_group_whose_blocks_another_one_loads_waits_for_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are admitted in the same step, and what is loaded may only be read by the next one."""
    engine = host_engine(num_blocks=24, max_num_batched_tokens=64, max_model_len=88)
    reuse, story = engine.core._scheduler.reuse, [place * 7 % 90 for place in range(16)]
    ask(engine, "before", [*story, 5])
    ask(engine, "filler", [50] * 84)
    monkeypatch.setattr(reuse._in_progress, "find", lambda *_: None)  # as for a group that computes no prompt
    engine.submit("one", [*story, 6], max_tokens=3, seed=1)
    engine.submit("two", [*story, 7], max_tokens=3, seed=1)
    engine.run()
    assert [entries(engine, name, "cached")[0][0] for name in ("one", "two")] == [16, 16]
    assert engine.core.dead is None
    for name, last in (("one", 6), ("two", 7)):
        assert engine.answer(name) == continuation([*story, last], 3, seed=1)


# ------------------------------------------------------------------------------------------------------ branches
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_branch_of_samples_that_this_step_computes_reads_nothing_before_it_is_there(index: int, depth: int) -> None:
    """The samples are forked in the step that computes the end of their prompt; the branch is admitted beside them."""
    engine, prompt = Harness(max_num_batched_tokens=16, depth=depth), [place * 7 % 90 for place in range(22)]
    engine.submit("origin", prompt, n=3, max_tokens=6, seed=1)
    engine.step()
    engine.submit("branch", prompt[:19], max_tokens=4, seed=2, source=Branch("origin", index, 19))
    engine.run()
    assert engine.core.dead is None
    assert engine.answer("branch") == continuation(prompt[:19], 4, seed=2)
    for sample in range(3):
        assert engine.answer("origin", sample) == continuation(prompt, 6, seed=1, index=sample)
