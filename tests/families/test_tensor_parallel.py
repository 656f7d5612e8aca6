"""Every family with its layers shared by two ranks: the tokens of transformers."""

from __future__ import annotations

import pytest

from family_models import FamilyCase
from worker_executor import TinyEngine

pytest.importorskip("transformers")


def test_two_ranks_give_the_tokens_of_transformers(case: FamilyCase) -> None:
    prompts = [case.prompt(20, 1), case.prompt(5, 2)]
    engine = TinyEngine(case.checkpoint(), tensor=2, budget=16)
    found = engine.answers(prompts, max_tokens=12)
    assert found == [[case.expected(prompt)] for prompt in prompts]
