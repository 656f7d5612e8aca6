"""Conversations with a hybrid model (gated delta nets beside attention), by its real layers: later turns are prefix
hits, on the device, from host memory and after a restart from disk, and the tokens are those of a cold run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from family_models import FamilyCase
from quire import LLM, SamplingParams

pytest.importorskip("transformers")
USUAL = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "threads": 1, "max_num_seqs": 4}
TURN = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> FamilyCase:
    made = FamilyCase("qwen3_next", tmp_path_factory.mktemp("qwen3_next"))
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
