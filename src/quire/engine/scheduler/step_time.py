"""Estimates how long steps and tokens take, from the times of past steps. Policies, prefetch and preemption use it."""

from __future__ import annotations

from collections import deque

from quire.types.step import StepPlan

_REMEMBERED = 64  # steps
_STEEPNESS = 1e-12  # seconds per token; a smaller slope counts as none


class StepTime:
    """A linear fit over the last steps: seconds = base + tokens x slope."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._sums = (0.0, 0.0, 0.0, 0.0)  # of tokens, seconds, tokens squared, tokens x seconds

    def note(self, num_tokens: int, seconds: float) -> None:
        """Note that a step of `num_tokens` tokens took `seconds`."""
        old_tokens, old_seconds = self._steps[0] if len(self._steps) == _REMEMBERED else (0, 0.0)
        self._steps.append((num_tokens, seconds))
        tokens, total, squares, products = self._sums
        self._sums = (
            tokens + num_tokens - old_tokens,
            total + seconds - old_seconds,
            squares + num_tokens * num_tokens - old_tokens * old_tokens,
            products + num_tokens * seconds - old_tokens * old_seconds,
        )

    def tokens_within(self, seconds: float, limit: int) -> int:
        """Return how many tokens a step may have to end within `seconds`, at most `limit`."""
        if not self._steps:
            return limit
        base, slope = self._line()
        return limit if slope <= 0.0 else min(limit, max(int((seconds - base) / slope), 0))

    @property
    def per_token(self) -> float | None:
        """Seconds for each further token; None before the first step."""
        return self._line()[1] if self._steps else None

    def _line(self) -> tuple[float, float]:
        """Return base and slope. There must have been a step."""
        count = len(self._steps)
        tokens, total, squares, products = self._sums
        spread = squares - tokens * tokens / count
        slope = (products - tokens * total / count) / spread if spread > 1 else 0.0
        if slope < _STEEPNESS:  # all steps had about the same size: take the base as 0
            return 0.0, total / max(tokens, 1.0)
        return max((total - slope * tokens) / count, 0.0), slope


class ComputeTime:
    """Estimates how long known tokens take to compute, from as many steps with prompts as without. Steps that also copy
    blocks to or from host memory are left out."""

    def __init__(self) -> None:
        self._steps = StepTime()
        self._decodes_next = False

    def note_step(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        """Note how long a step of `num_tokens` tokens took."""
        has_prompt = bool(plan.chunks)
        if (has_prompt or self._decodes_next) and not plan.transfers.saves and not plan.transfers.loads:
            self._steps.note(num_tokens, seconds)
            self._decodes_next = has_prompt

    def seconds(self, num_tokens: int) -> float | None:
        """Return how many seconds `num_tokens` tokens take; None before the first step."""
        each = self._steps.per_token
        return None if each is None else each * num_tokens
