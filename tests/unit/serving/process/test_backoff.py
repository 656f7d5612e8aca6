"""The pauses between restarts."""

from __future__ import annotations

from quire.serving.process.backoff import HEALTHY_SECONDS, Backoff


def test_pauses_double_up_to_the_longest_while_processes_keep_ending() -> None:
    backoff = Backoff(longest=4.0)
    assert [backoff.next_delay(1.0) for _ in range(7)] == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_process_that_was_healthy_is_replaced_at_once_again() -> None:
    backoff = Backoff(longest=30.0)
    for _ in range(5):
        backoff.next_delay(0.0)
    assert backoff.next_delay(HEALTHY_SECONDS) == 0.0
    assert backoff.next_delay(0.0) == 0.5


def test_a_thousand_restarts_keep_the_longest_pause() -> None:
    backoff = Backoff(longest=30.0)
    assert [backoff.next_delay(0.0) for _ in range(2_000)][-1] == 30.0
