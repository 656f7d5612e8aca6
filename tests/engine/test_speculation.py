"""Speculation over real tiny models: whatever is guessed, the answers are those of plain decoding."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from eagle_heads import head_config, random_head
from quire.config.model import Heads, ModelConfig
from quire.engine.speculation.draft_length import DraftLength
from quire.types.request import Abort
from tiny_models import MemoryCheckpoint, random_checkpoint, tiny_config
from worker_executor import TinyEngine, similar_checkpoint

VOCAB = 97
CONFIG = tiny_config()
TARGET = random_checkpoint(CONFIG)
SIMILAR = similar_checkpoint(TARGET, 0.1)
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}
SELF: dict[str, Any] = {"method": "self_draft", "num_layers": 2, "num_speculative_tokens": 3}
DRAFT: dict[str, Any] = {"method": "draft_model", "model": "similar", "num_speculative_tokens": 4}
EAGLE: dict[str, Any] = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
HEAD = random_head(head_config(CONFIG, (0, 1, 2), drafted=60))  # is right by chance
METHODS = pytest.mark.parametrize("method", [NGRAM, SELF, DRAFT, EAGLE], ids=lambda method: method["method"])


pytestmark = pytest.mark.usefixtures("one_thread")


def engine(method: dict[str, Any] | None, *, always: bool = True, **settings: Any) -> TinyEngine:
    """`always`: drafts are as long as they may be, whatever they cost."""
    drafts = {} if method is None else {"draft_model": SIMILAR, "eagle3": HEAD}
    draft = settings.pop("draft", drafts.get("" if method is None else method["method"]))
    made = TinyEngine(settings.pop("target", TARGET), method, draft=draft, **settings)
    if method is not None and always:
        made.proposers.lengths.length = lambda *given, **rest: DraftLength(given[1])  # type: ignore[attr-defined]
    return made


def prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    """Half of them say things twice, so that there is something to look up."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        words = [rng.randrange(VOCAB) for _ in range(rng.randint(2, longest))]
        made.append(words if number % 2 else words + words[: len(words) // 2 + 1])
    return made


def smaller(config: ModelConfig) -> ModelConfig:
    return tiny_config(num_layers=1, hidden_size=32, heads=Heads(2, 1, 16), vocab_size=config.vocab_size)


@METHODS
def test_greedy_answers_to_a_hundred_prompts_are_those_of_plain_decoding(method: dict[str, Any]) -> None:
    asked = prompts(100)
    speculative = engine(method, rows=32, num_blocks=512)
    wanted = engine(None, rows=32, num_blocks=512).answers(asked, max_tokens=16)
    assert speculative.answers(asked, max_tokens=16) == wanted
    stats = speculative.core.stats()
    assert stats.drafted_tokens > 300
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.steps < stats.output_tokens
    speculative.executor.worker.check()


@METHODS
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"temperature": 1.2, "min_p": 0.05, "n": 3},
        {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 1.0, "logit_bias": {5: 3.0}, "min_tokens": 10, "allowed_token_ids": list(range(40))},
        {"temperature": 1.0, "extra": {"dry_multiplier": 0.8, "xtc_probability": 0.5, "typical_p": 0.9}},
    ],
    ids=["plain", "narrow", "samples", "penalties", "rules", "extra"],
)
def test_with_the_same_seed_the_very_same_tokens_are_sampled(method: dict[str, Any], sampling: dict[str, Any]) -> None:
    asked = prompts(4, 16, seed=1)
    wanted = engine(None).answers(asked, seed=7, end_ids=(3,), **sampling)
    speculative = engine(method)
    assert speculative.answers(asked, seed=7, end_ids=(3,), **sampling) == wanted
    assert speculative.core.stats().drafted_tokens > 0


