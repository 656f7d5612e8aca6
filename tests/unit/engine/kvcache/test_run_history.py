"""What a request is told about the prefix that it did not find, and what it is not told about other tenants."""

from __future__ import annotations

import pytest

from harness import Harness
from quire.config.tiers import TierConfig
from quire.engine.kvcache import run_history
from quire.engine.kvcache.run_history import EvictedSalts, Eviction, Owner, Owners
from quire.types.ledger import PrefixMiss


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def block(*names: int) -> list[int]:
    """A block of equal tokens for each name."""
    return [name for name in names for _ in range(4)]


def ask(engine: Harness, name: str, prompt: list[int], **params: object) -> PrefixMiss | None:
    """Run a request to its end; returns why no more of its prompt was found."""
    engine.submit(name, prompt, **{"max_tokens": 1, **params})  # type: ignore[arg-type]
    engine.run()
    found = [entry for entry in engine.finished[name].ledger if entry.kind == "missed"]
    for entry in found:
        assert entry.miss is not None
        assert (entry.amount, entry.note) == (entry.miss.num_found + 1, entry.miss.text())
    return found[-1].miss if found else None


def fill(engine: Harness, salt: str = "", **params: object) -> None:
    """Evict all that nobody holds: 47 tokens are computed, in all 12 blocks."""
    prompt = [number % 90 for number in range(45, 45 + 4 * 11)]
    ask(engine, f"filler of {salt}", prompt, **{"salt": salt, "max_tokens": 4, **params})


def test_a_request_is_told_of_the_request_that_computed_the_block_where_they_differ() -> None:
    """The second request extends the run of the first, which it holds alone."""
    engine = Harness()
    ask(engine, "first", block(1, 2))
    ask(engine, "second", block(1, 2, 3, 4))
    assert ask(engine, "third", block(1, 2, 3, 5)) == PrefixMiss("differs", 12, "second")
    assert ask(engine, "fourth", block(1, 6, 6)) == PrefixMiss("differs", 4, "first")
    assert ask(engine, "fifth", block(1, 2, 3, 4, 7)) == PrefixMiss("not_cached", 16)


def test_a_request_of_another_tenant_is_not_named() -> None:
    engine = Harness()
    ask(engine, "a", block(1, 2, 3), tenant="one")
    ask(engine, "b", block(1, 2, 4), tenant="two")
    assert ask(engine, "c", block(1, 2, 3, 5, 5), tenant="two") == PrefixMiss("not_cached", 12)
    differs = ask(engine, "d", block(1, 7, 7), tenant="two")
    assert differs == PrefixMiss("differs", 4)
    assert differs.text() == "from here on it differs from another request"
    assert ask(engine, "e", [*block(1), 2, 2, *block(8)], tenant="one") == PrefixMiss("differs", 6, "a")


def test_a_request_that_waits_for_one_of_another_tenant_is_not_told_its_name() -> None:
    engine = Harness(max_num_batched_tokens=16)
    engine.submit("first", block(1, 2, 3, 4, 5, 6), max_tokens=1, tenant="one")
    engine.step()
    for tenant in ("one", "two"):
        engine.submit(tenant, [*block(1, 2, 3, 4, 5, 6), 7], max_tokens=1, tenant=tenant)
    engine.run()
    notes = {
        name: next(entry.note for entry in engine.finished[name].ledger if entry.kind == "admitted")
        for name in ("one", "two")
    }
    assert notes == {
        "one": "waited: request first computes the same prefix",
        "two": "waited: another request computes the same prefix",
    }


def test_an_eviction_is_told_with_as_many_tokens_as_the_prompt_has() -> None:
    clock = Clock()
    engine = Harness(num_blocks=12, clock=clock, max_model_len=48)
    ask(engine, "a", block(1, 2, 3, 4))
    fill(engine)
    clock.now += 2.0
    miss = ask(engine, "again", [*block(1), *block(2)[:3]])
    assert miss == PrefixMiss("evicted", 0, "", 7, 2.0, "lru")
    assert miss.text() == "7 tokens from here on were evicted 2.0 s ago by lru"


