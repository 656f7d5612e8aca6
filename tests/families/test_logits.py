"""The logits of every family, on every backend; and that its blocks are one compiled program."""

from __future__ import annotations

import pytest

from family_bench import BACKENDS, check_parity, load_bench, num_calls
from family_models import FamilyCase

pytest.importorskip("transformers")


@pytest.mark.parametrize("attention", BACKENDS)
def test_logits_are_those_of_transformers(case: FamilyCase, attention: str) -> None:
    model = case.model
    check_parity(case.directory, attention=attention, model=model)


def test_all_blocks_are_one_compiled_program(case: FamilyCase) -> None:
    assert case.model is not None  # its files are there
    assert num_calls(load_bench(case.directory)) == 0
