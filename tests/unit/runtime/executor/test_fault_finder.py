"""Which rank is blamed, with a clock that the test controls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fake_ranks import LONG, FakeRank
from quire.config.parallel import ParallelConfig
from quire.runtime.executor.fault_finder import FaultFinder

PAIR = ParallelConfig(2, executor="processes")


class Scene:
    """Ranks, and a finder that looks at them when the test says so."""

    def __init__(self, config: ParallelConfig = PAIR, *, load_timeout: float = LONG, is_ready: bool = True) -> None:
        self.ranks = [FakeRank(number, config) for number in range(config.num_ranks)]
        self.pages = [rank.page for rank in self.ranks]
        if is_ready:
            for page in self.pages:
                page.ready()
        self.finder = FaultFinder(self.ranks, LONG, load_timeout, 0.0)
        self.now = 0.0

    def look(self, after: float) -> str | None:
        """Let time pass; return what the finder says then."""
        self.now += after
        fault = self.finder.examine(self.now)
        return None if fault is None else fault.reason

    def run_steps(self, seconds: float, count: int = 3) -> None:
        """Steps that all ranks complete after so many seconds."""
        for step in range(count):
            for page in self.pages:
                page.begin_step(step)
            assert self.look(0.05) is None
            for page in self.pages:
                page.end_step()
            assert self.look(seconds) is None

    def begin_step(self, waiting: Sequence[int], after: float) -> None:
        """A step in which some ranks come to a collective after so many seconds."""
        for page in self.pages:
            page.begin_step(9)
        assert self.look(0.05) is None
        for number in waiting:
            self.pages[number].enter()
        assert self.look(after) is None

    def compute(self, number: int, seconds: float) -> str | None:
        """A rank computes in its step for so long."""
        self.pages[number]._computed = seconds
        self.pages[number]._write()
        return self.look(seconds)


def test_a_rank_that_computes_much_longer_than_the_others_needed_is_named() -> None:
    scene = Scene()
    scene.run_steps(0.1)
    scene.begin_step([0], after=0.1)
    assert scene.compute(1, 1.4) is None
    said = "rank 1 of 2 (stage 0, shard 1, pid 101) hangs: it has computed for 1.6 s while step 9 ran, and others wait"
    assert scene.compute(1, 1.6) == f"{said} for it"


@pytest.mark.parametrize("before", [True, False], ids=["in the step before", "in this step"])
def test_a_rank_may_compute_for_many_times_what_the_others_took(before: bool) -> None:
    scene = Scene()
    scene.run_steps(20.0 if before else 0.1)
    scene.begin_step([0], after=0.1 if before else 20.0)
    assert scene.compute(1, 195.0) is None
    assert "hangs: it has computed for 205.0 s" in str(scene.compute(1, 205.0))


def test_a_rank_that_makes_progress_is_not_blamed() -> None:
    scene = Scene()
    scene.run_steps(0.1)
    scene.begin_step([0], after=0.1)
    scene.pages[1]._computed = 60.0
    for _ in range(10):
        scene.pages[1].enter()
        scene.pages[1].leave()
        assert scene.look(1.0) is None


def test_a_rank_without_a_computing_thread_is_not_blamed_for_looping() -> None:
    """It waits for a processor, or for a disk."""
    scene = Scene()
    scene.run_steps(0.1)
    scene.begin_step([0], after=0.1)
    scene.pages[1]._computed = 0.2
    scene.pages[1]._write()
    assert scene.look(50.0) is None


def test_no_rank_is_named_while_another_of_its_stage_computes_too() -> None:
    scene = Scene(ParallelConfig(3, executor="processes"))
    scene.run_steps(0.1)
    scene.begin_step([0], after=0.1)
    assert scene.compute(1, 60.0) is None


def test_ranks_of_a_stage_may_compute_while_other_stages_wait() -> None:
    scene = Scene(ParallelConfig(2, 2, executor="processes"))
    scene.run_steps(0.1)
    scene.begin_step([2, 3], after=0.1)
    assert scene.compute(0, 60.0) is None


@pytest.mark.parametrize(
    "config",
    [ParallelConfig(2, expert=True, executor="processes"), ParallelConfig(1, 2, executor="processes")],
    ids=["experts", "stages of one rank"],
)
def test_ranks_with_different_work_are_not_compared(config: ParallelConfig) -> None:
    scene = Scene(config)
    scene.run_steps(0.1)
    scene.begin_step([0], after=0.1)
    assert scene.compute(1, 60.0) is None


def test_no_rank_is_compared_in_the_first_step() -> None:
    scene = Scene()
    scene.begin_step([0], after=0.1)
    assert scene.compute(1, 60.0) is None


def test_no_rank_is_compared_with_steps_that_nobody_watched() -> None:
    scene = Scene()
    scene.run_steps(0.1)
    scene.finder.reset_timeouts(scene.now)
    scene.begin_step([0], after=0.1)
    assert scene.compute(1, 60.0) is None


# ---------------------------------------------------------------------------------------------------------- loading
def test_a_rank_that_stops_loading_is_named_with_its_activity() -> None:
    scene = Scene(load_timeout=300.0, is_ready=False)
    scene.pages[0].ready()
    scene.pages[1].note("loading weights, 7 of 30")
    assert scene.look(100.0) is None
    assert scene.look(299.0) is None
    said = "rank 1 of 2 (stage 0, shard 1, pid 101) made no progress for 301 s while it loaded"
    fix = "check the disk and the device that it loads from and to"
    assert scene.look(2.0) == f"{said} (loading weights, 7 of 30); {fix}"


def test_a_rank_may_load_while_it_makes_progress_and_others_may_wait_for_it() -> None:
    scene = Scene(load_timeout=300.0, is_ready=False)
    scene.pages[0].note("meeting the other ranks")
    scene.pages[0].enter()
    for number in range(20):
        if number % 2:
            scene.pages[1].note("loading weights")
        else:
            scene.pages[1]._reads += 1  # from a slow disk, of one large tensor
            scene.pages[1]._write()
        assert scene.look(200.0) is None
    assert str(scene.look(301.0)).startswith("rank 1 of 2")


def test_of_ranks_that_wait_for_one_another_forever_one_is_named() -> None:
    scene = Scene(load_timeout=300.0, is_ready=False)
    for page in scene.pages:
        page.note("meeting the other ranks")
        page.enter()
    assert scene.look(1.0) is None
    said = "rank 0 of 2 (stage 0, shard 0, pid 100) made no progress for 301 s while it loaded"
    assert str(scene.look(301.0)).startswith(f"{said} (meeting the other ranks)")


def test_a_description_of_loading_is_cut_to_its_place_on_the_page() -> None:
    scene = Scene()
    scene.pages[1].write_last_message(b"words")
    scene.pages[1].note("x" * 200)
    assert set(scene.pages[1].doing()) == {"x"}
    assert scene.pages[1].last_message() == b"words"
    scene.pages[1].note("less")
    assert scene.pages[1].doing() == "less"
