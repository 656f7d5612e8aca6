from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.runtime.sampling.choice import row_failures
from quire.runtime.sampling.sampler import asks_for_more
from quire.runtime.sampling.transforms.logit_bias import LogitBias
from quire.types.errors import InvalidRequest
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Masks, NewRow
from tests.unit.runtime.sampling.bench import CPU, Bench, new_row
from tests.unit.runtime.sampling.naive import acceptable_tokens

DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda"),
        marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
    ),
]
VOCAB = 200

# Every parameter that matters to the sampler, alone and together.
MENU: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_k": 20, "top_p": 0.5, "temperature": 1.3},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_p": 0.9, "temperature": 2.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 0.9},
    {"logit_bias": {3: 4.0, 5: -4.0}, "top_p": 0.95},
    {"allowed_token_ids": [2, 4, 6, 8, 70], "top_k": 3},
    {"temperature": 0.0, "allowed_token_ids": [9, 199]},
    {"temperature": 0.5, "min_tokens": 12, "rules": TokenRules(end_ids=(1, 2, 3))},
    {"rules": TokenRules(bad_words=((4,), (1, 2, 3), (9, 9)))},
    {"temperature": 0.0, "rules": TokenRules(bad_words=((7,), (8, 8)), end_ids=(0,)), "min_tokens": 2},
]


def random_logits(lines: int, seed: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(lines, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def menu_rows(seed: int = 11) -> list[NewRow]:
    rng = np.random.default_rng(seed)
    return [
        new_row(
            row,
            prompt=rng.integers(0, 10, 4).tolist(),
            output=rng.integers(0, 10, 5).tolist(),
            seed=100 + row,
            sample_index=row % 3,
            **params,
        )
        for row, params in enumerate(MENU)
    ]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), order=st.permutations(range(len(MENU))))
def test_a_mixed_batch_draws_what_the_plain_definition_draws_for_each_row(seed: int, order: list[int]) -> None:
    news, logits = menu_rows(seed), random_logits(len(MENU), seed)
    bench = Bench(VOCAB)
    for new in news:
        bench.add(new)
    for row, token in zip(order, bench.tokens(logits[order], order), strict=True):
        assert token in acceptable_tokens(logits[row].tolist(), news[row]), MENU[row]


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_draws_the_same_tokens_alone_and_in_any_company(device: torch.device) -> None:
    steps, news = 12, menu_rows()
    logits = [random_logits(len(news), 1_000 + step) for step in range(steps)]

    together = Bench(VOCAB, device=device)
    for new in news:
        together.add(new)
    rows = list(range(len(news)))
    expected = torch.tensor([together.tokens(logits[step], rows) for step in range(steps)])  # [steps, rows]

    for row, new in enumerate(news):
        alone = Bench(VOCAB, num_rows=1, device=device)
        alone.add(
            NewRow(0, new.token_ids, new.num_prompt_tokens, (), new.sampling, new.rules, new.sample_index, new.seed)
        )
        assert [alone.tokens(line[row : row + 1], [0])[0] for line in logits] == expected[:, row].tolist()

    shuffled, rng = Bench(VOCAB, device=device), np.random.default_rng(3)
    places = rng.permutation(len(news)).tolist()  # other rows ...
    for new in news:
        moved = places[new.row]
        shuffled.add(
            NewRow(moved, new.token_ids, new.num_prompt_tokens, (), new.sampling, new.rules, new.sample_index, new.seed)
        )
    for step in range(steps):
        order = rng.permutation(len(news)).tolist()  # ... in another order each step
        tokens = shuffled.tokens(logits[step][order], [places[row] for row in order])
        assert tokens == expected[step, order].tolist()


def test_a_preempted_row_goes_on_with_the_tokens_it_would_have_drawn() -> None:
    logits = [random_logits(1, step) for step in range(10)]
    through = Bench(VOCAB)
    through.add(new_row(0, prompt=[5, 6], seed=9, presence_penalty=1.0))
    tokens = [through.tokens(line, [0])[0] for line in logits]

    again = Bench(VOCAB)
    again.add(new_row(3, prompt=[5, 6], output=tokens[:4], seed=9, presence_penalty=1.0))
    assert [again.tokens(line, [3])[0] for line in logits[4:]] == tokens[4:]


