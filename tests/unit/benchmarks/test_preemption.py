"""The storm's requests and its table."""

from __future__ import annotations

from benchmarks.preemption import FITS, WAYS, Run, draw, median, missed, rows


def run(way: str, seconds: float, size: int = 16, **changes: int) -> Run:
    counts = {"preemptions": 4, "most_preemptions": 1, "swaps": 0, "moved_blocks": 0, "output_tokens": 100, **changes}
    return Run(way=way, block_size=size, seconds=seconds, **counts)


def test_one_request_is_the_longest_and_most_are_far_shorter() -> None:
    lengths = draw(64, 1_024)
    totals = sorted(pair.prompt + pair.output for pair in lengths)
    assert len(totals) == 64
    assert totals[-1] == 1_024
    assert totals[32] < 1_024 / 8
    assert lengths == draw(64, 1_024)


def test_the_middle_of_several_runs_counts() -> None:
    assert median([run("swap", 3.0), run("swap", 1.0), run("swap", 2.0), run("auto", 9.0)], "swap", 16).seconds == 2.0


def test_auto_is_shown_beside_the_better_of_the_others_and_all_beside_a_cache_that_fits() -> None:
    seconds = dict(zip((FITS, *WAYS), (1.0, 2.0, 4.0, 2.1), strict=True))
    ((size, *figures),) = rows([run(way, each) for way, each in seconds.items()], (16,))
    assert size == 16
    assert figures[:5] == ["1.00", "2.00", "4.00", "2.10", "1.050"]
    assert figures[5:8] == ["50%", "25%", "48%"]


def test_goals_that_choosing_misses_are_told() -> None:
    good = dict(zip((FITS, *WAYS), (1.0, 1.2, 1.5, 1.25), strict=True))
    runs = [run(way, each) for way, each in good.items()]
    assert missed(runs, (16,)) == []
    bad = dict(zip((FITS, *WAYS), (1.0, 1.2, 1.5, 1.6), strict=True))
    runs += [run(way, each, 64, most_preemptions=5) for way, each in bad.items()]
    assert [goal.split(",")[0] for goal in missed(runs, (16, 64))] == [
        "blocks of 64: auto takes 1.333 of the better way",
        "blocks of 64: the goodput of auto is 62%",
        "blocks of 64: a request was preempted 5 times",
    ]
