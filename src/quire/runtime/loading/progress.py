"""Progress callbacks of long operations."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # (what, done, total); done == total: complete


def silent(what: str, done: int, total: int) -> None:
    """Ignore the progress."""