def test_seeded_draws_follow_the_distribution() -> None:
    vocab, count = 32, 256
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5))
    for params in ({}, {"top_k": 12}, {"top_p": 0.7}, {"temperature": 0.6}):
        bench = Bench(vocab, num_rows=count)
        for row in range(count):
            bench.add(new_row(row, seed=row, **params))
        found = torch.zeros(vocab)
        for _ in range(20):
            tokens = bench.tokens(logits.expand(count, -1), range(count))
            found += torch.bincount(torch.tensor(tokens), minlength=vocab)
        scores = logits.double() / params.get("temperature", 1.0)
        order = scores.argsort(descending=True)
        if "top_k" in params:
            scores[order[12:]] = -math.inf
        if "top_p" in params:
            mass = scores.softmax(dim=-1)[order].cumsum(dim=-1)
            scores[order[1 + int((mass < 0.7).sum()) :]] = -math.inf
        expected = scores.softmax(dim=-1) * found.sum()
        assert not found[expected == 0].any()
        likely = expected > 0
        statistic = ((found - expected)[likely] ** 2 / expected[likely]).sum()
        degrees = int(likely.sum()) - 1
        assert statistic < degrees + 5 * (2 * degrees) ** 0.5, params


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_half_precision_logits_are_sampled_as_their_float32_values(dtype: torch.dtype, device: torch.device) -> None:
    logits = random_logits(len(MENU), 2).to(dtype)
    tokens = []
    for given_logits in (logits, logits.float()):
        bench = Bench(VOCAB, device=device)
        for new in menu_rows():
            bench.add(new)
        tokens.append(bench.tokens(given_logits, range(len(MENU))))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_logits_that_are_no_numbers_fail_their_own_row_alone(poison: float, device: torch.device) -> None:
    logits = random_logits(len(MENU), 2)
    healthy = Bench(VOCAB, device=device)
    for new in menu_rows():
        healthy.add(new)
    rows = list(range(len(MENU)))
    expected = healthy.tokens(logits, rows)
    for row in (0, 1, 3, 4, 6, 7, 11):
        bad = logits.clone()
        bad[row, 4] = poison  # token 4 is allowed in every row
        fresh = Bench(VOCAB, device=device)
        for new in menu_rows():
            fresh.add(new)
        tokens = np.array(fresh.tokens(bad, rows), dtype=np.int32)
        failures = row_failures(np.array(rows, dtype=np.int32), tokens)
        assert [failure.row for failure in failures] == [row]
        assert "NaN" in failures[0].reason
        assert [t for i, t in enumerate(tokens) if i != row] == [t for i, t in enumerate(expected) if i != row]


