"""Groups that wait for files of the disk tier: how many of them, for how long, and how often the tiers are asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from fake_tiers import FakeTiers
from harness import Harness
from plain_groups import make_group
from quire.config.tiers import TierConfig
from quire.engine.decoding.group import Group
from quire.engine.kvcache.tiers.base import NoTiers
from quire.engine.kvcache.tiers.manager import TierManager
from quire.engine.scheduler.policies.base import Policy
from quire.engine.scheduler.policies.fair import Fair
from quire.engine.scheduler.prefetch import NEAR, FilePrefetch
from quire.engine.scheduler.step_time import ComputeTime
from toy_model import continuation

KEY = Policy().key


class SlotTiers(NoTiers):
    """Tiers that read up to `num_slots` files at once, when the test says so. Counts the calls and their files."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.fetching: dict[bytes, None] = {}
        self.held: set[bytes] = set()
        self.calls: Counter[str] = Counter()
        self.num_late = 0

    def fetch(self, keys: Sequence[bytes]) -> list[bytes]:
        self.calls["fetch"] += 1
        self.calls["fetched files"] += len(keys)
        left = []
        for key in keys:
            if key in self.held:
                continue
            if len(self.held) < self._num_slots:
                self.fetching[key] = None
                self.held.add(key)
            else:
                left.append(key)
        return left

    def read(self, count: int) -> None:
        """The oldest files arrive."""
        for key in list(self.fetching)[:count]:
            del self.fetching[key]

    def is_fetching(self, key: bytes) -> bool:
        self.calls["is_fetching"] += 1
        return key in self.fetching

    def release_fetched(self, keys: Sequence[bytes]) -> None:
        self.held.difference_update(keys)

    def count_late(self, num_files: int) -> None:
        self.num_late += num_files


class Queue:
    """Waiting groups with `num_files` files each, and the part of the scheduler that chooses among them by key."""

    def __init__(self, num_groups: int, num_files: int, num_slots: int) -> None:
        self.tiers, self.lookups, self.num_files = SlotTiers(num_slots), Counter[str](), num_files
        self.prefetch = FilePrefetch(self.tiers, ComputeTime(), 4)
        self.prefetch.find = self._find
        self.ready: list[Group] = [make_group([1], number) for number in range(num_groups)]
        self.deferred: set[Group] = set()
        self.admitted: list[int] = []

    def _find(self, group: Group, num_blocks: int | None) -> list[bytes]:
        self.lookups["all" if num_blocks is None else "first"] += 1
        return [f"{group.ordinal} {index}".encode() for index in range(self.num_files)][:num_blocks]

    def plan(self, now: float) -> None:
        for group in self.prefetch.take_ready(now, KEY):
            self.deferred.remove(group)
            self.ready.append(group)
        self.ready.sort(key=KEY)
        self.prefetch.look(self.ready[:NEAR])
        for group in self.ready:
            if self.prefetch.awaits_files(group, now):
                self.deferred.add(group)
            else:
                self.admitted.append(group.ordinal)
                self.prefetch.forget(group)
        self.ready = []


def test_plans_ask_the_tiers_for_few_of_500_groups_that_need_files() -> None:
    queue = Queue(num_groups=500, num_files=64, num_slots=256)
    queue.plan(0.0)
    assert queue.lookups["all"] <= NEAR
    assert queue.lookups["first"] <= 500
    queue.lookups.clear()
    queue.tiers.calls.clear()
    for number in range(20):
        queue.plan(0.01 * number)
    assert not queue.lookups, "the disk reads nothing: no group is looked up again"
    assert queue.tiers.calls["is_fetching"] <= 20 * 256
    assert queue.tiers.calls["fetch"] <= 20
    assert queue.tiers.calls["fetched files"] <= 20 * 64
    assert not queue.admitted


def test_with_free_slots_files_are_ordered_once() -> None:
    queue = Queue(num_groups=500, num_files=2, num_slots=256)
    for number in range(20):
        queue.plan(0.01 * number)
    assert queue.tiers.calls["fetch"] == NEAR
    assert queue.tiers.calls["fetched files"] == 2 * NEAR
    assert len(queue.tiers.held) == 2 * NEAR, "only groups that may wait have their files read"


