"""Settings of a model's files: a number below the least that makes sense is refused by its key."""

from __future__ import annotations

import pytest

from quire.config.fields import Fields
from quire.types.errors import ModelLoadError


def test_a_number_below_the_least_is_refused_by_its_key() -> None:
    fields = Fields("config.json", {"a.window": 0, "a.every": 3}, prefix="a.")
    assert fields.integer("every", least=3) == 3
    with pytest.raises(ModelLoadError, match=r"a\.window.*must be at least 1, is 0"):
        fields.integer("window", least=1)
    with pytest.raises(ModelLoadError, match=r"a\.window.*must be at least 1, is 0"):
        fields.optional_integer("window", least=1)


def test_a_number_that_is_not_there_has_no_least() -> None:
    fields = Fields("config.json", {})
    assert fields.optional_integer("window", least=1) is None
    assert fields.integer("window", 5, least=1) == 5
