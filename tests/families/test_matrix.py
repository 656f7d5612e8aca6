"""Every family with every feature of the engine. `python -m tests.families.matrix` prints the table."""

from __future__ import annotations

import os
from typing import Any

import pytest

from family_bench import num_calls
from family_models import CASES, CONFIGS, VARIANTS, FamilyCase
from quire.runtime.models.registry import of_kind
from tests.families.features import FEATURES
from tests.families.matrix import NOT_YET, SAME_KERNELS
from tiny_models import DEVICE

pytest.importorskip("transformers")
WHOLE = "QUIRE_TEST_WHOLE" in os.environ


def test_every_family_has_a_tiny_model() -> None:
    assert CONFIGS.keys() == set(of_kind("decoder"))
    assert {name.partition("-")[0] for name in VARIANTS} <= CONFIGS.keys()


def test_every_reason_why_not_is_of_a_family_and_a_feature() -> None:
    assert all(family in CASES and feature in FEATURES for family, feature in NOT_YET)


def test_families_that_are_left_to_the_table_have_one_that_runs_the_same_kernels() -> None:
    assert {*SAME_KERNELS, *SAME_KERNELS.values()} <= CONFIGS.keys()
    assert not SAME_KERNELS.keys() & set(SAME_KERNELS.values())


def test_the_compiled_cpu_path_is_not_looked_for_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("family_bench.NO_PROGRAM", "the program runs on a CPU")
    nothing: Any = None
    for look in (num_calls, FEATURES["CPU program"]):
        with pytest.raises(pytest.skip.Exception, match="runs on a CPU"):
            look(nothing)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_family_gives_the_tokens_of_transformers(case: FamilyCase, feature: str) -> None:
    if feature == "graphs" and case.name in SAME_KERNELS and DEVICE == "cpu" and not WHOLE:
        pytest.skip(f"its kernels are those of {SAME_KERNELS[case.name]}; make families runs it")
    reason = NOT_YET.get((case.name, feature))
    if reason is not None:
        with pytest.raises(Exception):  # noqa: B017, PT011  a reason that no longer holds must go
            FEATURES[feature](case)
        return
    FEATURES[feature](case)
