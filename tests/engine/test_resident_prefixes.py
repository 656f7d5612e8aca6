"""Prompts that stay: held, found, bounded, and let go."""

from __future__ import annotations

from typing import NoReturn

import pytest

from fake_executor import VOCAB, continuation
from harness import Harness
from quire.config.tiers import EVICTION_NAMES, EvictionName
from quire.engine.kvcache.pinned_prefixes import PinnedPrefixes
from quire.types.errors import InvalidRequest
from quire.types.request import Abort

SYSTEM = [(5 * i) % VOCAB for i in range(18)]  # four blocks and a half


def register(engine: Harness, name: str, prompt: list[int], salt: str = "") -> None:
    engine.submit(f"register {name} {salt}", prompt, salt=salt, seed=1, max_tokens=1, pin=name)
    engine.run()


def flood(engine: Harness, count: int = 20) -> None:
    """Prompts that push everything out that nobody holds."""
    for number in range(count):
        engine.submit(f"flood {number} {len(engine.finished)}", [number % VOCAB] * 24, seed=1, max_tokens=4)
    engine.run()


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
def test_a_resident_prompt_outlives_all_others_to_its_last_token(eviction: EvictionName) -> None:
    engine = Harness(num_blocks=24, eviction=eviction)
    register(engine, "system", SYSTEM)
    (pin,) = engine.core.pins.listing()
    assert (pin.name, pin.num_tokens, pin.num_blocks) == ("system", 18, 5)
    flood(engine)
    stats = engine.core.stats()
    assert (stats.pinned_prefixes, stats.blocks.pinned, stats.blocks.used) == (1, 5, 5)
    assert stats.evicted_blocks > 20
    assert stats.blocks.slots_used == stats.blocks.slots_allocated
    engine.submit("user", [*SYSTEM, 1, 2, 3], seed=1)
    engine.run()
    assert engine.finished["user"].num_cached_tokens == len(SYSTEM)
    assert engine.answer("user") == continuation([*SYSTEM, 1, 2, 3], 8, seed=1)


def test_a_removed_prompt_is_evicted_as_others_are() -> None:
    engine = Harness(num_blocks=24)
    register(engine, "system", SYSTEM)
    assert engine.core.pins.remove("", "system")
    assert not engine.core.pins.remove("", "system")
    assert engine.core.stats().blocks.used == 0
    flood(engine)
    engine.submit("user", SYSTEM, seed=1)
    engine.run()
    assert engine.finished["user"].num_cached_tokens == 0


def test_a_prompt_is_resident_for_its_salt_alone() -> None:
    engine = Harness(num_blocks=48)
    register(engine, "system", SYSTEM, "mine")
    for salt, found in (("mine", 18), ("theirs", 0), ("", 0)):
        engine.submit(f"of {salt}", [*SYSTEM, 1], salt=salt, seed=1)
        engine.run()
        assert engine.finished[f"of {salt}"].num_cached_tokens == found


def test_the_same_name_again_replaces_what_had_it() -> None:
    engine = Harness(num_blocks=24)
    register(engine, "system", SYSTEM)
    engine.submit("again", SYSTEM, seed=1, max_tokens=1, pin="system")
    engine.run()
    assert engine.core.pins.num_blocks == 5
    engine.submit("other", [9] * 8, seed=1, max_tokens=1, pin="system")
    engine.run()
    (pin,) = engine.core.pins.listing()
    assert (pin.num_tokens, pin.num_blocks, engine.core.stats().blocks.used) == (8, 2, 2)


def test_prompts_that_begin_alike_hold_their_common_blocks_once() -> None:
    engine = Harness(num_blocks=24)
    register(engine, "one", [*SYSTEM[:16], 1])
    register(engine, "two", [*SYSTEM[:16], 2])
    assert engine.core.pins.num_blocks == 6
    engine.core.pins.remove("", "one")
    engine.core.check()
    assert engine.core.pins.num_blocks == 5


def test_at_most_half_the_cache_is_resident_and_the_error_says_so() -> None:
    engine = Harness(num_blocks=16)
    register(engine, "one", [1] * 16)
    with pytest.raises(InvalidRequest, match=r"prompt: needs 5 kv blocks beside the 4 of others; 8 of 16"):
        engine.submit("two", [2] * 20, max_tokens=1, pin="two")
    register(engine, "three", [3] * 16)
    assert engine.core.pins.num_blocks == 8


