"""Every request says at its end what happened to it and why it waited."""

from __future__ import annotations

from harness import Harness
from quire.engine.decoding.group import MAX_ENTRIES, Ledger
from quire.types.ledger import make_entries
from quire.types.request import Abort


def events(harness: Harness, request_id: str) -> list[tuple[str, int, str]]:
    return [(entry.kind, entry.amount, entry.note) for entry in harness.finished[request_id].ledger]


def test_a_request_alone_is_queued_admitted_computed_and_finished() -> None:
    harness = Harness()
    harness.submit("a", [1, 2, 3], max_tokens=4)
    harness.run()
    assert events(harness, "a") == [
        ("queued", 3, ""),
        ("admitted", 0, ""),
        ("missed", 1, "nothing is cached"),
        ("chunk", 3, ""),
        ("first_token", 0, ""),
        ("finished", 4, "length"),
    ]


def test_times_never_go_back() -> None:
    harness = Harness(depth=2)
    harness.submit("a", list(range(1, 90)), max_tokens=4, n=3)
    harness.run()
    times = [entry.at for entry in harness.finished["a"].ledger]
    assert times == sorted(times)


def test_a_long_prompt_says_how_it_was_cut() -> None:
    harness = Harness(max_num_batched_tokens=32)
    harness.submit("a", [5] * 70, max_tokens=1)
    harness.run()
    assert [amount for kind, amount, _ in events(harness, "a") if kind == "chunk"] == [32, 32, 6]


def test_a_request_that_found_no_row_says_so() -> None:
    harness = Harness(max_num_seqs=1)
    harness.submit("a", [1], max_tokens=3)
    harness.submit("b", [2], max_tokens=1)
    harness.submit("c", [3], max_tokens=1)
    harness.run()
    assert ("admitted", 0, "") in events(harness, "a")
    assert ("admitted", 0, "waited: no free row") in events(harness, "b")
    assert ("admitted", 0, "waited: no free row") in events(harness, "c")


def test_a_request_that_found_the_step_full_says_so() -> None:
    harness = Harness(max_num_batched_tokens=32)
    harness.submit("a", [1] * 64, max_tokens=2)
    harness.submit("b", [2], max_tokens=1)
    harness.run()
    assert ("admitted", 0, "waited: token budget") in events(harness, "b")


def test_a_request_that_found_no_blocks_says_so() -> None:
    harness = Harness(num_blocks=8, block_size=4)
    harness.submit("a", [1] * 20, max_tokens=4)
    harness.submit("b", [2] * 20, max_tokens=4)
    harness.run()
    assert ("admitted", 0, "waited: no free blocks") in events(harness, "b")


def test_a_preempted_request_says_what_it_lost_and_computes_it_again() -> None:
    harness = Harness(num_blocks=8, block_size=4, caching=False)
    harness.submit("a", [1] * 4, max_tokens=20)
    harness.submit("b", [2] * 4, max_tokens=20)
    harness.run()
    found = events(harness, "b")
    assert harness.finished["b"].num_preemptions > 0
    lost = [amount for kind, amount, _ in found if kind == "preempted"]
    again = [amount for kind, amount, _ in found if kind == "chunk"]
    assert len(lost) == harness.finished["b"].num_preemptions
    assert all(computed >= gone for gone, computed in zip(lost, again[1:], strict=True))
    assert [kind for kind, _, _ in found].count("first_token") == 1


def test_forked_samples_lose_their_shared_prompt_once() -> None:
    harness = Harness(num_blocks=12, block_size=4)
    harness.submit("a", [1] * 8, max_tokens=24)
    harness.submit("b", [2] * 8, max_tokens=12, n=2)
    harness.run()
    lost = [amount for kind, amount, _ in events(harness, "b") if kind == "preempted"]
    assert lost
    assert all(8 <= amount <= 8 + 2 * 12 for amount in lost)


def test_an_aborted_request_has_a_ledger_too() -> None:
    harness = Harness()
    harness.submit("a", [1], max_tokens=50)
    harness.step()
    harness.core.abort(Abort("a"))
    harness.run()
    assert events(harness, "a")[-1] == ("finished", 1, "abort")


def test_a_ledger_is_bounded_and_says_what_it_left_out() -> None:
    ledger = Ledger()
    for number in range(100):
        ledger.note("preempted", float(number))
    entries = make_entries(ledger.finish(200.0, 5, "stop"))
    assert len(entries) == MAX_ENTRIES
    assert entries[-1].note == "stop; 37 entries were left out"


def test_chunks_that_follow_each_other_share_an_entry_in_a_long_ledger() -> None:
    ledger = Ledger()
    for number in range(1_000):
        ledger.note("chunk", float(number), 2)
    entries = make_entries(ledger.finish(2_000.0, 0, "stop"))
    assert len(entries) < MAX_ENTRIES
    assert sum(entry.amount for entry in entries) == 2_000


def test_the_block_map_shows_who_holds_what() -> None:
    harness = Harness(num_blocks=16, block_size=4, max_num_seqs=3)
    harness.submit("a", [1] * 9, max_tokens=20, n=2)
    harness.submit("b", [2] * 3, max_tokens=20)
    harness.submit("c", [3] * 3, max_tokens=20)
    for _ in range(3):
        harness.step()
    found = harness.core.block_map()
    by_id = {each.request_id: each for each in found.requests}
    assert {name: each.state for name, each in by_id.items()} == {"a": "running", "b": "running", "c": "waiting"}
    assert by_id["c"].block_ids == ()
    assert sum(count > 0 for count in found.holders) == harness.core.stats().blocks.used
    assert max(found.holders) == 2  # the prompt's full blocks
    held = {block for each in found.requests for block in each.block_ids}
    assert held == {block for block, count in enumerate(found.holders) if count}
    assert by_id["b"].num_tokens == 5
    harness.run()
    assert set(harness.core.block_map().holders) == {0}


def test_a_request_says_what_it_found_in_the_cache_and_where_that_ends() -> None:
    harness = Harness(block_size=4)
    harness.submit("a", [1] * 4 + [2] * 4, max_tokens=1)
    harness.run()
    harness.submit("b", [1] * 4 + [2] * 2 + [3] * 3, max_tokens=1)
    harness.run()
    assert events(harness, "b")[1:5] == [
        ("admitted", 0, ""),
        ("cached", 6, ""),
        ("missed", 7, "from here on it differs from request a"),
        ("chunk", 3, ""),
    ]
    assert [harness.finished[name].num_cached_tokens for name in "ab"] == [0, 6]


def test_the_block_map_shows_what_is_cached() -> None:
    harness = Harness(num_blocks=16, block_size=4)
    harness.submit("a", [1] * 9, max_tokens=1)
    harness.run()
    found, stats = harness.core.block_map(), harness.core.stats().blocks
    assert len(found.cached) == stats.cached == 2
    assert (stats.used, stats.free) == (0, 16)
    harness.submit("b", [1] * 9, max_tokens=4)
    harness.step()
    assert not set(harness.core.block_map().cached) & set(harness.core.block_map().requests[0].block_ids)


def test_resetting_the_cache_frees_nothing_while_nothing_is_kept() -> None:
    assert Harness().core.reset_cache() == 0
