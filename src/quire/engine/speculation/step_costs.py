"""Measures what steps cost by their number of tokens. DraftLengths uses it to decide whether a draft is worth its
cost."""

from __future__ import annotations

import math
from bisect import bisect_right

_SINGLE = 16  # up to this many tokens, every number is a size class; above, an octave has _PER_OCTAVE classes
_PER_OCTAVE = 2
_PRIOR_SLOPE = 0.15  # the assumed cost of one more token before anything was measured, as a share of a one-token step
_PRIOR_DRAFTING = 1.5  # the assumed cost of a step after which the runtime drafts, relative to one without
_LARGEST_ERROR = 0.7  # largest error, in log seconds, with which one step counts: it may be a pause of the machine
_SPEED_RATE = 0.3  # the weight of a new step in the estimate of the machine's speed
_SHAPE_RATE = 0.03  # the least weight of a new step in the relative cost of its size class
_NEW = 3  # the first steps of a size do not change the speed; the very first is ignored as warm-up


class StepCosts:
    """Relative costs of steps by their number of tokens.

    A measured time is the speed of the machine, which changes with its other work, times a relative cost, which does
    not. Callers see only relative costs, so a slow period makes no size look expensive. Steps with prompts are not
    noted. `drafting` steps are those after which the runtime drafts.
    """

    def __init__(self) -> None:
        self._speed: float | None = None  # log seconds
        self._classes: dict[bool, dict[int, _SizeClass]] = {False: {}, True: {}}
        self._known: dict[bool, list[_SizeClass]] = {}  # the same, sorted; rebuilt after each step
        self._extra: dict[tuple[int, bool], list[float]] = {}

    def note(self, num_tokens: int, seconds: float, *, drafting: bool = False) -> None:
        """Note how long a step without prompt chunks took."""
        self._extra.clear()
        self._known.clear()
        if seconds <= 0.0:
            return
        classes, key, seen = self._classes[drafting], _class(num_tokens), math.log(seconds)
        if self._speed is None:
            self._speed = seen - math.log(self.cost(num_tokens, drafting=drafting))
        if key not in classes:
            classes[key] = _SizeClass(num_tokens)
        self._speed += _SPEED_RATE * classes[key].learn(num_tokens, seen - self._speed)

    def cost(self, num_tokens: int, *, drafting: bool = False) -> float:
        """Return the relative cost of a step, interpolated between the two nearest known size classes, or extrapolated
        from the only known one with the assumed costs."""
        known = self._known.get(drafting)
        if known is None:
            known = [each for each in self._classes[drafting].values() if each.count > 1]
            known = self._known[drafting] = sorted(known, key=_tokens)
        if not known:
            return _prior(num_tokens) if not drafting else self.cost(num_tokens) * _PRIOR_DRAFTING
        above = bisect_right(known, float(num_tokens), key=_tokens)
        if above == 0 or len(known) == 1:
            return known[0].cost * _prior(num_tokens) / _prior(known[0].tokens)
        left, right = known[above - 1 : above + 1] if above < len(known) else known[-2:]
        slope = max(0.0, (right.cost - left.cost) / (right.tokens - left.tokens))
        return left.cost + (num_tokens - left.tokens) * slope

    def extra(self, num_tokens: int, most: int, *, drafting: bool = False) -> list[float]:
        """Return how much more steps of 1, 2 ... `most` further tokens cost, as shares of a plain step of `num_tokens`.

        The cost of a few tokens in a large step is too small to measure. It is taken as a proportion of the cost of 50
        % more tokens.
        """
        found = self._extra.setdefault((num_tokens, drafting), [])
        plain, far = self.cost(num_tokens), num_tokens // 2
        for more in range(len(found) + 1, most + 1):
            farther = max(more, far)
            dearer = self.cost(num_tokens + farther, drafting=drafting) / plain - 1.0
            found.append(max(0.0, dearer * more / farther))
        return found[:most]


class _SizeClass:
    """The cost of steps of about `tokens` tokens; known from the second step on. `level` is its logarithm."""

    __slots__ = ("cost", "count", "level", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens, self.level, self.cost, self.count = float(tokens), math.inf, math.inf, 0

    def learn(self, tokens: int, level: float) -> float:
        """Learn from a step. Returns how much more it cost than expected, in log units; 0 while this class is new."""
        self.count += 1
        if self.count == 1:
            return 0.0
        if self.count == 2:
            self.level = level
        error = min(max(level - self.level, -_LARGEST_ERROR), _LARGEST_ERROR)
        self.level += max(1.0 / (self.count - 1), _SHAPE_RATE) * error
        self.tokens += 0.1 * (tokens - self.tokens)
        self.cost = math.exp(self.level)
        return error if self.count > _NEW else 0.0


def _tokens(size_class: _SizeClass) -> float:
    return size_class.tokens


def _class(num_tokens: int) -> int:
    """Return the size class of a step. Steps of one class cost about the same."""
    if num_tokens <= _SINGLE:
        return num_tokens
    return _SINGLE + math.ceil(_PER_OCTAVE * math.log2(num_tokens / _SINGLE))


def _prior(num_tokens: float) -> float:
    return 1.0 + _PRIOR_SLOPE * (num_tokens - 1.0)
