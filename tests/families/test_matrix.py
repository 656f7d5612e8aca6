"""Every family with every feature of the engine. `python -m tests.families.matrix` prints the table."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from family_bench import num_calls
from family_models import CASES, CONFIGS, VARIANTS, FamilyCase
from quire.runtime.models.registry import of_kind
from tests.families.features import FEATURES, check
from tests.families.matrix import FEW_FEATURES, NOT_YET, SAME_BLOCKS, SAME_KERNELS, chosen
from tests.families.table import CELL, cells_of, table_of, why_failed
from tiny_models import DEVICE

pytest.importorskip("transformers")
WHOLE = "QUIRE_TEST_WHOLE" in os.environ


def test_every_family_has_a_tiny_model() -> None:
    assert CONFIGS.keys() == set(of_kind("decoder"))
    assert {name.partition("-")[0] for name in VARIANTS} <= CONFIGS.keys()


def test_every_reason_why_not_is_of_a_family_and_a_feature() -> None:
    assert all(family in CASES and feature in FEATURES for family, feature in NOT_YET)


def test_families_that_are_left_to_the_table_have_one_that_runs_the_same_kernels() -> None:
    for same in (SAME_KERNELS, SAME_BLOCKS):
        assert {*same, *same.values()} <= CONFIGS.keys()
        assert not same.keys() & set(same.values())


def test_the_table_has_the_families_that_are_named_or_all() -> None:
    assert chosen([], ["opt", "gpt2"]) == ["gpt2", "opt"]
    assert chosen(["opt"], ["opt", "gpt2"]) == ["opt"]
    with pytest.raises(SystemExit, match=r"gpt3, llama: no such family in tests/support/family_models\.py"):
        chosen(["gpt3", "opt", "llama"], ["opt", "gpt2"])


def test_the_compiled_cpu_path_is_not_looked_for_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("family_bench.NO_PROGRAM", "the program runs on a CPU")
    nothing: Any = None
    for look in (num_calls, FEATURES["CPU program"]):
        with pytest.raises(pytest.skip.Exception, match="runs on a CPU"):
            look(nothing)


def test_a_cell_that_failed_names_the_first_token_that_differs() -> None:
    case: Any = SimpleNamespace(expected=lambda prompt: [7, 8, 9])
    made: Any = SimpleNamespace(answers=lambda prompts, max_tokens: [[[7, 8, 9]], [[7, 3, 9]]])
    with pytest.raises(AssertionError) as caught:
        check(case, made, [[1], [1, 2]])
    assert why_failed(caught.value) == (
        "FAILED: AssertionError: prompt 1 of 2 tokens: token 1 is 3, transformers has 8"
    )


def test_a_cell_that_failed_without_a_message_names_the_line() -> None:
    with pytest.raises(AssertionError) as caught:
        raise_bare()
    assert why_failed(caught.value) == "FAILED: AssertionError: raise AssertionError"


def raise_bare() -> None:
    raise AssertionError


def test_the_suite_prints_the_cells_that_it_ran() -> None:
    def report(cell: tuple[str, str, int, str | None], outcome: Any, said: Any = None) -> pytest.TestReport:
        return pytest.TestReport("a test", ("", 0, ""), {}, outcome, said, "call", user_properties=[(CELL, cell)])

    cells = cells_of([
        report(("opt", "graphs", 1, None), "skipped", ("file", 1, "Skipped: no triton")),
        report(("opt", "parity", 0, None), "passed"),
        report(("gpt2", "parity", 0, "its head has a bias"), "passed"),
        report(("gpt2", "graphs", 1, None), "failed", "AssertionError: token 1 is 3\nmore"),
        pytest.TestReport("another", ("", 0, ""), {}, "passed", None, "call"),
    ])  # fmt: skip
    assert list(table_of(cells)) == [
        "| family | parity | graphs |\n|---|---|---|",
        "| gpt2 | its head has a bias | FAILED: AssertionError: token 1 is 3 |",
        "| opt | ok | not here: no triton |",
    ]


@pytest.mark.parametrize("feature", FEATURES)
def test_a_family_gives_the_tokens_of_transformers(
    case: FamilyCase, feature: str, record_property: Callable[[str, object], None]
) -> None:
    record_property(CELL, [case.name, feature, list(FEATURES).index(feature), NOT_YET.get((case.name, feature))])
    if feature == "graphs" and case.name in SAME_KERNELS and DEVICE == "cpu" and not WHOLE:
        pytest.skip(f"its kernels are those of {SAME_KERNELS[case.name]}; make families runs it")
    if case.name in SAME_BLOCKS and feature not in FEW_FEATURES and not WHOLE:
        pytest.skip(f"its blocks are those of {SAME_BLOCKS[case.name]}; make families runs it")
    reason = NOT_YET.get((case.name, feature))
    if reason is not None:
        with pytest.raises(Exception):  # noqa: B017, PT011  a reason that no longer holds must go
            FEATURES[feature](case)
        return
    FEATURES[feature](case)
