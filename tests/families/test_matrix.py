"""Every family with every feature of the engine. `python -m tests.families.matrix` prints the table."""

from __future__ import annotations

import pytest

from family_models import CASES, CONFIGS, VARIANTS, FamilyCase
from quire.runtime.models.registry import of_kind
from tests.families.features import FEATURES
from tests.families.matrix import NOT_YET

pytest.importorskip("transformers")


def test_every_family_has_a_tiny_model() -> None:
    assert CONFIGS.keys() == set(of_kind("decoder"))
    assert {name.partition("-")[0] for name in VARIANTS} <= CONFIGS.keys()


def test_every_reason_why_not_is_of_a_family_and_a_feature() -> None:
    assert all(family in CASES and feature in FEATURES for family, feature in NOT_YET)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_family_gives_the_tokens_of_transformers(case: FamilyCase, feature: str) -> None:
    reason = NOT_YET.get((case.name, feature))
    if reason is not None:
        with pytest.raises(Exception):  # noqa: B017, PT011  a reason that no longer holds must go
            FEATURES[feature](case)
        return
    FEATURES[feature](case)
