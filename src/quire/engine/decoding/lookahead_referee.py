"""Whether drafts pay at all: tokens a second with them and without, as they were measured."""

from __future__ import annotations

from collections import deque

_WINDOW, _LEAST_WINDOW = 24, 6  # steps with drafts that are judged together: fewer of them where they have many rows
_CLEAN = 3  # steps without a draft after which a step counts as plain: nobody waits for results any more
_RECENT = 16  # steps whose largest batch is the present one: rows that wait for results are missing from some
_RATE = 0.1  # of the running mean of plain steps
_FIRST_REST, _LONGEST_REST = 128, 4096  # steps without drafts after a window that was slower; doubles each time


class Referee:
    """Compares at batches of each octave. Drafts are allowed until a window with them was slower than plain steps; then
    they rest, each time twice as long, and are tried for one more window.

    So whatever a step's parts cost on a machine, little time is lost to drafts that do not pay.
    """

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._plain_run = 0  # steps without a draft so far
        self._courts: dict[int, _Court] = {}  # by octave
        self._court = self._find_court(1)  # of the present batch

    @property
    def allows(self) -> bool:
        """Whether drafts may be made at the present batch."""
        return self._court.rest == 0

    def note(self, rows: int, num_drafted: int, num_accepted: int, seconds: float) -> None:
        """A step of so many rows that verified so much took so long."""
        self._recent.append(rows)
        court = self._court = self._find_court(max(self._recent))
        self._plain_run = 0 if num_drafted else self._plain_run + 1
        if self._plain_run > _CLEAN:
            court.note_plain(rows, seconds)
        else:
            court.note_drafted(rows + num_accepted, seconds, is_draft=num_drafted > 0)

    def _find_court(self, rows: int) -> _Court:
        octave = rows.bit_length()
        if octave not in self._courts:
            self._courts[octave] = _Court(max(_LEAST_WINDOW, _WINDOW >> (octave // 2)))
        return self._courts[octave]


class _Court:
    """One octave of batches, judged after each `window` of steps with drafts."""

    def __init__(self, window: int) -> None:
        self._window = window
        self.rest = 0  # steps for which no drafts are made
        self._next_rest = _FIRST_REST
        self._plain: float | None = None  # tokens a second
        self._tokens, self._seconds, self._drafts = 0, 0.0, 0  # of the window

    def note_plain(self, rows: int, seconds: float) -> None:
        self.rest = max(0, self.rest - 1)
        if seconds > 0.0:
            rate = rows / seconds
            self._plain = rate if self._plain is None else self._plain + _RATE * (rate - self._plain)

    def note_drafted(self, num_tokens: int, seconds: float, *, is_draft: bool) -> None:
        """A step that verified drafts, or one soon after it: rows that wait for results are part of the price."""
        self._tokens += num_tokens
        self._seconds += seconds
        self._drafts += is_draft
        if self._drafts >= self._window:
            self._judge()

    def _judge(self) -> None:
        rate = self._tokens / max(self._seconds, 1e-9)
        self._tokens, self._seconds, self._drafts = 0, 0.0, 0
        if self._plain is None:
            self.rest = 2 * _CLEAN  # long enough to see plain steps
        elif rate < self._plain:
            self.rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
        else:
            self._next_rest = _FIRST_REST
