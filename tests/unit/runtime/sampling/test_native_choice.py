"""Tokens chosen by the compiled kernels, against torch's choice."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernel_threads import kernel_threads
from quire.kernels.native.loader import why_not_native
from quire.kernels.native.ops import multiply
from quire.kernels.native.panels import cut_panels
from quire.kernels.native.weights import LinearWeights
from quire.runtime.sampling.choice import NOT_FINITE
from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.make import make_sampler
from quire.runtime.sampling.samples import Samples
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Masks, NewRow

CPU = torch.device("cpu")
REFUSAL = why_not_native(torch.float32, CPU)
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def new_row(row: int, asked: dict[str, Any]) -> NewRow:
    tokens = np.array([row + 1, 7], dtype=np.int32)
    return NewRow(row, tokens, 1 + row % 2, (), SamplingParams(**asked), TokenRules(), sample_index=row % 3, seed=row)


def choose(kernels: Any, logits: Tensor, asked: list[dict[str, Any]], masks: Masks | None = None) -> list[int]:
    """A token for each row: sample i is of the last row but i."""
    count = len(asked)
    sampler = make_sampler(count, logits.shape[1], CPU, kernels)
    for row in range(count):
        sampler.add(new_row(row, asked[row]))
    rows = np.arange(count, dtype=np.int32)[::-1].copy()
    lengths = 2 + np.arange(count, dtype=np.int64) % 5
    tokens = torch.tensor([[row + 1, 7, 3, 4, 5, 6, 8] for row in range(count)], dtype=torch.int32)
    history = TokenHistory(tokens, torch.full((count,), 7), 1 + torch.arange(count) % 2)
    samples = Samples(rows, lengths, torch.from_numpy(lengths), np.arange(count), masks)
    sampled = sampler.sample(logits.clone(), samples, history)
    sampler.check()
    return sampled.token_ids.tolist()


def logits_of(tokens: list[int], logits: Tensor) -> Tensor:  # [samples]
    return logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def every_way(vocab_size: int) -> list[dict[str, Any]]:
    """Parameters of rows, all combinations; the greedy ones among them."""
    counts = [0, 1, 2, 40, 129, vocab_size - 1, vocab_size, vocab_size + 5]
    ways = product([0.0, 0.4, 1.0, 1.7, 1e-30], [0.0, 0.02, 1.0], [k for k in counts if k >= 0], [1.0, 0.95, 0.5, 1e-9])
    return [{"temperature": t, "min_p": m, "top_k": k, "top_p": p} for t, m, k, p in ways]


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 150, 1000, 4096, 20_011])
@pytest.mark.parametrize("spread", [0.02, 1.0, 6.0])
def test_it_chooses_what_torch_chooses_with_all_parameters(vocab_size: int, spread: float) -> None:
    asked = every_way(vocab_size)
    logits = torch.randn(len(asked), vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread
    native, by_torch = (logits_of(choose(kernels, logits, asked), logits) for kernels in ("native", "torch"))
    # where torch's exponential is not that of its vector units, it may rank two tokens otherwise that are all but equal
    torch.testing.assert_close(native, by_torch, rtol=0.0, atol=1e-5)


def test_of_equal_logits_the_same_ones_are_drawn() -> None:
    asked = every_way(300)
    logits = torch.randint(-2, 3, (len(asked), 300), generator=torch.Generator().manual_seed(3)).float() / 2
    logits[::3] = 0.0
    logits[1::3] *= -0.0
    assert choose("native", logits, asked) == choose("torch", logits, asked)


def test_rows_without_a_finite_logit_are_marked_alike() -> None:
    asked = every_way(100)
    logits = torch.randn(len(asked), 100, generator=torch.Generator().manual_seed(4))
    logits[0::5] = float("-inf")
    logits[1::5, 17] = float("nan")
    logits[2::5, 99] = float("inf")
    logits[3::5, 5:] = float("-inf")
    tokens = choose("native", logits, asked)
    assert tokens == choose("torch", logits, asked)
    assert min(tokens) == -2


@pytest.mark.parametrize("words", [1, 5, 9])
def test_masks_ban_what_torch_bans(words: int) -> None:
    asked, random = every_way(150), np.random.default_rng(5)
    logits = torch.randn(len(asked), 150, generator=torch.Generator().manual_seed(5))
    logits[6, 140] = float("nan")  # banned by short masks alone
    places = np.arange(0, len(asked), 2, dtype=np.int32)
    bits = random.integers(0, 2**32, (len(places), words), dtype=np.uint32)
    bits[0], bits[1] = 0, 2**32 - 1
    masks = Masks(places, bits)
    assert choose("native", logits, asked, masks) == choose("torch", logits, asked, masks)


def test_penalties_come_before_the_choice() -> None:
    asked = [{**each, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}, "logprobs": 2} for each in every_way(150)]
    logits = torch.randn(len(asked), 150, generator=torch.Generator().manual_seed(6)) * 3
    assert choose("native", logits, asked) == choose("torch", logits, asked)


def test_tokens_do_not_depend_on_threads() -> None:
    asked, tokens = every_way(4096), []
    logits = torch.randn(len(asked), 4096, generator=torch.Generator().manual_seed(7)) * 2
    for threads in (1, 3):
        with kernel_threads(threads):
            tokens.append(choose("native", logits, asked))
    assert tokens[0] == tokens[1]


def choose_by_head(states: Tensor, head: LinearWeights, asked: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Tokens without a tensor of logits, and those from the logits."""
    count = len(asked)
    sampler = make_sampler(count, head.weight.outputs, CPU, "native")
    for row in range(count):
        sampler.add(new_row(row, asked[row]))
    lengths = 2 + np.arange(count, dtype=np.int64) % 5
    history = TokenHistory(
        torch.zeros(count, 7, dtype=torch.int32), torch.full((count,), 7), 1 + torch.arange(count) % 2
    )
    samples = Samples(np.arange(count, dtype=np.int32), lengths, torch.from_numpy(lengths), np.arange(count))
    assert not sampler.needs_logits(samples)
    alone = sampler.sample_by_head(states, head, samples, history).token_ids
    from_logits = sampler.sample(multiply(states, head.weight, head.bias), samples, history).token_ids
    return alone.tolist(), from_logits.tolist()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("vocab_size", [5, 1000, 40_001])
