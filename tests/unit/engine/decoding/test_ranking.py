"""Which samples of best_of are returned."""

from __future__ import annotations

from quire.engine.decoding.group import rank
from quire.types.output import FinishReason, SampleEnd


def sample(index: int, count: int, total: float | None, reason: FinishReason = "stop") -> SampleEnd:
    return SampleEnd(index, tuple(range(count)), reason, cumulative_logprob=total)


def test_the_mean_favours_the_sample_whose_tokens_were_likeliest() -> None:
    best = rank([sample(0, 1, -2.0), sample(1, 4, -4.0), sample(2, 2, -3.0)], 2, "mean")
    assert [(one.index, len(one.token_ids), one.score) for one in best] == [(0, 4, -1.0), (1, 2, -1.5)]


def test_the_sum_favours_the_likeliest_whole() -> None:
    best = rank([sample(0, 1, -2.0), sample(1, 4, -4.0), sample(2, 2, -3.0)], 2, "sum")
    assert [(len(one.token_ids), one.score) for one in best] == [(1, -2.0), (2, -3.0)]


def test_equals_keep_their_order() -> None:
    best = rank([sample(0, 2, -2.0), sample(1, 1, -1.0)], 2, "mean")
    assert [len(one.token_ids) for one in best] == [2, 1]


def test_what_was_cut_off_comes_last_and_nothing_said_is_worth_nothing() -> None:
    cut, empty = sample(0, 1, -0.1, "abort"), sample(1, 0, 0.0)
    best = rank([cut, empty, sample(2, 1, -9.0)], 3, "mean")
    assert [(one.finish_reason, len(one.token_ids)) for one in best] == [("stop", 1), ("stop", 0), ("abort", 1)]
    assert best[1].score is None