def test_what_a_tier_has_lost_of_an_evicted_prompt_is_told_as_evicted() -> None:
    engine = Harness(num_blocks=12, max_model_len=48, tiers=TierConfig(host_blocks=14))
    ask(engine, "a", block(1, 2, 3, 4, 5))
    fill(engine)  # the prompt is in the tier now
    fill(engine, "other")  # and the first blocks of the filler beside it
    miss = ask(engine, "again", block(1, 2, 3, 4, 5))
    (cached,) = [entry for entry in engine.finished["again"].ledger if entry.kind == "cached"]
    assert cached.note == f"host {cached.amount}"
    assert miss is not None
    assert miss.num_found == cached.amount < 19
    assert (miss.reason, miss.num_tokens) == ("evicted", 20 - cached.amount)
    longer = ask(engine, "longer", [*block(1, 2, 3, 4, 5), 9, 9])
    assert longer == PrefixMiss("not_cached", 20)


def test_evictions_of_another_tenants_blocks_are_not_mentioned() -> None:
    engine = Harness(num_blocks=12, max_model_len=48)
    ask(engine, "a", block(1, 2, 3), tenant="one")
    ask(engine, "b", block(4, 5, 6), tenant="two")
    fill(engine, tenant="three")
    miss = ask(engine, "c", block(1, 2, 3), tenant="two")
    assert miss is not None
    assert miss.reason == "differs"  # from what filled the cache
    assert miss.request_id == ""
    engine.core.reset_cache()
    ask(engine, "d", block(1, 2, 3), tenant="one")
    fill(engine, "other")
    told = ask(engine, "e", block(1, 2, 3), tenant="one")
    assert told is not None
    assert told.reason == "evicted"


def test_a_salt_that_lost_all_its_blocks_is_told_of_the_eviction() -> None:
    clock = Clock()
    engine = Harness(num_blocks=12, clock=clock, max_model_len=48)
    ask(engine, "a", block(1, 2, 3), salt="mine")
    fill(engine, "other")
    clock.now += 3.0
    assert ask(engine, "again", block(1, 2, 3), salt="mine") == PrefixMiss("evicted", 0, "", 12, 3.0, "lru")
    assert ask(engine, "else", block(9, 9), salt="mine") == PrefixMiss("differs", 0, "again")
    engine.core.reset_cache()
    assert ask(engine, "later", block(1, 2, 3), salt="mine") == PrefixMiss("not_cached", 0)


def test_an_eviction_is_remembered_when_another_prompt_goes_on_in_its_place() -> None:
    engine = Harness(num_blocks=12, max_model_len=48)
    ask(engine, "held", block(1), pin="kept")
    ask(engine, "a", block(1, 2, 3))
    fill(engine, "other", max_tokens=1)  # all blocks but the pinned one
    ask(engine, "b", block(1, 4))
    miss = ask(engine, "again", block(1, 2, 3))
    assert miss is not None
    assert (miss.reason, miss.num_found, miss.num_tokens) == ("evicted", 4, 8)


def test_a_node_remembers_a_few_evictions_and_the_tree_a_few_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_history, "MAX_SALTS", 2)
    salts, gone = EvictedSalts(), Eviction(1.0, 1, Owner("a"))
    for salt in ("one", "two", "three"):
        salts.keep(salt, {b"tokens": gone})
    salts.keep("nothing was evicted", None)
    assert [salts.take(salt) for salt in ("one", "two", "three", "three")] == [None, *[{b"tokens": gone}] * 2, None]


def test_a_run_knows_who_computed_each_of_its_blocks_however_it_is_extended_shortened_and_split() -> None:
    a, b, c = Owner("a"), Owner("b"), Owner("c", "tenant")
    owners = Owners(a)
    owners.extend(4, a)
    owners.extend(5, b)
    owners.extend(8, c)
    assert [owners.of(place) for place in range(2, 10)] == [a, a, a, b, b, b, c, c]
    owners.extend(6, a)  # the blocks from 6 on were evicted
    assert [owners.of(place) for place in range(2, 10)] == [a, a, a, b, a, a, a, a]
    head = owners.split(5)
    assert [head.of(place) for place in (2, 3, 4)] == [a, a, a]
    assert [owners.of(place) for place in (5, 6, 7)] == [b, a, a]
    head = owners.split(7)
    assert [head.of(place) for place in (5, 6)] == [b, a]
    assert owners.of(7) == a
