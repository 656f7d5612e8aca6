"""The simulation of replicas behind the router."""

from __future__ import annotations

from benchmarks.prefix_trace_data import HASH_TOKENS, Turn, synthetic_conversations
from benchmarks.router import RoundRobin, RouterPick, SimulatedReplica, replay


def turn(*hashes: int, at: float = 0.0) -> Turn:
    return Turn(at, len(hashes) * HASH_TOKENS, 10, hashes=hashes, piece=HASH_TOKENS)


def test_a_simulated_replica_finds_what_it_computed_and_has_not_evicted() -> None:
    replica = SimulatedReplica(4 * HASH_TOKENS)
    replica.take(turn(1, 2), 0.0)
    assert replica.num_hits == 0
    replica.take(turn(1, 2, 3), 1.0)
    assert replica.num_hits == 2 * HASH_TOKENS
    replica.take(turn(7, 8, 9), 2.0)  # 2 and 3 go, leaves first
    replica.take(turn(1, 2, 3), 3.0)
    assert replica.num_hits == 3 * HASH_TOKENS


def test_the_router_finds_nearly_what_one_big_cache_finds_and_far_more_than_round_robin() -> None:
    turns = synthetic_conversations(600, 1)
    tokens = 1_000_000
    big, _ = replay(turns, RoundRobin(1), 1, 4 * tokens)
    robin, _ = replay(turns, RoundRobin(4), 4, tokens)
    routed, highest = replay(turns, RouterPick(4, tokens), 4, tokens)
    assert routed >= 0.9 * big
    assert routed >= 1.5 * robin
    assert highest < 3
