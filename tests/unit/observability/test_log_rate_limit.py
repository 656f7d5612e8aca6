"""What clients can make a server log is bounded."""

from __future__ import annotations

import logging

import pytest

from quire.observability.logging import MAX_LINES, WINDOW_SECONDS, LogRateLimit


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def line(message: str, *args: object, name: str = "uvicorn.error") -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, "", 0, message, args, None)


def shown(guard: LogRateLimit, records: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records if guard.filter(record)]


def test_a_few_lines_of_a_kind_pass_and_the_last_says_that_more_follow(clock: Clock) -> None:
    lines = shown(LogRateLimit(clock), [line("bad request %d", number) for number in range(1_000)])
    assert len(lines) == MAX_LINES
    assert lines[0] == "bad request 0"
    assert lines[-1] == f"bad request {MAX_LINES - 1} (more of these are left out for 60 s)"


def test_the_next_window_begins_with_how_many_were_left_out(clock: Clock) -> None:
    guard = LogRateLimit(clock)
    shown(guard, [line("bad request") for _ in range(MAX_LINES + 7)])
    clock.now += WINDOW_SECONDS
    assert shown(guard, [line("bad request")]) == ["bad request (7 more were left out before)"]
    clock.now += WINDOW_SECONDS
    assert shown(guard, [line("bad request")]) == ["bad request"]


def test_kinds_are_counted_apart_and_other_loggers_not_at_all(clock: Clock) -> None:
    guard = LogRateLimit(clock)
    shown(guard, [line("bad request") for _ in range(100)])
    assert shown(guard, [line("bad upgrade")]) == ["bad upgrade"]
    assert len(shown(guard, [line("a step was slow", name="quire.engine") for _ in range(100)])) == 100


def test_endlessly_many_kinds_take_no_endless_memory(clock: Clock) -> None:
    guard = LogRateLimit(clock)
    shown(guard, [line(f"bad request {number}") for number in range(10_000)])
    assert len(guard._kinds) <= 256
