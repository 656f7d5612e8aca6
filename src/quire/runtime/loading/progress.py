"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # what, done, total; done == total ends it


def silent(what: str, done: int, total: int) -> None:
    """The progress of nobody watching."""