def test_groups_far_back_use_their_files_although_the_first_take_long_to_read() -> None:
    """A group's patience begins when its files are ordered: 100 groups take 1.5 seconds, none is late."""
    queue = Queue(num_groups=100, num_files=8, num_slots=32)
    now, plans = 0.0, 0
    while len(queue.admitted) < 100:
        queue.tiers.read(8)
        queue.plan(now)
        now += 0.015
        plans += 1
        assert plans < 200
    assert queue.tiers.num_late == 0
    assert queue.admitted == list(range(100))
    assert queue.lookups["all"] == 100


def test_a_group_is_passed_over_for_two_seconds_at_most() -> None:
    queue = Queue(num_groups=60, num_files=8, num_slots=32)
    for number in range(201):  # the disk reads nothing
        queue.plan(0.01 * number)
    assert sorted(queue.admitted) == list(range(60))
    assert queue.tiers.num_late == 60 * 8
    assert not queue.tiers.held


def test_a_clock_that_stands_still_holds_no_group_for_ever() -> None:
    queue = Queue(num_groups=60, num_files=8, num_slots=32)
    for _ in range(2_002):
        queue.plan(0.0)
    assert sorted(queue.admitted) == list(range(60))


def test_groups_that_end_while_they_are_passed_over_are_forgotten() -> None:
    queue = Queue(num_groups=60, num_files=8, num_slots=32)
    queue.plan(0.0)
    gone = [group for group in queue.deferred if group.ordinal % 2]
    for group in gone:
        queue.prefetch.forget(group)
        queue.deferred.remove(group)
    for number in range(200):
        queue.tiers.read(32)
        queue.plan(0.001 * number)
    assert queue.admitted == list(range(0, 60, 2))
    assert not queue.tiers.held


def test_of_the_groups_that_were_passed_over_the_smallest_rank_may_wait_first() -> None:
    queue = Queue(num_groups=60, num_files=4, num_slots=32)
    queue.plan(0.0)
    queue.tiers.read(4)
    favourites = {40: 0, 50: 1}
    ready = queue.prefetch.take_ready(0.001, lambda group: (favourites.get(group.ordinal, 9), group.ordinal))
    assert [group.ordinal for group in ready] == [0, 40]
    queue.prefetch.forget(ready[0])
    assert queue.prefetch.take_ready(0.002, KEY) == [], "a place is given to one group only"


def test_groups_that_need_the_same_files_follow_soon_after_these_have_arrived() -> None:
    queue = Queue(num_groups=500, num_files=8, num_slots=32)
    on_disk = [f"shared {index}".encode() for index in range(8)]
    queue.prefetch.find = lambda _, num_blocks: on_disk[:num_blocks]
    queue.plan(0.0)
    assert len(queue.deferred) == 500
    queue.tiers.read(8)
    on_disk = []
    for number in range(8):
        queue.plan(0.001 * number)
    assert sorted(queue.admitted) == list(range(500))
    assert queue.tiers.num_late == 0


def test_under_the_fair_policy_the_rank_follows_what_tenants_were_served() -> None:
    policy = Fair(1.0, 1.0, num_rows=4)
    engine = Harness(policy="fair")
    for number, tenant in enumerate(["flood", "flood", "modest"]):
        engine.submit(str(number), [1, 2, 3], tenant=tenant)
    groups = list(engine.core._groups.values())
    for group in groups:
        policy.added(group, engine.core._scheduler)
    assert sorted(groups, key=policy.rank) == groups
    policy.note_generated_paced(groups[0], 5)
    assert sorted(groups, key=policy.rank) == [groups[2], groups[0], groups[1]]


# ------------------------------------------------------------------------------------------------ with the engine
NUM_STORED = 60
DISK = TierConfig(host_blocks=24, disk_path="folder", disk_blocks=1_000)