@pytest.mark.parametrize("has_bias", [False, True])
def test_by_the_head_it_chooses_what_it_chooses_from_logits(has_bias: bool, vocab_size: int, threads: int) -> None:
    weight = torch.randn(vocab_size, 32, generator=torch.Generator().manual_seed(vocab_size))
    head = LinearWeights(cut_panels(weight, torch.float32), weight[:, 3].contiguous() if has_bias else None)
    asked = every_way(vocab_size)[:: 17 if vocab_size > 1000 else 1]
    states = torch.randn(len(asked), 32, generator=torch.Generator().manual_seed(1))
    states[len(asked) // 2, 5] = torch.nan
    with kernel_threads(threads):
        alone, from_logits = choose_by_head(states, head, asked)
    assert alone == from_logits
    assert [token for token in alone if token < 0] == [NOT_FINITE]


def test_rows_that_ask_for_more_than_a_token_need_logits() -> None:
    sampler = make_sampler(4, 50, CPU, "native")
    for row, asked in enumerate(({}, {"logprobs": 1}, {"frequency_penalty": 0.5}, {"temperature": 0.7})):
        sampler.add(new_row(row, asked))
    for row, needs_logits in enumerate((False, True, True, False)):
        lengths = np.array([2])
        samples = Samples(np.array([row], dtype=np.int32), lengths, torch.from_numpy(lengths), np.arange(1))
        assert sampler.needs_logits(samples) == needs_logits
        bits = np.ones((1, 2), dtype=np.uint32)
        assert sampler.needs_logits(samples.under(Masks(np.array([0], dtype=np.int32), bits)))
    by_torch = make_sampler(4, 50, CPU, "torch")
    by_torch.add(new_row(0, {}))
    assert by_torch.needs_logits(
        Samples(np.array([0], dtype=np.int32), lengths, torch.from_numpy(lengths), np.arange(1))
    )


@pytest.mark.parametrize("place", [0, 40_000, 65_537])
def test_a_number_that_is_none_fails_a_row_of_a_large_vocabulary_wherever_it_is(place: int) -> None:
    logits = torch.randn(2, 65_538, generator=torch.Generator().manual_seed(5))
    logits[1, place] = 100.0
    with kernel_threads(2):
        assert choose("native", logits, [{"temperature": 0.0}] * 2)[1] == place
        logits[1, place] = torch.nan
        assert choose("native", logits, [{"temperature": 0.0}] * 2)[1] == NOT_FINITE
