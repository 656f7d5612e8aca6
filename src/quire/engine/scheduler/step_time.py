"""Three estimates from the times of past steps. StepTime: the seconds per additional token, by a linear fit.
ComputeTime: the seconds to compute some known tokens, by a StepTime; prefetch and preemption compare it with the time
of copies. StepCurve: the seconds of a step by its size, which need not be linear; the deadline policy bounds steps with
it."""

from __future__ import annotations

import math
from collections import deque

from quire.types.step import StepPlan

_REMEMBERED = 64  # steps
_STEEPNESS = 1e-12  # seconds per token; a smaller slope counts as none
_CLASSES_PER_OCTAVE = 2  # size classes per doubling in StepCurve
_RATE = 0.25  # weight of a new step in the mean of its size class
_MOST_SLOWER = 2.0  # a slower step counts as this multiple of its class, because it may be a pause of the machine
_FARTHEST = 4  # estimates beyond this multiple of the largest known step are not trusted


class StepTime:
    """A linear fit over the last 64 steps: seconds = base + tokens x slope. ComputeTime uses the slope."""

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

    @property
    def per_token(self) -> float | None:
        """Seconds per additional token; None before the first step."""
        return self._line()[1] if self._steps else None

    def _line(self) -> tuple[float, float]:
        """Return base and slope. At least one step must have been noted."""
        count = len(self._steps)
        tokens, total, squares, products = self._sums
        spread = squares - tokens * tokens / count
        slope = (products - tokens * total / count) / spread if spread > 1 else 0.0
        if slope < _STEEPNESS:  # all steps had about the same size: assume a base of 0
            return 0.0, total / max(tokens, 1.0)
        return max((total - slope * tokens) / count, 0.0), slope


class StepCurve:
    """The seconds of a step as a function of its number of tokens: a running mean for each size class, with linear
    interpolation between classes.

    A class keeps its mean while there are no steps of its size. So a long phase of decoding does not erase the known
    cost of prompt tokens, and the first chunk of the next prompt already gets the right size.
    """

    def __init__(self) -> None:
        self._classes: dict[int, tuple[float, float, int]] = {}  # tokens, seconds, steps

    def note(self, num_tokens: int, seconds: float) -> None:
        """Note that a step of `num_tokens` tokens took `seconds`. The first step of a size may have included compiling
        kernels, so the second replaces it if that was faster."""
        key = round(_CLASSES_PER_OCTAVE * math.log2(max(num_tokens, 1)))
        tokens, known, count = self._classes.get(key, (float(num_tokens), seconds, 0))
        if count == 1:
            known = min(known, seconds)
        known += _RATE * (min(seconds, _MOST_SLOWER * known) - known)
        self._classes[key] = (tokens + _RATE * (num_tokens - tokens), known, count + 1)
        if count:
            self._follow(key, known)

    def _follow(self, key: int, seconds: float) -> None:
        """Make the other classes consistent with the newest mean: no smaller step takes longer, and no larger step
        takes less."""
        for other, (tokens, known, count) in self._classes.items():
            if known > seconds if other < key else known < seconds:
                self._classes[other] = (tokens, seconds, count)

    def tokens_within(self, seconds: float, limit: int) -> int:
        """Return how many tokens, at most `limit`, a step may have to end within `seconds`.

        A size with only one step is ignored: if that step was slow for another reason, its size would never be tried
        again.
        """
        left_tokens = left_seconds = slope = 0.0  # assume that a step without tokens takes no time
        met_again = sorted(known for known in self._classes.values() if known[2] > 1)
        for tokens, known, _ in met_again:
            if known > seconds:
                share = (seconds - left_seconds) / (known - left_seconds)
                return min(limit, int(left_tokens + share * (tokens - left_tokens)))
            slope = (known - left_seconds) / max(tokens - left_tokens, 1.0)
            left_tokens, left_seconds = tokens, known
        if not met_again:
            return limit
        farther = (seconds - left_seconds) / slope if slope > _STEEPNESS else math.inf
        return min(limit, int(min(left_tokens + farther, _FARTHEST * left_tokens)))


class ComputeTime:
    """Estimates how long it takes to compute known tokens: those of a preempted group, or of blocks that could be read
    from a tier instead.

    It notes every step with prompt chunks, and after it the next step without. Otherwise a long phase of decoding would
    push all steps with prompts out of the 64 that StepTime remembers, and the slope would be lost. Steps that also copy
    blocks to or from host memory are left out, because they take longer.
    """

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