@METHODS
@pytest.mark.parametrize(("block_size", "depth"), [(1, 1), (4, 2), (16, 2)])
def test_small_pools_chunked_prompts_and_steps_in_flight_change_nothing(
    method: dict[str, Any], block_size: int, depth: int
) -> None:
    asked = prompts(6, 16, seed=2)
    wanted = engine(None).answers(asked, n=2, temperature=1.0)
    speculative = engine(method, block_size=block_size, num_blocks=112 // block_size, rows=6, max_len=100, depth=depth)
    assert speculative.answers(asked, n=2, temperature=1.0) == wanted
    assert speculative.core.stats().preemptions > 0


@METHODS
def test_with_several_steps_in_flight_sequences_come_and_go_between_both_ways(method: dict[str, Any]) -> None:
    asked = prompts(12, 24, seed=3)
    wanted = engine(None, rows=12).answers(asked, max_tokens=80)
    for depth in (2, 3):
        assert engine(method, rows=12, depth=depth, always=False).answers(asked, max_tokens=80) == wanted


@METHODS
def test_what_is_streamed_is_what_is_answered_and_logprobs_go_with_it(method: dict[str, Any]) -> None:
    plain, speculative = engine(None), engine(method)
    for each in (plain, speculative):
        each.submit("a", prompts(1)[0], logprobs=2, prompt_logprobs=1, max_tokens=30)
        each.run()
    (wanted,), (found,) = plain.finished["a"].samples, speculative.finished["a"].samples
    assert found.token_ids == wanted.token_ids == tuple(speculative.streams[0])
    assert len(found.logprobs) == len(wanted.logprobs) == 30
    for left, right in zip(found.logprobs, wanted.logprobs, strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()
        np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-4)


def test_a_draft_model_with_the_targets_weights_is_always_right() -> None:
    """So its cache holds what it should: after forks, prefix hits, preemption, at any temperature."""
    asked = prompts(6, 24, seed=4)
    for temperature, num_blocks in ((0.0, 30), (1.0, 128)):
        wanted = engine(None).answers(asked, n=2, temperature=temperature, seed=3)
        speculative = engine(DRAFT, draft=TARGET, block_size=4, num_blocks=num_blocks, rows=6, max_len=100)
        for _ in range(2):  # the second time a large pool has the prompts in the prefix cache
            assert speculative.answers(asked, n=2, temperature=temperature, seed=3) == wanted
        stats = speculative.core.stats()
        assert stats.preemptions > 0 if num_blocks == 30 else stats.prefix_hits > 0
        assert stats.accepted_tokens == stats.drafted_tokens > 0


def test_a_self_draft_whose_left_out_layers_do_nothing_is_always_right() -> None:
    tensors = dict(TARGET.tensors)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.2.{name}.weight"] = torch.zeros_like(tensors[f"model.layers.2.{name}.weight"])
    target = MemoryCheckpoint(CONFIG, tensors)
    asked = prompts(8, 24, seed=5)
    speculative = engine(SELF, target=target, block_size=4, num_blocks=96, rows=6)
    wanted = engine(None, target=target).answers(asked, n=2, temperature=1.0, seed=3)
    assert speculative.answers(asked, n=2, temperature=1.0, seed=3) == wanted
    stats = speculative.core.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 0


def test_a_draft_model_may_have_another_shape() -> None:
    draft = random_checkpoint(smaller(CONFIG), seed=9)
    asked = prompts(6, 20, seed=6)
    speculative = engine(DRAFT, draft=draft, block_size=4)
    assert speculative.answers(asked) == engine(None).answers(asked)
    assert speculative.core.stats().drafted_tokens > 0


@METHODS
def test_requests_that_end_early_leave_nothing_behind(method: dict[str, Any]) -> None:
    made = engine(method, rows=6, num_blocks=64)
    for number, prompt in enumerate(prompts(6, 20, seed=7)):
        made.submit(f"r{number}", prompt, max_tokens=40, temperature=1.0)
    for _ in range(4):
        made.core.step()
    for number in range(0, 6, 2):
        made.core.abort(Abort(f"r{number}"))
    made.run()
    assert made.core.stats().blocks.used == 0
    made.executor.worker.check()


def test_sampling_agrees_with_plain_sampling_in_distribution() -> None:
    """Chi-square of two times 20,480 draws by other seeds; one in ten thousand true samples would be so far apart."""
    per_answer, samples, requests = 8, 256, 10

    def sample(made: TinyEngine, seed: int) -> list[Counter[int]]:
        asked = {"n": samples, "temperature": 1.0, "max_tokens": per_answer}
        firsts = [made.submit(f"r{number}", (5, 6, 7), seed=seed + number, **asked) for number in range(requests)]
        made.run(check=False)
        answers = [made.streams[first + index] for first in firsts for index in range(samples)]
        return [Counter(answer[place] for answer in answers) for place in range(per_answer)]

    settings: dict[str, Any] = {"rows": samples, "num_blocks": 1_024, "max_len": 32}
    speculative = engine(DRAFT, draft=similar_checkpoint(TARGET, 0.02), **settings)
    for left, right in zip(sample(speculative, 1_000), sample(engine(None, **settings), 2_000), strict=True):
        assert chi_square(left, right) < 4.0
    stats = speculative.core.stats()
    assert stats.accepted_tokens > 2_000
    assert stats.drafted_tokens - stats.accepted_tokens > 2_000


def chi_square(left: Counter[int], right: Counter[int]) -> float:
    """Of two samples of the same size, as standard deviations of a normal distribution (Wilson and Hilferty)."""
    rare = [token for token in left | right if left[token] + right[token] < 10]
    cells = [(left[token], right[token]) for token in left | right if token not in rare]
    cells.append((sum(left[token] for token in rare), sum(right[token] for token in rare)))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells if a + b)
    freedom = len(cells) - 1
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)
