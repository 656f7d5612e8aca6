"""How long a step, or some tokens of it, will take, learned from the steps that were."""

from __future__ import annotations

from collections import deque

from quire.types.step import StepPlan

_REMEMBERED = 64  # steps
_STEEPNESS = 1e-12  # seconds per token, below which a step is as long as any other


class StepTime:
    """A line through the last steps: seconds = base + tokens x slope."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._sums = [0.0, 0.0, 0.0, 0.0]  # of tokens, seconds, tokens squared, tokens x seconds

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if len(self._steps) == _REMEMBERED:
            self._add(*self._steps[0], -1)
        self._steps.append((num_tokens, seconds))
        self._add(num_tokens, seconds, 1)

    def tokens_within(self, seconds: float, limit: int) -> int:
        """How many tokens a step may have to end in time; `limit` while nothing says otherwise."""
        if not self._steps:
            return limit
        base, slope = self._line()
        return limit if slope <= 0.0 else min(limit, max(int((seconds - base) / slope), 0))

    @property
    def per_token(self) -> float | None:
        """Seconds that a token more takes; None before the first step."""
        return self._line()[1] if self._steps else None

    def _line(self) -> tuple[float, float]:
        """Base and slope; there must have been a step."""
        count = len(self._steps)
        tokens, total, squares, products = self._sums
        spread = squares - tokens * tokens / count
        slope = (products - tokens * total / count) / spread if spread > 1 else 0.0
        if slope < _STEEPNESS:  # steps of one size: as if a step without tokens took no time
            return 0.0, total / max(tokens, 1.0)
        return max((total - slope * tokens) / count, 0.0), slope

    def _add(self, num_tokens: int, seconds: float, sign: int) -> None:
        values = (num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
        self._sums = [total + sign * value for total, value in zip(self._sums, values, strict=True)]


class ComputeTime:
    """Seconds that known tokens take to compute, learned from steps with and without prompts in equal parts. Steps that
    also moved blocks teach nothing."""

    def __init__(self) -> None:
        self._steps = StepTime()
        self._decodes_next = False

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        has_prompt = bool(plan.chunks)
        if (has_prompt or self._decodes_next) and not plan.transfers.saves and not plan.transfers.loads:
            self._steps.note(plan.num_tokens, seconds)
            self._decodes_next = has_prompt

    def seconds(self, num_tokens: int) -> float | None:
        """None before anything was computed."""
        each = self._steps.per_token
        return None if each is None else each * num_tokens
