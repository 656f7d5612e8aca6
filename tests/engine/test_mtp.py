"""Drafts by the multi-token-prediction heads of checkpoints, beside transformers' layers: one position after the
other, no cache, no batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from eagle_heads import Draft, record
from family_models import VOCAB, FamilyCase
from mtp_heads import METHOD, STORED, MtpCase
from quire.engine.speculation.draft_length import DraftLength
from quire.types.decoding import BeamRules
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
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


@pytest.mark.parametrize(("name", "stages"), [("deepseek_v3", 2), ("glm4_moe", 3), ("mimo", 3), ("ernie4_5_moe", 2)])
def test_the_last_stage_of_a_pipeline_drafts_by_the_head(name: str, stages: int, case_of: Any) -> None:
    """It keeps the embedding and reads its own last hidden states."""
    case, asked = case_of(name), prompts(5, 40, seed=4)
    plain = engine(case, drafts=False).answers(asked, max_tokens=16)
    made = engine(case, stages=stages, budget=7, rows=4, block_size=4, max_len=100)
    drafts = record(made)
    for _ in range(2):
        assert made.answers(asked, max_tokens=16) == plain
    assert made.core.stats().prefix_hits > 0
    made.executor.close()
    tight = engine(case, stages=stages, num_blocks=28, rows=5, max_len=100)
    drafts += (tail := record(tight))
    assert tight.answers(asked, max_tokens=16) == plain
    assert tight.core.stats().preemptions > 0
    tight.executor.check()
    tight.executor.close()
    check(case, drafts[:40] + tail[:40])


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "glm4_moe"])
def test_prompts_in_chunks_prefix_hits_and_preemption_leave_the_head_what_it_reads(name: str, case_of: Any) -> None:
    case, asked = case_of(name), prompts(5, 40, seed=4)
    plain = engine(case, drafts=False).answers(asked, max_tokens=16)
    made = engine(case, budget=7, rows=4, block_size=4, max_len=100)
    drafts = record(made)
    assert made.answers(asked, max_tokens=16) == plain
    assert made.answers(asked, max_tokens=16) == plain
    assert made.core.stats().prefix_hits > 0
    tight = engine(case, num_blocks=28 if name != "qwen3_next" else 44, rows=5, max_len=100)
    drafts += (tail := record(tight))
    assert tight.answers(asked, max_tokens=16) == plain
    assert tight.core.stats().preemptions > 0
    check(case, drafts[:40] + tail[:40])


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_text"])
def test_samples_by_seed_and_forks_are_those_of_plain_decoding(name: str, case_of: Any) -> None:
    case, asked = case_of(name), prompts(4, 16, seed=7)
    sampling: dict[str, Any] = {"temperature": 1.0, "n": 2, "seed": 3, "repetition_penalty": 1.2, "max_tokens": 12}
    for block_size, depth in ((1, 1), (16, 2)):
        made = engine(case, block_size=block_size, num_blocks=512 // block_size, rows=6, max_len=100, depth=depth)
        assert made.answers(asked, **sampling) == engine(case, drafts=False).answers(asked, **sampling)
        assert made.core.stats().drafted_tokens > 0
        made.executor.worker.check()


def test_beams_and_masks_of_grammars_are_those_of_plain_decoding(case_of: Any) -> None:
    case, prompt = case_of("deepseek_v3"), prompts(1, 20, seed=8)[0]
    found = []
    for drafts in (True, False):
        made = engine(case, drafts=drafts)
        rules = SamplingParams(temperature=0.0, n=3, max_tokens=10)
        made.core.submit(Submit("beams", tuple(prompt), rules, TokenRules(), beam=BeamRules(3)))
        made.submit("some", prompt, allowed_token_ids=tuple(range(3, 40)))
        made.run()
        found.append([[sample.token_ids for sample in made.finished[name].samples] for name in ("beams", "some")])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "mimo"])
def test_the_logits_of_a_draft_are_those_of_the_reference(name: str, case_of: Any) -> None:
    case, prompt = case_of(name), prompts(1, 20, seed=9)[0]
    made = engine(case)
    drafts, logits = record(made), []
    head: Any = made.executor.worker.drafter._head
    found = head.head_logits
    head.head_logits = lambda *given: logits.append(found(*given)) or logits[-1]
    made.answers([prompt], max_tokens=8)
    wanted = torch.cat([case.drafts(tokens, len(drafted))[1] for tokens, drafted in drafts])
    torch.testing.assert_close(torch.cat(logits), wanted, rtol=1e-3, atol=1e-3)


def test_a_head_that_is_never_right_rests_and_one_that_always_is_does_not(case_of: Any) -> None:
    """Where a step costs the same however many tokens it has."""
    drafted = []
    for knows in (False, True):
        case = case_of("glm4_moe", knows=knows)
        made = engine(case, longest=False)
        note = made.proposers.note_step
        made.proposers.note_step = lambda *given, note=note: note(*given[:2], 0.01)  # type: ignore[method-assign]
        asked = prompts(1, 12, seed=11)
        assert made.answers(asked, max_tokens=200) == engine(case, drafts=False).answers(asked, max_tokens=200)
        drafted.append(made.core.stats().drafted_tokens)
    assert drafted[0] < 60
    assert drafted[1] > 100
