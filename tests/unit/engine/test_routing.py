"""A step's batch is split among the edges, and nobody hears of another's requests."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from quire.engine.routing import Routes
from quire.types.output import Finished, TokensOut
from quire.types.step import TokenLogprobs

ENTRY = TokenLogprobs(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32), 1)


def batch(handles: list[int], *, logprobs: tuple[int, ...] = (), finished: tuple[str, ...] = ()) -> TokensOut:
    samples = np.array(handles, dtype=np.int64)
    ends = tuple(Finished(request_id, ()) for request_id in finished)
    return TokensOut(1, samples, (samples * 10).astype(np.int32), tuple((h, ENTRY) for h in logprobs), ends)


def heard(routes: Routes, out: TokensOut) -> dict[int, tuple[list[int], list[int], list[str]]]:
    parts = dict(routes.split(out))
    routes.check()
    return {
        edge: (part.samples.tolist(), [h for h, _ in part.logprobs], [end.request_id for end in part.finished])
        for edge, part in parts.items()
    }


def two_edges() -> Routes:
    routes = Routes()
    routes.add(1, "a", 0, 2)
    routes.add(2, "b", 2, 1)
    return routes


def test_every_edge_hears_its_own_samples_logprobs_and_ends() -> None:
    found = heard(two_edges(), batch([0, 2, 1], logprobs=(1, 2), finished=("b",)))
    assert found == {1: ([0, 1], [1], []), 2: ([2], [2], ["b"])}


def test_tokens_stay_with_their_samples() -> None:
    parts = dict(two_edges().split(batch([2, 1, 0])))
    assert parts[1].token_ids.tolist() == [10, 0]
    assert parts[2].token_ids.tolist() == [20]


def test_a_batch_for_one_edge_is_passed_on_whole() -> None:
    routes = Routes()
    routes.add(1, "a", 0, 2)
    out = batch([0, 1])
    ((edge, part),) = routes.split(out)
    assert edge == 1
    assert part.samples is out.samples


def test_a_request_that_ended_is_forgotten() -> None:
    routes = two_edges()
    heard(routes, batch([], finished=("a",)))
    assert routes.edge_of("a") is None
    assert routes.requests() == ["b"]
    assert heard(routes, batch([0, 2])) == {2: ([2], [], [])}


def test_an_edge_that_left_hears_nothing_even_of_the_same_batch() -> None:
    routes, out = two_edges(), batch([0, 2, 1], finished=())
    assert set(heard(routes, out)) == {1, 2}
    assert routes.drop(1) == ["a"]
    assert heard(routes, out) == {2: ([2], [], [])}
    assert routes.drop(1) == []


def test_an_end_without_tokens_is_heard() -> None:
    assert heard(two_edges(), batch([2], finished=("a",))) == {2: ([2], [], []), 1: ([], [], ["a"])}


def test_the_best_of_a_search_is_told_to_its_own_edge_even_if_nothing_else_is() -> None:
    tokens = np.array([5, 6], dtype=np.int32)
    out = replace(batch([2]), best=((0, tokens), (9, tokens)))
    parts = dict(two_edges().split(out))
    assert [handle for handle, _ in parts[1].best] == [0]
    assert parts[1].samples.tolist() == []
    assert parts[2].best == ()


def test_a_sample_that_verified_a_draft_keeps_the_order_of_its_tokens() -> None:
    out = TokensOut(1, np.array([2, 0, 0, 0], dtype=np.int64), np.array([1, 7, 8, 9], dtype=np.int32))
    assert dict(two_edges().split(out))[1].token_ids.tolist() == [7, 8, 9]


def test_samples_whose_handles_are_far_apart_all_reach_their_edge() -> None:
    """A request that outlives many thousands of others shares its place in any table with one of them."""
    routes = Routes()
    handles = [0, *(2**bits for bits in range(8, 40))]
    for number, handle in enumerate(handles):
        routes.add(number % 3, f"r{number}", handle, 1)
    expected = {edge: (handles[edge::3], [], []) for edge in range(3)}
    assert heard(routes, batch(handles)) == expected
    routes.drop(0)
    assert heard(routes, batch(handles)) == {edge: expected[edge] for edge in (1, 2)}


@pytest.mark.parametrize("seed", range(8))
def test_any_mix_of_arrivals_ends_and_departures_routes_every_sample_to_its_edge(seed: int) -> None:
    rng = random.Random(seed)
    routes, owners, live, following = Routes(), dict[int, int](), dict[str, tuple[int, range]](), 0
    for number in range(60):
        edge, n = rng.randrange(3), rng.choice([1, 1, 2, 700])
        following += rng.choice([0, 1, 1023, 5_000])
        routes.add(edge, f"r{number}", following, n)
        live[f"r{number}"] = (edge, range(following, following + n))
        owners |= dict.fromkeys(range(following, following + n), edge)
        following += n
        ends = rng.sample(list(live), k=rng.randrange(len(live)) // 2)
        handles = [*rng.sample(list(owners), k=min(len(owners), 50)), following + 1]
        parts = heard(routes, batch(handles, finished=tuple(ends)))
        assert {e: part[0] for e, part in parts.items() if part[0]} == {
            e: mine for e in range(3) if (mine := [h for h in handles if owners.get(h) == e])
        }
        assert sorted(end for part in parts.values() for end in part[2]) == sorted(ends)
        left = set(routes.drop(rng.randrange(3))) if rng.random() < 0.05 else set()
        for name in {*ends, *left}:
            for handle in live.pop(name)[1]:
                del owners[handle]
        assert set(routes.requests()) == set(live)