def test_a_row_that_may_choose_nothing_fails_with_the_reason() -> None:
    bench = Bench(VOCAB)
    for row, params in enumerate(({"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.5})):
        bench.add(new_row(row, allowed_token_ids=[5], rules=TokenRules(bad_words=((5,),)), **params))
    bench.add(new_row(4, temperature=0.0))
    rows = np.arange(5, dtype=np.int32)
    tokens = np.array(bench.tokens(random_logits(5, 0), range(5)), dtype=np.int32)
    failures = row_failures(rows, tokens)
    assert [failure.row for failure in failures] == [0, 1, 2, 3]
    assert all("allowed_token_ids" in failure.reason for failure in failures)
    assert row_failures(rows[4:], tokens[4:]) == ()


def test_end_of_text_comes_only_after_min_tokens() -> None:
    bench = Bench(VOCAB)
    bench.add(new_row(0, temperature=0.0, min_tokens=3, rules=TokenRules(end_ids=(7, 9))))
    logits = random_logits(1, 0)
    logits[0, 7], logits[0, 9] = 100.0, 99.0
    tokens = [bench.tokens(logits, [0])[0] for _ in range(5)]
    assert not {7, 9} & set(tokens[:3])
    assert tokens[3:] == [7, 7]


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("allowed_token_ids", {"allowed_token_ids": [1, VOCAB]}),
        ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
        ("stop_token_ids", {"stop_token_ids": [VOCAB]}),
        ("bad_words", {"rules": TokenRules(bad_words=((1, VOCAB),))}),
        ("bad_words", {"rules": TokenRules(bad_words=((),))}),
    ],
)
def test_a_row_that_names_no_token_of_the_model_is_refused_and_leaves_no_trace(
    field: str, params: dict[str, Any]
) -> None:
    bench = Bench(VOCAB)
    with pytest.raises(InvalidRequest, match=field):
        bench.add(new_row(2, temperature=0.7, repetition_penalty=1.2, logprobs=2, top_p=0.5, **params))
    bench.sampler.check()
    bench.add(new_row(2, temperature=0.0))
    logits = random_logits(1, 4)
    assert bench.tokens(logits, [2]) == logits.argmax(dim=-1).tolist()


def test_a_released_row_leaves_nothing_to_the_next_one_in_its_place() -> None:
    bench, logits = Bench(VOCAB), random_logits(len(MENU), 6)
    for new in menu_rows():
        bench.add(new)
    bench.tokens(logits, range(len(MENU)))
    for row in range(len(MENU)):
        bench.sampler.remove(row)
        bench.sampler.remove(row)
    for row in range(len(MENU)):
        bench.add(new_row(row, temperature=0.0))
    assert bench.tokens(logits, range(len(MENU))) == logits.argmax(dim=-1).tolist()


def test_a_batch_of_no_rows_has_no_tokens() -> None:
    sampled = Bench(VOCAB).sample(torch.empty(0, VOCAB), [])
    assert (sampled.token_ids.tolist(), sampled.report.logprobs.tensors) == ([], ())


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_takes_the_lowest_id_of_equal_logits_on_every_device(device: torch.device) -> None:
    logits = random_logits(8, 3, vocab=5_000).round()
    expected = [line.index(max(line)) for line in logits.tolist()]
    assert Bench(5_000, device=device).tokens(logits, range(8)) == expected


def test_a_row_nobody_added_is_greedy() -> None:
    logits = random_logits(2, 8)
    assert Bench(VOCAB).tokens(logits, [4, 1]) == logits.argmax(dim=-1).tolist()


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device(request: pytest.FixtureRequest) -> None:
    device = torch.device("cuda")
    bench, logits = Bench(VOCAB, device=device), random_logits(len(MENU), 6).to(device)
    for new in menu_rows():
        bench.add(new)
    bits = np.full((1, -(-VOCAB // 32)), 2**32 - 1, dtype=np.uint32)
    masks = Masks(np.array([2], dtype=np.int32), bits)
    batches = [bench.samples(rows, masks=masks) for rows in (range(len(MENU)), range(len(MENU))[::-1], range(4))]
    bench.sampler.sample(logits.clone(), batches[0], bench.history)
    request.getfixturevalue("no_waiting")
    bench.sampler.remove(0)
    bench.sampler.add(new_row(0, logprobs=2, **MENU[-1])._replace(num_candidates=3))
    bench.sampler.sample(logits.clone(), batches[1], bench.history)
    sampled = bench.sampler.sample(logits[:4].clone(), batches[2], bench.history)  # a wait would have raised
    assert sampled.token_ids.shape == (4,)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_both_devices_draw_the_same_tokens_but_for_rounding() -> None:
    logits = random_logits(len(MENU), 6)
    tokens = []
    for device in (CPU, torch.device("cuda")):
        bench = Bench(VOCAB, device=device)
        for new in menu_rows():
            bench.add(new)
        tokens.append([bench.tokens(logits, range(len(MENU))) for _ in range(20)])
    assert tokens[0] == tokens[1]


# What makes a row ask for more than a choice; `bad_words` reaches the sampler as token rules.
MORE: dict[str, Any] = {
    "allowed_token_ids": [3],
    "min_tokens": 1,
    "logit_bias": {3: 1.0},
    "repetition_penalty": 1.1,
    "presence_penalty": -0.1,
    "frequency_penalty": 0.1,
    "stop_token_ids": [3],
    "extra": {"typical_p": 0.5},
    "logprobs": 0,
    "logprob_token_ids": [3],
}
CHOICE = {"temperature", "top_p", "top_k", "min_p", "seed"}
OF_OTHERS = {  # parameters that the sampler never looks at
    "n", "stop", "bad_words", "ignore_eos", "max_tokens", "detokenize", "skip_special_tokens", "best_of", "rank_by",
    "spaces_between_special_tokens", "include_stop_str_in_output", "repetition_detection", "structured_outputs",
    "output_kind", "prompt_logprobs", "prompt_logprobs_start",
}  # fmt: skip


def test_rows_that_use_a_transform_or_a_report_are_told_from_those_that_only_choose() -> None:
    assert {each.name for each in fields(SamplingParams)} == MORE.keys() | CHOICE | OF_OTHERS
    for name, value in MORE.items():
        assert asks_for_more(new_row(**{name: value})), name
    assert asks_for_more(new_row(rules=TokenRules(bad_words=((1, 2),))))
    assert asks_for_more(new_row()._replace(num_candidates=1))
    assert not asks_for_more(new_row(temperature=0.5, top_p=0.5, top_k=4, min_p=0.1, rules=TokenRules(end_ids=(2,))))


def test_a_row_that_only_chooses_keeps_nothing_of_the_row_before_it() -> None:
    bench, logits = Bench(VOCAB), torch.zeros(1, VOCAB)
    logits[0, 9] = 1.0
    bench.add(new_row(0, temperature=0.0, logit_bias={5: 50.0}, logprobs=2))
    assert bench.tokens(logits, [0]) == [5]
    bench.sampler.remove(0)
    bench.add(new_row(0, temperature=0.0))
    bench.sampler.check()
    sampled = bench.sample(logits, [0])
    assert sampled.token_ids.tolist() == [9]
    assert bench.logprobs(sampled) == ()
    bench.sampler.remove(0)
    bench.sampler.remove(0)
    bench.sampler.check()


def test_a_transform_of_few_rows_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(LogitBias, "apply", lambda *_: used.append(torch.get_num_threads()))
    bench, before = Bench(VOCAB), torch.get_num_threads()
    bench.add(new_row(0, prompt=[1], logit_bias={3: 1.0}))
    try:
        torch.set_num_threads(2)
        bench.tokens(random_logits(1, 1), [0])
        assert used == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