def test_a_request_that_would_never_fit_beside_them_is_refused() -> None:
    engine = Harness(num_blocks=16)
    register(engine, "one", [1] * 16)
    with pytest.raises(InvalidRequest, match="the cache has 16, 4 of them for resident prefixes"):
        engine.submit("large", [2] * 40, max_tokens=20)
    engine.submit("fits", [2] * 40, max_tokens=8)
    engine.run()
    assert engine.answer("fits")


def test_no_prompt_becomes_resident_that_a_live_request_needs_the_room_of() -> None:
    engine = Harness(num_blocks=16)
    engine.submit("large", [2] * 40, seed=1, max_tokens=20)
    engine.step()
    with pytest.raises(InvalidRequest, match="a live request may need 15"):
        engine.submit("pin", [1] * 16, max_tokens=1, pin="pin")
    engine.run()
    register(engine, "pin", [1] * 16)
    assert len(engine.core.pins) == 1


def test_a_reset_lets_go_of_resident_prompts_too() -> None:
    engine = Harness(num_blocks=24)
    register(engine, "system", SYSTEM)
    assert engine.core.reset_cache() == 5
    assert engine.core.pins.listing() == ()
    engine.core.check()
    assert engine.core.stats().blocks.used == 0


def test_a_registration_that_is_ended_early_leaves_nothing_behind() -> None:
    engine = Harness(num_blocks=24, max_num_batched_tokens=8)
    engine.submit("pin", SYSTEM, seed=1, max_tokens=1, pin="system")
    engine.step()
    assert engine.core.pins.num_reserved == 5
    engine.core.abort(Abort("pin"))
    engine.run()
    assert (engine.core.pins.num_reserved, len(engine.core.pins)) == (0, 0)


def test_a_registration_whose_prompt_was_reset_meanwhile_is_not_kept() -> None:
    engine = Harness(num_blocks=24, max_num_batched_tokens=8)
    engine.submit("pin", SYSTEM, seed=1, max_tokens=1, pin="system")
    engine.step()
    engine.core.reset_cache()
    engine.run()
    assert (engine.finished["pin"].error, len(engine.core.pins)) == (None, 0)


def test_a_prompt_that_counted_on_a_resident_one_is_not_held_when_that_was_let_go_of_meanwhile() -> None:
    engine = Harness(num_blocks=16)
    register(engine, "system", SYSTEM)
    engine.submit("again", SYSTEM, seed=1, max_tokens=1, pin="system")  # needs no block besides
    assert engine.core.pins.num_reserved == 5
    assert engine.core.unpin("", "system")
    engine.submit("large", list(range(30, 60)), seed=1, max_tokens=34)  # needs them all
    engine.run(limit=400)
    assert engine.core.pins.listing() == ()
    assert engine.answer("large") == continuation(list(range(30, 60)), 34, seed=1)


def test_a_request_that_is_refused_looks_at_no_resident_block(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Harness(num_blocks=48)
    register(engine, "system", SYSTEM)

    def count(_: PinnedPrefixes) -> NoReturn:
        raise AssertionError("pinned blocks are counted")

    with monkeypatch.context() as patched, pytest.raises(InvalidRequest, match="^prompt: "):
        patched.setattr(PinnedPrefixes, "_count", count)
        engine.submit("bad", [VOCAB])
    engine.core.check()


def test_without_a_cache_nothing_can_be_resident() -> None:
    engine = Harness(caching=False)
    with pytest.raises(InvalidRequest, match="nothing is cached here"):
        engine.submit("pin", SYSTEM, max_tokens=1, pin="system")


def test_requests_beside_a_resident_prompt_are_preempted_and_still_exact() -> None:
    engine = Harness(num_blocks=20)
    register(engine, "system", SYSTEM)
    prompts = [[*SYSTEM, number, 1, 2] for number in range(4)]
    for number, prompt in enumerate(prompts):
        engine.submit(f"r{number}", prompt, seed=1, max_tokens=24)
    engine.run()
    for number, prompt in enumerate(prompts):
        assert engine.answer(f"r{number}") == continuation(prompt, 24, seed=1)
    assert engine.core.stats().preemptions > 0
