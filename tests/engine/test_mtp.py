"""Drafts by the multi-token-prediction heads of checkpoints, beside transformers' layers: one position after the
other, no cache, no batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from eagle_heads import Draft, record
from family_models import VOCAB, FamilyCase
from mtp_heads import METHOD, STORED, MtpCase
from quire.engine.speculation.draft_length import DraftLength
from worker_executor import TinyEngine

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "mimo", "ernie4_5_moe")  # of each layout and block


@pytest.fixture(scope="module")
def made_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], MtpCase]:
    return {}


@pytest.fixture
def case_of(made_cases: dict[tuple[str, bool], MtpCase], tmp_path_factory: pytest.TempPathFactory) -> Any:
    def find(name: str, *, knows: bool = False) -> MtpCase:
        key = (name, knows)
        if key not in made_cases:
            folder: Path = tmp_path_factory.mktemp("model") / name
            made_cases[key] = MtpCase(FamilyCase(name, folder), knows)
            made_cases[key].save()
        return made_cases[key]

    return find


def engine(case: MtpCase, *, drafts: bool = True, longest: bool = True, **settings: Any) -> TinyEngine:
    """`longest`: drafts are as long as they may be."""
    checkpoint: Any = case.case.checkpoint()
    if not drafts:
        return TinyEngine(checkpoint, **settings)
    made = TinyEngine(checkpoint, METHOD, draft=case.head(), **settings)  # type: ignore[arg-type]
    if longest:
        made.proposers.lengths.length = lambda *given, **rest: DraftLength(given[1])  # type: ignore[attr-defined]
    return made


def prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def check(case: MtpCase, drafts: list[Draft]) -> None:
    """Raise an AssertionError for a draft that is not the reference's."""
    assert drafts
    for tokens, drafted in drafts:
        assert list(drafted) == case.drafts(tokens, len(drafted))[0], tokens


@pytest.mark.parametrize("attention", ["auto", "reference"])
@pytest.mark.parametrize("name", KINDS)
def test_drafts_are_those_of_the_reference_and_answers_those_of_plain_decoding(
    name: str, attention: str, case_of: Any
) -> None:
    case, asked = case_of(name), prompts(4)
    made = engine(case, attention=attention)
    drafts = record(made)
    assert made.answers(asked, max_tokens=10) == engine(case, drafts=False).answers(asked, max_tokens=10)
    check(case, drafts)
    made.executor.worker.check()


@pytest.mark.parametrize("name", sorted(set(STORED) - set(KINDS)))
def test_families_with_the_same_layers_draft_by_their_heads_too(name: str, case_of: Any) -> None:
    case = case_of(name)
    made = engine(case)
    drafts = record(made)
    made.answers(prompts(2), max_tokens=6)
    check(case, drafts)


@pytest.mark.parametrize("name", KINDS)
def test_a_head_that_knows_its_target_is_accepted(name: str, case_of: Any) -> None:
    case, asked = case_of(name, knows=True), prompts(4)
    made = engine(case)
    assert made.answers(asked) == engine(case, drafts=False).answers(asked)
    stats = made.core.stats()
    assert stats.accepted_tokens > 0.9 * stats.drafted_tokens > 0


@pytest.mark.parametrize(("name", "expert"), [("deepseek_v3", False), ("glm4_moe", True), ("mimo", False)])
def test_ranks_that_share_a_model_share_its_head(name: str, expert: bool, case_of: Any) -> None:
    case, asked = case_of(name, knows=True), prompts(3, seed=2)
    made = engine(case, tensor=2, expert=expert)
    assert made.answers(asked, max_tokens=10) == engine(case, drafts=False).answers(asked, max_tokens=10)
    stats = made.core.stats()
    assert stats.accepted_tokens > 0.9 * stats.drafted_tokens > 0
