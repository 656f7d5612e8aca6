"""What one rendering of a chat template may cost, and the counting that makes it stop there."""

from __future__ import annotations

import sys
import time
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from dataclasses import dataclass

from jinja2 import Undefined

NUMBER_BITS = 4_096
_SCALARS = (str, int, float, bool, type(None), Undefined)
_CONTAINERS = (list, tuple, Mapping, KeysView, ValuesView, ItemsView)
_NODE = 8  # brackets, quotes, commas: what a value takes besides its text
_ITEM_BYTES = 56  # what a short string in a fresh list takes


class TemplateTooCostly(Exception):
    """A rendering went over its budget; the text says which part of it."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Bounds on one template and each of its renderings. Values grow with the input, so long chats still render."""

    source_characters: int = 65_536
    syntax_nodes: int = 8_192
    messages: int = 8_192
    input_characters: int = 16_000_000
    output_characters: int = 16_000_000
    seconds: float = 0.5  # of this thread's own time
    value_size: int = 1_000_000  # characters or items of any single value
    total_bytes: int = 32_000_000  # of all values made, freed or not
    growth: int = 8  # both may also grow to this many times the input


class Budget:
    """Counts one rendering's time and memory. Every method raises TemplateTooCostly once a bound is passed."""

    def __init__(self, limits: TemplateLimits, input_size: int) -> None:
        self.limits = limits
        self.value_size = max(limits.value_size, limits.growth * input_size)
        self._bytes_left = max(limits.total_bytes, 4 * limits.growth * input_size)
        self._started = time.thread_time()
        self._look_at_clock = time.monotonic() + limits.seconds

    def tick(self) -> None:
        """Called at every loop turn, call, filter and test."""
        now = time.monotonic()
        if now < self._look_at_clock:
            return
        left = self.limits.seconds - (time.thread_time() - self._started)
        if left <= 0:
            raise TemplateTooCostly(f"it ran for more than {self.limits.seconds} s")
        self._look_at_clock = now + left

    def spend(self, num_bytes: int) -> None:
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise TemplateTooCostly("it made more data than its memory limit allows")

    def fits(self, size: int) -> None:
        """Refuse to make a value of `size` characters or items."""
        if size > self.value_size:
            raise TemplateTooCostly(f"it would make a value of {size} characters or items, limit {self.value_size}")

    def made(self, value: object) -> None:
        """Account for a value that was just made."""
        if isinstance(value, str):
            self.fits(len(value))
            self.spend(sys.getsizeof(value))
        elif isinstance(value, (list, tuple, dict)):
            self.fits(len(value))
            self.spend(sys.getsizeof(value) + _ITEM_BYTES * len(value))
        elif isinstance(value, int):
            self.number(value)

    def number(self, value: int) -> None:
        if value.bit_length() > NUMBER_BITS:
            raise TemplateTooCostly(f"it made a number of {value.bit_length()} bits, limit {NUMBER_BITS}")

    def weigh(self, value: object, indent: int = 0) -> int:
        """The characters that writing `value` out takes, every shared part counted each time it is met."""
        if isinstance(value, _SCALARS):
            return len(value) if isinstance(value, str) else _NODE
        total, waiting = 0, [(value, 1)]
        while waiting:
            part, depth = waiting.pop()
            if not isinstance(part, _CONTAINERS):
                raise TemplateTooCostly(f"it reads a {type(part).__name__} as data")
            items = [*part, *part.values()] if isinstance(part, Mapping) else part
            total += _NODE + (_NODE + depth * indent) * len(items)
            for item in items:
                if isinstance(item, str):
                    total += len(item)
                elif not isinstance(item, _SCALARS):
                    waiting.append((item, depth + 1))
            if total > self.value_size:
                raise TemplateTooCostly(f"a value has more than {self.value_size} characters written out")
        return total

    def text(self, value: object) -> str:
        """`str(value)`, weighed first."""
        if not isinstance(value, str):
            self.weigh(value)
        return str(value)

    def listed(self, values: Iterable[object]) -> list[object]:
        """The items of any iterable, as long as they are not too many."""
        if isinstance(values, list):
            return values
        found: list[object] = []
        for value in values:
            found.append(value)
            if len(found) > self.value_size:
                self.fits(len(found))
        return found
