"""The labels of a classifier, as config.json names or counts them."""

from __future__ import annotations

import pytest

from quire.config.fields import Fields
from quire.runtime.models.labels import read_labels
from quire.types.errors import ModelLoadError


def test_labels_without_names_are_counted() -> None:
    assert read_labels(Fields("config.json", {"num_labels": 3})) == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert read_labels(Fields("config.json", {})) == ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize("count", [0, -1])
def test_a_classifier_without_labels_is_refused_by_the_key_of_their_number(count: int) -> None:
    with pytest.raises(ModelLoadError, match=f"num_labels: must be at least 1, is {count}"):
        read_labels(Fields("config.json", {"num_labels": count}))
