"""The guide to adding a family quotes code that is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_guide_quotes_the_source() -> None:
    guide = (ROOT / "docs/guides/adding_a_model.md").read_text(encoding="utf-8")
    models = ROOT / "src/quire/runtime/models"
    sources = [path.read_text(encoding="utf-8") for path in models.glob("*.py")]
    quotes = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(quotes) == 2
    for quote in quotes:
        assert any(quote in source for source in sources), quote
