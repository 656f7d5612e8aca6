"""DraftGate: decides whether drafts are allowed, by comparing measured tokens per second with and without drafts."""

from __future__ import annotations

from collections import deque

_WINDOW, _LEAST_WINDOW = 24, 6  # steps with drafts per comparison; fewer if steps have many rows
_CLEAN = 3  # after this many steps without a draft, steps count as plain: no row waits for a result any more
_RECENT = 16  # the batch size is the largest of this many steps, because some lack rows that wait for results
_RATE = 0.1  # the weight of a new step in the running mean of plain steps
_LEFT_OUT = 8  # 1 / _LEFT_OUT of a window's steps, at least one, is left out at either end: a step may compile a kernel
_AS_FAST = 1 - 1e-6  # rates that differ by less are equal
_FIRST_PAUSE, _LONGEST_PAUSE = 128, 4096  # plain steps after a slower window; doubles each time


class DraftGate:
    """Compares steps with drafts to plain steps, separately for each octave of batch sizes (1, 2-3, 4-7 ...).

    Drafts are allowed until a window of steps with drafts was slower than plain steps. Then they pause, each time twice
    as long, before another window is tried. So little time is lost to drafts that are not worth their cost.
    """

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._plain_run = 0  # steps since the last one with a draft
        self._octaves: dict[int, _Octave] = {}
        self.octave = 1  # of the current batch: the bit length of its number of rows
        self._present = self._find(1)

    @property
    def allows(self) -> bool:
        """Whether drafts may be made at the current batch size."""
        return self._present.pause == 0

    def note(self, rows: int, num_drafted: int, num_accepted: int, seconds: float) -> None:
        """Note a step of `rows` rows that took `seconds`, verified `num_drafted` draft tokens and accepted some."""
        self._recent.append(rows)
        self.octave = max(self._recent).bit_length()
        present = self._present = self._find(self.octave)
        self._plain_run = 0 if num_drafted else self._plain_run + 1
        if self._plain_run > _CLEAN:
            present.note_plain(rows, seconds)
        else:
            present.note_drafted(rows + num_accepted, seconds, is_draft=num_drafted > 0)

    def _find(self, octave: int) -> _Octave:
        if octave not in self._octaves:
            self._octaves[octave] = _Octave(max(_LEAST_WINDOW, _WINDOW >> (octave // 2)))
        return self._octaves[octave]


class _Octave:
    """The measurements for batches of one octave. A window has `window` steps with drafts."""

    def __init__(self, window: int) -> None:
        self._window = window
        self.pause = 0  # plain steps to run before drafts are allowed again
        self._next_pause = _FIRST_PAUSE
        self._plain: float | None = None  # tokens a second
        self._steps: list[tuple[int, float]] = []  # tokens and seconds of the window's steps
        self._drafts = 0  # steps of the window that verified a draft

    def note_plain(self, rows: int, seconds: float) -> None:
        self.pause = max(0, self.pause - 1)
        if seconds > 0.0:
            rate = rows / seconds
            self._plain = rate if self._plain is None else self._plain + _RATE * (rate - self._plain)

    def note_drafted(self, num_tokens: int, seconds: float, *, is_draft: bool) -> None:
        """Note a step that verified drafts, or one shortly after it, because rows that wait for results are part of the
        cost."""
        self._steps.append((num_tokens, seconds))
        self._drafts += is_draft
        if self._drafts >= self._window:
            self._judge()

    def _judge(self) -> None:
        rate = _usual_rate(self._steps)
        self._steps, self._drafts = [], 0
        if self._plain is None:
            self.pause = 2 * _CLEAN  # long enough to see plain steps
        elif rate < _AS_FAST * self._plain:
            self.pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
        else:
            self._next_pause = _FIRST_PAUSE


def _usual_rate(steps: list[tuple[int, float]]) -> float:
    """Return the tokens per second of some steps, without the slowest and the fastest of them: a single step that
    captures a graph would outweigh a whole window."""
    left_out = max(1, len(steps) // _LEFT_OUT)
    kept = sorted(steps, key=_seconds)[left_out:-left_out] or steps
    return sum(tokens for tokens, _ in kept) / max(sum(seconds for _, seconds in kept), 1e-9)


def _seconds(step: tuple[int, float]) -> float:
    return step[1]
