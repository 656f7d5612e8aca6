"""Every extra sampler does to a row what its definition does, whatever shares the batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor, TypicalLogitsWarper

from quire.runtime.sampling.rng import Streams
from quire.runtime.sampling.transforms import repeats
from quire.runtime.sampling.transforms.filters import DynamicTemperature, TopA, TopNSigma, TypicalP, Xtc
from quire.runtime.sampling.transforms.host_repeats import repetitions
from quire.runtime.sampling.transforms.repeats import Dry, NoRepeatNgram
from quire.runtime.sampling.transforms.transform import Transform
from quire.types.errors import InvalidRequest
from quire.types.extra_samplers import ExtraSamplers
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import NewRow
from tests.unit.runtime.sampling import naive_extra
from tests.unit.runtime.sampling.bench import CPU, Bench, new_row, transform_rows

VOCAB, ROWS, BREAKERS = 70, 8, (4,)
Definition = Callable[[list[float], NewRow, ExtraSamplers], list[float]]


def context(new: NewRow) -> list[int]:
    return [int(token) for token in new.token_ids]


def _xtc(scores: list[float], new: NewRow, extra: ExtraSamplers) -> list[float]:
    streams = Streams(1, CPU)
    streams.put(0, new.seed ^ 0x5854_4300, new.sample_index)
    outputs = torch.tensor([len(new.token_ids) - new.num_prompt_tokens])
    return naive_extra.xtc(scores, extra, float(streams.uniform(torch.tensor([0]), outputs)))


def _dynatemp(scores: list[float], new: NewRow, extra: ExtraSamplers) -> list[float]:
    temperature = new.sampling.temperature
    return [x * temperature / naive_extra.dynamic_temperature(scores, temperature, extra) for x in scores]


CASES: dict[str, tuple[Callable[[], Transform], Definition, dict[str, list[Any]]]] = {
    "dry": (
        lambda: Dry(ROWS, VOCAB, CPU),
        lambda scores, new, extra: naive_extra.dry(scores, context(new), extra, BREAKERS),
        {"dry_multiplier": [0.8, 2.0, 0.0], "dry_base": [1.0, 1.75], "dry_allowed_length": [1, 2, 4],
         "dry_penalty_last_n": [-1, 0, 1, 5, 100]},
    ),
    "ngram": (
        lambda: NoRepeatNgram(ROWS, CPU),
        lambda scores, new, extra: naive_extra.no_repeats(scores, context(new), extra.no_repeat_ngram_size),
        {"no_repeat_ngram_size": [0, 1, 2, 3, 9]},
    ),
    "top_n_sigma": (
        lambda: TopNSigma(ROWS, CPU),
        lambda scores, _, extra: naive_extra.top_n_sigma(scores, extra.top_n_sigma),
        {"top_n_sigma": [-1, 0.5, 1.0, 3]},
    ),
    "top_a": (
        lambda: TopA(ROWS, CPU),
        lambda scores, _, extra: naive_extra.top_a(scores, extra.top_a),
        {"top_a": [0.0, 0.01, 0.3, 1.0]},
    ),
    "typical_p": (
        lambda: TypicalP(ROWS, CPU),
        lambda scores, _, extra: naive_extra.typical(scores, extra.typical_p),
        {"typical_p": [0.01, 0.4, 0.9, 1.0]},
    ),
    "xtc": (
        lambda: Xtc(ROWS, CPU),
        _xtc,
        {"xtc_probability": [0.5, 1.0, 0.0], "xtc_threshold": [0.0, 0.01, 0.1, 0.5, 0.7]},
    ),
    "dynatemp": (
        lambda: DynamicTemperature(ROWS, CPU),
        _dynatemp,
        {"dynatemp_range": [0.0, 0.3, 5.0], "dynatemp_exponent": [0.0, 0.5, 1.0, 2.0]},
    ),
}  # fmt: skip


def logits_of(rng: random.Random, rows: int) -> Tensor:
    made = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rng.randrange(2**31))) * rng.choice((1, 4))
    made[torch.rand(made.shape, generator=torch.Generator().manual_seed(1)) < 0.1] = float("-inf")
    return made


@pytest.mark.parametrize(("name", "on_host"), [*((name, True) for name in CASES), ("dry", False), ("ngram", False)])
def test_a_sampler_does_to_every_row_what_its_definition_does(
    name: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "is_on_host", lambda _: on_host)
    make, definition, choices = CASES[name]
    rng = random.Random(name)
    for _ in range(60):
        news = []
        for row in rng.sample(range(ROWS), rng.randint(1, ROWS)):
            extra = {field: rng.choice(values) for field, values in choices.items()} if rng.random() < 0.8 else {}
            few, length = rng.choice((2, 3, 6)), rng.choice((0, 1, 3, 12, 30))
            output = [rng.randrange(few) for _ in range(length)]
            news.append(
                new_row(row, prompt=[rng.randrange(few)], output=output, seed=rng.randrange(99), temperature=0.7,
                        rules=TokenRules(dry_breakers=BREAKERS), extra=extra)
            )  # fmt: skip
        logits = logits_of(rng, len(news))
        changed = transform_rows(make(), logits, news)
        for line, new in enumerate(news):
            extra = new.sampling.samplers
            scores = logits[line].tolist()
            expected = scores if extra is None else definition(scores, new, extra)
            torch.testing.assert_close(changed[line], torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_long_contexts_are_searched_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    news = [
        new_row(row, prompt=[rng.randrange(3) for _ in range(20 + row)], extra={"dry_multiplier": 1.0})
        for row in range(ROWS)
    ]
    logits = logits_of(rng, ROWS)
    whole = transform_rows(Dry(ROWS, VOCAB, CPU), logits, news)
    monkeypatch.setattr(repeats, "is_on_host", lambda _: False)
    torch.testing.assert_close(transform_rows(Dry(ROWS, VOCAB, CPU), logits, news), whole)
    monkeypatch.setattr(repeats, "_AT_ONCE", 50)
    torch.testing.assert_close(transform_rows(Dry(ROWS, VOCAB, CPU), logits, news), whole)


def test_both_ways_to_find_repetitions_find_the_same() -> None:
    generator = torch.Generator().manual_seed(2)
    for width in (2, 3, 9, 40, 400):
        tokens = torch.randint(-2, 2, (6, width), generator=generator)
        tokens[0], tokens[1, width // 8 :] = 1, 1
        tokens[2, : width // 2] = torch.randint(90, (width // 2,), generator=generator)
        for most in {1, min(2, width - 1), min(128, width - 1)}:
            found = repeats.repeated(tokens, most)
            assert found[0].tolist() == [min(place + 1, most) for place in range(width - 1)]
            for line, lengths in zip(tokens, found, strict=True):
                by_places = torch.zeros(width - 1, dtype=torch.long)
                places, counts = repetitions(line.int().numpy(), most, breakers=(-1, -2))
                by_places[places] = torch.from_numpy(counts).long()
                assert torch.equal(by_places, lengths)
    assert [len(each) for each in repetitions(np.array([1, 1], dtype=np.int32), 0)] == [0, 0]


def test_no_repeat_ngram_size_bans_nothing_where_no_other_token_is_left() -> None:
    news = [new_row(row, prompt=[1, 2, 1], extra={"no_repeat_ngram_size": 2}) for row in range(2)]
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[:, 2] = 3.0
    logits[1, 5] = 1.0
    changed = transform_rows(NoRepeatNgram(ROWS, CPU), logits, news)
    assert torch.equal(changed[0], logits[0])
    assert changed[1].isfinite().nonzero().flatten().tolist() == [5]


def test_typical_p_and_no_repeat_ngram_size_are_those_of_transformers() -> None:
    rng, logits = random.Random(5), torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    prompts = [[rng.randrange(3) for _ in range(12)] for _ in range(4)]
    rows = [new_row(row, prompt=prompt, extra={"typical_p": 0.6}) for row, prompt in enumerate(prompts)]
    theirs = TypicalLogitsWarper(mass=0.6)(torch.tensor(prompts), logits.clone())
    assert torch.equal(transform_rows(TypicalP(ROWS, CPU), logits, rows), theirs)
    for size in (1, 2, 3):
        rows = [new_row(row, prompt=p, extra={"no_repeat_ngram_size": size}) for row, p in enumerate(prompts)]
        theirs = NoRepeatNGramLogitsProcessor(size)(torch.tensor(prompts), logits.clone())
        assert torch.equal(transform_rows(NoRepeatNgram(ROWS, CPU), logits, rows), theirs)


ALL = {
    "typical_p": 0.95, "top_a": 0.01, "top_n_sigma": 3.0, "xtc_probability": 0.5, "xtc_threshold": 0.05,
    "dynatemp_range": 0.4, "dry_multiplier": 0.8, "no_repeat_ngram_size": 3,
}  # fmt: skip


def test_a_rows_tokens_do_not_depend_on_what_shares_its_batch() -> None:
    logits = torch.randn(20, 4, VOCAB, generator=torch.Generator().manual_seed(7)) * 2
    asked = [
        {"extra": ALL, "temperature": 0.8},
        {"top_k": 5},
        {"extra": {"dry_multiplier": 1.0}, "temperature": 0.0},
        {},
    ]
    together, alone = Bench(VOCAB, num_rows=4), [Bench(VOCAB, num_rows=4) for _ in asked]
    for row, params in enumerate(asked):
        for bench in (together, alone[row]):
            bench.add(new_row(row, prompt=[1, 2, 3], seed=row, **params))
    for step in logits:
        tokens = together.tokens(step, range(4))
        assert tokens == [bench.tokens(step[row : row + 1], [row])[0] for row, bench in enumerate(alone)]


def test_each_token_of_a_draft_is_sampled_as_in_plain_decoding() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(8)) * 2
    plain, verifying = Bench(VOCAB, num_rows=1), Bench(VOCAB, num_rows=1)
    for bench in (plain, verifying):
        bench.add(new_row(0, prompt=[1, 2, 1, 2, 1], seed=3, extra=ALL))
    expected = [plain.tokens(logits[place : place + 1], [0])[0] for place in range(3)]
    verifying.history.tokens[0, 5:7] = torch.tensor(expected[:2], dtype=torch.int32)
    samples = verifying.samples([0, 0, 0], [5, 6, 7])
    sampled = verifying.sampler.sample(logits.clone(), samples, verifying.history)
    assert sampled.token_ids.tolist() == expected


def test_rows_without_extra_samplers_cost_nothing_and_others_need_logits() -> None:
    bench = Bench(VOCAB, num_rows=2)
    bench.add(new_row(0, prompt=[1]))
    bench.add(new_row(1, prompt=[1], extra=ALL))
    assert bench.sampler.only_chooses(np.array([0]))
    assert not bench.sampler.only_chooses(np.array([0, 1]))
    bench.sampler.remove(1)
    bench.sampler.check()


def test_greedy_rows_keep_their_best_token() -> None:
    bench, logits = Bench(VOCAB), torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(9))
    bench.add(new_row(0, prompt=[1], temperature=0.0, extra={"typical_p": 0.01, "xtc_probability": 1.0}))
    assert bench.tokens(logits, [0]) == [int(logits.argmax())]


# ------------------------------------------------------------------------------------------------------ parameters
def test_extra_samplers_are_taken_by_their_own_names_too() -> None:
    assert SamplingParams(typical_p=0.5) == SamplingParams(extra={"typical_p": 0.5})  # type: ignore[call-arg]
    assert SamplingParams(extra={"typical_p": 1.0, "top_n_sigma": -1}).extra is None
    assert SamplingParams(extra=ExtraSamplers(top_a=0.1)).samplers == ExtraSamplers(top_a=0.1)
    assert SamplingParams.trusted(**SamplingParams(extra={"top_a": 0.1}).changed_fields()).extra == ExtraSamplers(
        top_a=0.1
    )


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"typical_p": 0.0}, "typical_p"),
        ({"extra": {"xtc_probability": 2}}, "xtc_probability"),
        ({"extra": {"tfs": 2}}, "extra.tfs"),
        ({"extra": 5}, "extra"),
        ({"dry_sequence_breakers": "ab"}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"top_a": 0.1, "extra": {"typical_p": 0.5}}, "top_a"),
        ({"mirostat": 2}, "mirostat"),
    ],
)
def test_an_impossible_value_is_refused_by_its_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**given)
    assert error.value.field == field


def test_a_name_that_is_no_text_is_an_unknown_sampler() -> None:
    with pytest.raises(InvalidRequest, match=r"extra.None: is not known"):
        SamplingParams(extra={None: 1.0})  # type: ignore[dict-item]
