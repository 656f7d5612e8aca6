"""The table of families and features, as `make families` prints it and as the suite prints it of what it ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from traceback import extract_tb
from typing import Any

import pytest

CELL = "cell"  # the property of a test that is one cell: family, feature, the feature's number, and why not
_WIDEST = 200  # characters of a cell


def why_failed(error: Exception) -> str:
    """One line: what an error says; of a bare assertion, the line of code."""
    said = str(error).strip()
    if not said and (frames := extract_tb(error.__traceback__)):
        said = frames[-1].line or ""
    return failed(f"{type(error).__name__}: {said}" if said else type(error).__name__)


def failed(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return f"FAILED: {lines[0] if lines else 'without a message'}"[:_WIDEST].replace("|", "\\|")


def head_of(features: Iterable[str]) -> str:
    names = ["family", *features]
    return f"| {' | '.join(names)} |\n{'|---' * len(names)}|"


def row_of(family: str, cells: Iterable[str]) -> str:
    return f"| {family} | {' | '.join(cells)} |"


def cells_of(reports: Iterable[pytest.TestReport]) -> dict[tuple[str, str], str]:
    """What tests that are cells said, by family and feature, in the order of features."""
    found: dict[tuple[str, str], str] = {}
    places: dict[str, int] = {}
    for report in reports:
        named: Mapping[str, Any] = dict(report.user_properties)
        if CELL not in named or report.when != "call":
            continue
        family, feature, places[feature], reason = named[CELL]
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            found[family, feature] = failed(report.longreprtext if crash is None else crash.message)
        elif report.skipped:
            said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            found[family, feature] = f"not here: {said.removeprefix('Skipped: ')}"
        else:
            found[family, feature] = reason or "ok"
    return dict(sorted(found.items(), key=lambda cell: places[cell[0][1]]))


def table_of(cells: Mapping[tuple[str, str], str]) -> Iterator[str]:
    features = list(dict.fromkeys(feature for _, feature in cells))
    yield head_of(features)
    for family in sorted({family for family, _ in cells}):
        yield row_of(family, (cells.get((family, feature), "not run") for feature in features))
