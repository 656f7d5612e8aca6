"""The command that installs an optional part of Quire. All messages and pages name this command."""

from __future__ import annotations


def install_extra(extra: str) -> str:
    """Return the fix that tells a user how to install the packages of an extra, such as `server`."""
    return f"run pip install -c constraints.txt '.[{extra}]' in a checkout of Quire"
