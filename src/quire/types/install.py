"""The command that installs an optional part of Quire. Messages and pages all name this one, because it works."""

from __future__ import annotations


def install_extra(extra: str) -> str:
    """Return the fix to show a user who lacks the packages of an extra, such as `server`."""
    return f"run pip install -c constraints.txt '.[{extra}]' in a checkout of Quire"
