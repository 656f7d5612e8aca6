"""docs/reference/models.md lists the families of the registry, no more and no fewer."""

from __future__ import annotations

import re
from pathlib import Path

from quire.runtime.models.registry import ENTRIES, Entry

PAGE = Path(__file__).parents[2] / "docs/reference/models.md"


def row_of(name: str, entry: Entry) -> str:
    stored = f"`{entry.gguf_name or name}`" + (" with experts" if entry.gguf_mixture else "")
    stored += " with sigmoids" if entry.gguf_sigmoids else ""
    classes = ", ".join(f"`{each}`" for each in entry.classes)
    return f"| `{name}` | {classes} | {stored if entry.in_gguf else ''} | {entry.kind} |"


def test_the_page_has_a_row_for_each_family() -> None:
    written = re.findall(r"^\| `.*\|$", PAGE.read_text(), re.MULTILINE)
    assert written == [row_of(name, entry) for name, entry in ENTRIES.items()]
