"""Conversations with hybrid models (gated delta nets or Mamba-2 beside attention), by their real layers: later turns
are prefix hits, on the device, from host memory and after a restart from disk, and the tokens are those of a cold run.
Drafts change no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import interpreter  # noqa: F401  where there is no GPU
import worker_executor
from family_models import FamilyCase
from quire import LLM, SamplingParams
from quire.config.tiers import TierConfig
from quire.engine.speculation.proposer import NoProposers
from quire.types.request import Submit
from tiny_models import DEVICE
from worker_executor import TinyEngine

pytest.importorskip("transformers")
USUAL = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "threads": 1, "max_num_seqs": 4}
TURN = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module", params=["qwen3_next", "granitemoehybrid"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyCase:
    made = FamilyCase(request.param, tmp_path_factory.mktemp(request.param))
    assert made.model is not None  # it is written
    return made


def open_llm(case: FamilyCase, **settings: Any) -> LLM:
    return LLM(case.directory, **(USUAL | {"max_model_len": 512, "kv_cache_memory": "8MiB"} | settings))


def say(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were found."""
    (answer,) = llm.generate([prompt], TURN, use_tqdm=False)
    return list(answer.outputs[0].token_ids), answer.num_cached_tokens


@pytest.fixture(scope="module")
def turns(case: FamilyCase) -> list[tuple[list[int], list[int]]]:
    """Three turns, each answered cold: prompt and answer."""
    found, prompt = [], case.prompt(360)
    with open_llm(case, enable_prefix_caching=False) as llm:
        for turn in range(3):
            answer, cached = say(llm, prompt)
            assert cached == 0
            found.append((prompt, answer))
            prompt = [*prompt, *answer, *case.prompt(7, turn + 1)]
    return found


def check_hits(llm: LLM, turns: list[tuple[list[int], list[int]]], first: int = 0) -> None:
    for number, (prompt, expected) in enumerate(turns[first:], first):
        answer, cached = say(llm, prompt)
        assert answer == expected
        if number:
            before = turns[number - 1]
            assert cached >= 0.95 * (len(before[0]) + len(before[1]))


def test_second_and_third_turn_are_prefix_hits(case: FamilyCase, turns: list[tuple[list[int], list[int]]]) -> None:
    with open_llm(case) as llm:
        check_hits(llm, turns)


def test_so_they_are_after_eviction_to_host_memory(case: FamilyCase, turns: list[tuple[list[int], list[int]]]) -> None:
    with open_llm(case, num_kv_blocks=64, kv_cache_memory=None, host_cache_memory="16MiB", tier_write="back") as llm:
        check_hits(llm, turns[:1])
        for seed in range(4):
            say(llm, case.prompt(400, 20 + seed))
        check_hits(llm, turns, 1)
        assert llm.stats().tiers.loaded > 0


@pytest.mark.usefixtures("patient")
def test_so_they_are_after_a_restart(
    case: FamilyCase, turns: list[tuple[list[int], list[int]]], tmp_path: Path
) -> None:
    disk = {"host_cache_memory": "16MiB", "disk_cache_path": str(tmp_path / "kv"), "disk_cache_memory": "64MiB"}
    with open_llm(case, **disk, tier_write="through") as llm:
        check_hits(llm, turns[:1])
    with open_llm(case, **disk, tier_write="through") as llm:
        check_hits(llm, turns[:2], 1)


def test_samples_and_beams_share_a_prompt_of_a_hybrid_model(case: FamilyCase) -> None:
    prompt, several = case.prompt(50), SamplingParams(temperature=0.0, n=3, max_tokens=12, ignore_eos=True)
    with open_llm(case) as llm:
        (answer,) = llm.generate([prompt], several, use_tqdm=False)
    assert [list(sample.token_ids) for sample in answer.outputs] == [case.expected(prompt)[:12]] * 3


# -------------------------------------------------------------------------------------------------------------- drafts
@dataclass
class KnowingProposer:
    """Drafts what the model will say, `length` tokens at once, the last ones of most drafts wrong."""

    answer: Sequence[int]
    length: int
    done: int = 0
    is_observed = False
    num_ahead = 0

    def observe(self, tokens: Sequence[int]) -> None:
        assert list(tokens) == list(self.answer[self.done : self.done + len(tokens)])
        self.done += len(tokens)

    def propose(self, limit: int) -> tuple[int, ...]:
        draft = self.answer[self.done : self.done + min(limit, self.length)]
        right = self.done % (self.length + 2)
        return tuple(token if place < right else (token + 1) % 90 for place, token in enumerate(draft))

    def num_to_draft(self, limit: int) -> int:
        return 0

    def offer(self, tokens: Sequence[int]) -> None: ...

    def result(self, num_drafted: int, num_accepted: int) -> None: ...

    def clone(self) -> KnowingProposer:
        return KnowingProposer(self.answer, self.length, self.done)

    def close(self) -> None: ...


