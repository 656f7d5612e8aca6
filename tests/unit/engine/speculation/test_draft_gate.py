from __future__ import annotations

from quire.engine.speculation.draft_gate import DraftGate


def plain(gate: DraftGate, steps: int, rows: int = 4, seconds: float = 1.0) -> None:
    for _ in range(steps):
        gate.note(rows, 0, 0, seconds)


def drafted(gate: DraftGate, steps: int, rows: int = 4, seconds: float = 1.0, accepted: int = 0) -> int:
    """Steps with drafts until they are not allowed any more, at most so many; how many there were."""
    for step in range(steps):
        if not gate.allows:
            return step
        gate.note(rows, 2, accepted, seconds)
    return steps


def test_drafts_that_are_slower_than_none_are_given_up_after_a_window_and_tried_ever_more_rarely() -> None:
    gate = DraftGate()
    plain(gate, 20)
    with_drafts, pauses = 0, []
    for _ in range(4):
        with_drafts += drafted(gate, 1_000, seconds=1.3)
        assert not gate.allows
        pause = 0
        while not gate.allows:
            plain(gate, 1)
            pause += 1
        pauses.append(pause)
    assert pauses == sorted(pauses)
    assert pauses[-1] > 4 * pauses[0]
    assert with_drafts < 0.05 * sum(pauses)


def test_drafts_that_pay_go_on() -> None:
    gate = DraftGate()
    plain(gate, 20)
    assert drafted(gate, 500, seconds=1.3, accepted=3) == 500


def test_rows_that_wait_for_their_results_are_part_of_the_price() -> None:
    """Half of the rows are in each step; the steps themselves are not slower."""
    gate = DraftGate()
    plain(gate, 20, rows=8)
    steps = 0
    while gate.allows and steps < 500:
        gate.note(8 if steps % 8 == 0 else 4, 1, 1, 1.0)
        steps += 1
    assert steps < 100


def test_where_plain_steps_were_never_seen_drafts_pause_to_see_some() -> None:
    gate = DraftGate()
    assert drafted(gate, 500, seconds=1.3, accepted=3) < 100
    plain(gate, 12)
    assert gate.allows
    assert drafted(gate, 500, seconds=1.3, accepted=3) == 500


def test_what_is_learned_at_one_batch_holds_for_its_octave_alone() -> None:
    gate = DraftGate()
    plain(gate, 20, rows=64)
    drafted(gate, 100, rows=64, seconds=1.5)
    assert not gate.allows
    plain(gate, 20, rows=2)
    assert gate.allows


def test_rows_that_wait_for_their_results_do_not_make_the_batch_smaller() -> None:
    gate = DraftGate()
    plain(gate, 20, rows=64)
    for rows in (60, 3, 57, 10):
        gate.note(rows, 1, 1, 1.0)
        assert gate.octave == 7
    plain(gate, 20, rows=60)
    assert gate.octave == 6


def test_a_step_in_which_a_graph_is_captured_does_not_forbid_drafts_that_pay() -> None:
    gate = DraftGate()
    plain(gate, 20)
    for step in range(500):
        assert gate.allows
        gate.note(4, 2, 3, 300.0 if step % 40 == 5 else 1.3)
