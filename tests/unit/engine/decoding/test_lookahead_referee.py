from __future__ import annotations

from quire.engine.decoding.lookahead_referee import Referee


def plain(referee: Referee, steps: int, rows: int = 4, seconds: float = 1.0) -> None:
    for _ in range(steps):
        referee.note(rows, 0, 0, seconds)


def drafted(referee: Referee, steps: int, rows: int = 4, seconds: float = 1.0, accepted: int = 0) -> int:
    """Steps with drafts until they are not allowed any more, at most so many; how many there were."""
    for step in range(steps):
        if not referee.allows:
            return step
        referee.note(rows, 2, accepted, seconds)
    return steps


def test_drafts_that_are_slower_than_none_are_given_up_after_a_window_and_tried_ever_more_rarely() -> None:
    referee = Referee()
    plain(referee, 20)
    with_drafts, rests = 0, []
    for _ in range(4):
        with_drafts += drafted(referee, 1_000, seconds=1.3)
        assert not referee.allows
        rest = 0
        while not referee.allows:
            plain(referee, 1)
            rest += 1
        rests.append(rest)
    assert rests == sorted(rests)
    assert rests[-1] > 4 * rests[0]
    assert with_drafts < 0.05 * sum(rests)


def test_drafts_that_pay_go_on() -> None:
    referee = Referee()
    plain(referee, 20)
    assert drafted(referee, 500, seconds=1.3, accepted=3) == 500


def test_rows_that_wait_for_their_results_are_part_of_the_price() -> None:
    """Half of the rows are in each step; the steps themselves are not slower."""
    referee = Referee()
    plain(referee, 20, rows=8)
    steps = 0
    while referee.allows and steps < 500:
        referee.note(8 if steps % 8 == 0 else 4, 1, 1, 1.0)
        steps += 1
    assert steps < 100


def test_where_plain_steps_were_never_seen_drafts_pause_to_see_some() -> None:
    referee = Referee()
    assert drafted(referee, 500, seconds=1.3, accepted=3) < 100
    plain(referee, 12)
    assert referee.allows
    assert drafted(referee, 500, seconds=1.3, accepted=3) == 500


def test_what_is_learned_at_one_batch_holds_for_its_octave_alone() -> None:
    referee = Referee()
    plain(referee, 20, rows=64)
    drafted(referee, 100, rows=64, seconds=1.5)
    assert not referee.allows
    plain(referee, 20, rows=2)
    assert referee.allows