@dataclass
class KnowingProposers(NoProposers):
    """`answers` by prompt."""

    answers: dict[tuple[int, ...], list[int]]
    length: int

    def begin(self, request: Submit) -> KnowingProposer:
        return KnowingProposer(self.answers[tuple(request.prompt_token_ids)], self.length)


SAMPLING: dict[str, Any] = {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2}


def drafting_engine(
    case: FamilyCase, length: int, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[TinyEngine, KnowingProposers]:
    knowing = KnowingProposers({}, length)
    with monkeypatch.context() as patched:
        patched.setattr(worker_executor, "make_proposers", lambda *_: knowing)
        return TinyEngine(case.checkpoint(), **settings), knowing  # type: ignore[arg-type]


def check_drafts(
    case: FamilyCase, made: TinyEngine, knowing: KnowingProposers, lengths: Sequence[int], count: int
) -> int:
    """Two turns of conversations whose prompts have these lengths. Returns the tokens that a third would repeat."""
    plain = TinyEngine(case.checkpoint(), attention="reference")  # type: ignore[arg-type]
    prompts = [case.prompt(length, length) for length in lengths]
    for _ in range(2):
        wanted = plain.answers(prompts, max_tokens=count, **SAMPLING)
        knowing.answers = {tuple(prompt): answer for prompt, (answer,) in zip(prompts, wanted, strict=True)}
        assert made.answers(prompts, max_tokens=count, **SAMPLING) == wanted
        prompts = [[*prompt, *answer, 7] for prompt, (answer,) in zip(prompts, wanted, strict=True)]
    stats = made.core.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    return sum(map(len, prompts))


@pytest.mark.parametrize(
    ("length", "settings"),
    [
        (5, {"block_size": 4, "attention": "native" if DEVICE == "cpu" else "triton"}),
        (20, {"block_size": 3, "budget": 8, "depth": 2}),
        (40, {}),
    ],
)
def test_drafts_change_no_token_of_a_hybrid_model(
    case: FamilyCase, length: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state goes back to the last one before a rejected token, and later turns are hits too."""
    made, knowing = drafting_engine(case, length, monkeypatch, **settings)
    repeated = check_drafts(case, made, knowing, (3, 30, 17), 60)
    assert made.core.stats().prefix_hits >= 0.8 * (repeated - 3 * 61)


@pytest.mark.parametrize("host_blocks", [0, 200])
def test_so_it_is_when_requests_are_preempted(
    case: FamilyCase, host_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = TierConfig(host_blocks=host_blocks)
    made, knowing = drafting_engine(case, 5, monkeypatch, block_size=4, num_blocks=40, tiers=tiers)
    check_drafts(case, made, knowing, (3, 30, 17), 60)
    assert made.core.stats().preemptions > 0


def test_so_it_is_by_the_kernels_of_a_gpu(case: FamilyCase, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if case.name != "qwen3_next" and DEVICE == "cpu":
        pytest.skip("slow in the interpreter, where the matrix runs its kernels")
    made, knowing = drafting_engine(case, 3, monkeypatch, attention="triton", rows=2, max_len=48, block_size=4)
    check_drafts(case, made, knowing, (5,), 6)


# ------------------------------------------------------------------------------------------------------------ eviction
def test_a_long_prompt_stays_a_hit_while_states_of_short_ones_come_and_go(case: FamilyCase) -> None:
    """A slot frees the same bytes whoever gives it up: the long prompt would take the most tokens to compute again."""
    made, prompt = TinyEngine(case.checkpoint(), None, rows=2, num_blocks=256), case.prompt(200)  # type: ignore[arg-type]
    (answer,) = made.answers([prompt], max_tokens=12)
    for seed in range(20):
        made.answers([case.prompt(20, 50 + seed)], max_tokens=2)
    again, before = [*prompt, *answer[0], *case.prompt(3, 9)], made.core.stats().prompt_tokens
    made.answers([again], max_tokens=2)
    assert made.core.stats().prompt_tokens - before < 32


def test_later_turns_are_prefix_hits_after_a_swap(case: FamilyCase) -> None:
    """Two conversations for which memory is too short: one is moved to host memory and back while it answers."""
    settings: dict[str, Any] = {"num_blocks": 160, "max_len": 512, "tiers": TierConfig(host_blocks=512)}
    made = TinyEngine(case.checkpoint(), None, **settings)  # type: ignore[arg-type]
    prompts, known = [case.prompt(300, seed) for seed in range(2)], 0
    for turn in range(3):
        answers = made.answers(prompts, max_tokens=12)
        assert answers == [[case.expected(prompt)] for prompt in prompts]
        for name in list(made.finished)[-2:]:
            assert made.finished[name].num_cached_tokens >= 0.95 * known
        known = len(prompts[0]) + 12
        more = [[*answer[0], *case.prompt(3, turn)] for answer in answers]
        prompts = [[*prompt, *each] for prompt, each in zip(prompts, more, strict=True)]
    assert made.core.stats().swaps > 0
