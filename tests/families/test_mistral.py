"""Mistral, whose layers all have a window: a long sequence holds the memory of its window and no more, and the tokens
are those of transformers far behind it."""

from __future__ import annotations

from typing import Any

import pytest

from family_models import FamilyCase
from quire import LLM, SamplingParams
from quire.config.kv_cache import KVGroups
from quire.config.tiers import TierConfig
from tiny_models import DEVICE, greedy_reference
from worker_executor import TinyEngine

pytest.importorskip("transformers")
WINDOW, SIZE, CHUNK = 9, 4, 8
IN_WINDOW = -(-(WINDOW + CHUNK) // SIZE) + 1  # blocks that a sequence holds at most
LONG = 150
BACKENDS = ["reference", "gather", *(() if DEVICE == "cuda" else ("native",))]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> FamilyCase:
    return FamilyCase("mistral", tmp_path_factory.mktemp("mistral"), {"sliding_window": WINDOW})


@pytest.fixture(scope="module")
def expected(case: FamilyCase) -> list[int]:
    """What transformers says to `case.prompt(LONG)`."""
    return greedy_reference(case.model, case.prompt(LONG), 60)[0]


def engine(case: FamilyCase, num_blocks: int, **settings: Any) -> TinyEngine:
    made = TinyEngine(case.checkpoint(), block_size=SIZE, num_blocks=num_blocks, budget=CHUNK, **settings)  # type: ignore[arg-type]
    assert made.config.cache.groups == KVGroups(WINDOW)
    return made


@pytest.mark.parametrize("attention", BACKENDS)
def test_a_sequence_longer_than_memory_runs_in_the_memory_of_its_window(
    case: FamilyCase, expected: list[int], attention: str
) -> None:
    made, held = engine(case, IN_WINDOW, attention=attention), []
    made.submit("long", case.prompt(LONG), max_tokens=len(expected))
    while made.core.has_work:
        made.finished |= {message.request_id: message for message in made.core.step().finished}
        made.core.check()
        held.append(made.core.stats().blocks.used)
    assert list(made.finished["long"].samples[0].token_ids) == expected
    assert 0 < max(held) <= IN_WINDOW
    assert (LONG + len(expected)) // SIZE > 8 * IN_WINDOW
    assert made.core.stats().preemptions == 0


def test_a_window_that_has_moved_on_is_found_while_memory_lasts(case: FamilyCase, expected: list[int]) -> None:
    made, prompt = engine(case, 100), case.prompt(LONG)
    assert made.answers([prompt], max_tokens=len(expected)) == [[expected]]
    other = [*prompt[:100], *case.prompt(20, 1)]  # its last window is far behind
    answer, _ = greedy_reference(case.model, other, 20)
    before = made.core.stats().prompt_tokens
    assert made.answers([other], max_tokens=20) == [[answer]]
    assert made.core.stats().prompt_tokens - before == 20


def test_a_conversation_goes_on_where_nothing_but_its_window_is_left(case: FamilyCase, expected: list[int]) -> None:
    made, prompt = engine(case, 2 * IN_WINDOW), case.prompt(LONG)
    assert made.answers([prompt], max_tokens=len(expected)) == [[expected]]
    turn = [*prompt, *expected, *case.prompt(5, 2)]
    answer, _ = greedy_reference(case.model, turn, 20)
    assert made.answers([turn], max_tokens=20) == [[answer]]
    assert made.core.stats().prefix_hits >= len(turn) - 5 - SIZE


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_sequences_that_do_not_fit_together_are_recomputed_or_swapped(case: FamilyCase, host_blocks: int) -> None:
    made = engine(case, 11, tiers=TierConfig(host_blocks=host_blocks))
    prompts = [case.prompt(3, seed) for seed in range(8)]
    wanted = [[greedy_reference(case.model, prompt, 50)[0]] for prompt in prompts]
    assert made.answers(prompts, max_tokens=50) == wanted
    stats = made.core.stats()
    assert stats.preemptions > 0
    assert (stats.tiers.saved > 0) == (host_blocks > 0)


def test_samples_of_one_prompt_share_its_window_and_leave_it(case: FamilyCase, expected: list[int]) -> None:
    made = engine(case, 3 * IN_WINDOW)
    assert made.answers([case.prompt(LONG)], n=3, max_tokens=len(expected)) == [[expected] * 3]
    apart = {"n": 3, "temperature": 0.8, "seed": 7, "max_tokens": 40}
    several = made.answers([case.prompt(31)], **apart)
    assert several == engine(case, 100).answers([case.prompt(31)], **apart)


def test_a_small_cache_serves_the_whole_length_of_the_model(case: FamilyCase, expected: list[int]) -> None:
    assert case.model is not None  # its files are there
    settings: dict[str, Any] = {"block_size": SIZE, "num_kv_blocks": 2 * IN_WINDOW, "max_num_batched_tokens": CHUNK}
    usual = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "threads": 1, "max_num_seqs": 4}
    with LLM(case.directory, **usual, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=len(expected), ignore_eos=True, detokenize=False)
        found = llm.generate([case.prompt(LONG)] * 3, params, use_tqdm=False)
        assert [list(each.outputs[0].token_ids) for each in found] == [expected] * 3