def prompt(number: int) -> list[int]:
    return [number, *((number + 5 * place) % 90 for place in range(23))]


@pytest.fixture(scope="module")
def files() -> dict[bytes, object]:
    """What an earlier process has left on the disk: six blocks for each of many prompts."""
    first = Harness(num_blocks=40, tiers=TierConfig(64, "folder", 1_000, "through"), clock=lambda: 0.0)
    for number in range(NUM_STORED):
        first.submit(str(number), prompt(number), max_tokens=3, seed=1)
        first.run()
    return dict(first.tiers.files)


def _start(files: dict[bytes, object], now: list[float], behind: FakeTiers, policy: str = "fcfs") -> Harness:
    behind.files.update(files)  # type: ignore[arg-type]
    behind.__post_init__()
    settings = {"policy": policy, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    engine = Harness(num_blocks=200, tiers=DISK, behind=behind, clock=lambda: now[0], **settings)  # type: ignore[arg-type]
    engine.submit("warm up", [89, 88, 87], max_tokens=1)
    engine.run()
    return engine


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "spf", "fair", "deadline"])
def test_many_requests_with_files_all_finish_exactly(files: dict[bytes, object], policy: str) -> None:
    now = [0.0]
    engine = _start(files, now, FakeTiers(24, 4, speed=6), policy)
    for number in range(NUM_STORED):
        engine.submit(str(number), prompt(number), max_tokens=3, seed=1, tenant=f"tenant {number % 7}")

    def tick(_: int) -> None:
        now[0] += 0.001

    engine.run(each=tick)
    for number in range(NUM_STORED):
        assert engine.answer(str(number)) == continuation(prompt(number), 3, seed=1)
    assert engine.core.stats().disk_hits > NUM_STORED * 10
    assert engine.core.stats().tiers.host_held == 0


def test_a_request_without_files_is_not_held_up_by_many_that_wait_for_theirs(files: dict[bytes, object]) -> None:
    now = [0.0]
    engine = _start(files, now, FakeTiers(24, 4, fault=lambda _: "hang"))
    for number in range(NUM_STORED):
        engine.submit(str(number), prompt(number), max_tokens=3, seed=1)
    engine.submit("unrelated", [80, 81, 82, 83, 84, 85], max_tokens=3, seed=1)
    for _ in range(6):
        engine.step()
        now[0] += 0.001
    assert list(engine.finished) == ["warm up", "unrelated"]


def test_requests_do_not_wait_one_after_the_other_for_a_disk_that_hangs(files: dict[bytes, object]) -> None:
    """A group that was passed over for two seconds computes its prompt, whatever those before it still wait for."""
    now = [0.0]
    engine = _start(files, now, FakeTiers(24, 4, fault=lambda _: "hang"))
    for number in range(NUM_STORED):
        engine.submit(str(number), prompt(number), max_tokens=1, seed=1)
    started = now[0]
    while "59" not in engine.finished:
        now[0] += 0.1
        engine.step()
    assert now[0] - started < 4.0
    assert engine.answer("59") == continuation(prompt(59), 1, seed=1)


def test_steps_look_up_few_files_while_many_requests_wait_for_theirs(
    files: dict[bytes, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    engine = _start(files, now, FakeTiers(24, 4, fault=lambda _: "hang"))
    calls: Counter[str] = Counter()
    for name in ("find_files", "fetch", "is_fetching"):
        original = getattr(TierManager, name)

        def counted(*args: object, name: str = name, original: Callable[..., object] = original) -> object:
            calls[name] += 1
            return original(*args)

        monkeypatch.setattr(TierManager, name, counted)
    for number in range(500):
        engine.submit(str(number), prompt(number % NUM_STORED), max_tokens=3, seed=number)
    engine.step()
    assert calls["find_files"] <= 500 + 2 * NEAR
    calls.clear()
    for _ in range(10):
        engine.step()
        now[0] += 0.0001
    assert calls["find_files"] <= 10
    assert calls["fetch"] <= 10
    assert calls["is_fetching"] <= 10 * 12
