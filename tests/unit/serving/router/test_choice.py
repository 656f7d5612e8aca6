"""Which replica a request goes to."""

from __future__ import annotations

import random
from collections import Counter

from quire.config.router import BalanceConfig, ReplicaAddress
from quire.serving.router.choice import Chooser
from quire.serving.router.prompt_keys import CHUNK_BYTES, CHUNK_ENDS, Prompt
from quire.serving.router.replica import Replica

CONFIG = BalanceConfig(load_factor=1.25, load_slack=4.0, least_gain=0.1)


def replicas(count: int = 4, **settings: int) -> list[Replica]:
    config = BalanceConfig(**settings) if settings else CONFIG
    return [Replica(ReplicaAddress(name=f"r{place}", port=1 + place), config) for place in range(count)]


def prompt(*keys: int, session: str = "") -> Prompt:
    return Prompt(keys=list(keys), num_bytes=CHUNK_ENDS[len(keys)], session=session)


def chooser(seed: int = 0) -> Chooser:
    return Chooser(CONFIG, random.Random(seed))


def test_the_replica_with_the_longest_match_is_chosen() -> None:
    some = replicas()
    some[2].tree.insert([1, 2, 3])
    some[1].tree.insert([1, 2])
    choice = chooser().choose(some, prompt(1, 2, 3, 4))
    assert (choice.replica.name, choice.reason, choice.matched) == ("r2", "prefix", 3 * CHUNK_BYTES)
    assert some[2].tree.match([1, 2, 3, 4]) == 4  # it will have the whole prompt


def test_an_overloaded_replica_is_passed_over_however_long_its_match() -> None:
    some = replicas(2)
    some[0].tree.insert([1, 2, 3])
    some[0].load = 10
    assert CONFIG.load_factor * 10 / 2 + CONFIG.load_slack > 10
    assert chooser().choose(some, prompt(1, 2, 3)).replica is some[0]
    some[0].load = 11
    assert CONFIG.load_factor * 11 / 2 + CONFIG.load_slack < 11
    choice = chooser().choose(some, prompt(1, 2, 3))
    assert (choice.replica, choice.reason) == (some[1], "load")


def test_a_match_that_all_replicas_have_decides_nothing() -> None:
    some = replicas()
    for one in some:
        one.tree.insert([1])
    chosen = Counter(chooser(seed).choose(some, prompt(1, seed + 10)).replica.name for seed in range(200))
    assert set(chosen) == {"r0", "r1", "r2", "r3"}


def test_a_match_of_a_small_part_of_the_prompt_decides_nothing() -> None:
    some = replicas(2)
    some[0].tree.insert([1])
    some[0].load = 1
    assert chooser().choose(some, prompt(1, *range(2, 40))).replica is some[1]


def test_without_a_match_the_less_loaded_of_two_is_chosen() -> None:
    some = replicas(2)
    some[0].load = 2
    assert all(chooser(seed).choose(some, prompt(seed)).replica is some[1] for seed in range(20))


def test_load_spreads_over_all_replicas_and_stays_near_the_mean() -> None:
    some, one = replicas(8), chooser()
    for key in range(800):
        one.choose(some, prompt(key)).replica.load += 1
    loads = [replica.load for replica in some]
    assert max(loads) - min(loads) <= 12


def test_a_session_stays_with_its_replica_and_only_its_own_sessions_leave_with_a_replica() -> None:
    some, one = replicas(), chooser()
    names = [f"user {number}" for number in range(200)]
    before = {name: one.choose(some, prompt(session=name)).replica.name for name in names}
    assert before == {name: one.choose(some, prompt(session=name)).replica.name for name in names}
    assert set(before.values()) == {"r0", "r1", "r2", "r3"}
    after = {name: one.choose(some[:3], prompt(session=name)).replica.name for name in names}
    assert all(after[name] == before[name] for name in names if before[name] != "r3")


def test_a_session_leaves_an_overloaded_replica() -> None:
    some, one = replicas(2), chooser()
    home = one.choose(some, prompt(session="s")).replica
    home.load = 20
    assert one.choose(some, prompt(session="s")).replica is not home


def test_the_tree_is_as_large_as_the_cache_that_a_replica_reports() -> None:
    replica = replicas(1)[0]
    replica.learn_cache(64_000)
    assert replica.tree.capacity == 64_000 * 4
    replica.learn_cache(6_400)
    assert replica.tree.capacity == 6_400 * 4
    fixed = replicas(1, cache_tokens=1_280)[0]
    fixed.learn_cache(64_000)
    assert fixed.tree.capacity == 1_280 * 4


def test_a_replica_whose_process_ended_has_lost_its_cache() -> None:
    replica = replicas(1)[0]
    replica.tree.insert([1, 2])
    replica.mark_down("is slow", has_ended=False)
    assert (replica.tree.match([1, 2]), replica.takes_requests) == (2, False)
    replica.mark_down("closed the connection")
    assert replica.tree.match([1, 2]) == 0
