from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.runtime.sampling.logprobs import Wanted, entries_of, list_logprobs
from quire.types.errors import InvalidRequest
from quire.types.step import TokenLogprobs
from tests.unit.runtime.sampling.bench import Bench, new_row

VOCAB = 150


def random_logits(lines: int, seed: int = 0) -> Tensor:
    return torch.randn(lines, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def assert_entry(entry: TokenLogprobs, logits: Tensor, token: int, count: int) -> None:
    expected = logits.double().log_softmax(dim=-1)
    assert entry.token_ids.dtype == np.int32
    assert entry.logprobs.dtype == np.float32
    assert entry.token_ids[0] == token
    best = torch.sort(expected, descending=True, stable=True).indices[:count]
    assert entry.token_ids[1:].tolist() == best.tolist()
    np.testing.assert_allclose(entry.logprobs, expected[torch.from_numpy(entry.token_ids).long()], atol=1e-5)
    assert entry.rank == 1 + int((expected > expected[token]).sum())


def test_logprobs_are_raw_whatever_the_transforms_do() -> None:
    bench, logits = Bench(VOCAB), random_logits(4)
    bench.add(new_row(0, temperature=0.3, top_k=5, logprobs=3))
    bench.add(new_row(1, temperature=0.0, allowed_token_ids=[11], logprobs=0))
    bench.add(new_row(2))
    bench.add(new_row(3, presence_penalty=2.0, output=[4, 5], logit_bias={8: 50.0}, logprobs=-1))
    sampled = bench.sample(logits, [2, 0, 3, 1])
    tokens = sampled.token_ids.tolist()
    entries = {found.row: found.entry for found in bench.logprobs(sampled)}
    assert entries.keys() == {0, 1, 3}
    assert_entry(entries[0], logits[1], tokens[1], 3)
    assert_entry(entries[1], logits[3], 11, 0)
    assert_entry(entries[3], logits[2], 8, VOCAB)


def test_more_logprobs_than_tokens_are_all_of_them() -> None:
    bench, logits = Bench(VOCAB), random_logits(1)
    bench.add(new_row(0, temperature=0.0, logprobs=VOCAB + 1))
    sampled = bench.sample(logits, [0])
    assert_entry(bench.logprobs(sampled)[0].entry, logits[0], int(sampled.token_ids[0]), VOCAB)


def test_tokens_asked_for_by_id_follow_the_most_likely_ones_raw() -> None:
    bench, logits = Bench(VOCAB), random_logits(4)
    expected = logits.double().log_softmax(dim=-1)
    bench.add(new_row(0, temperature=0.0, logprob_token_ids=[7, 140, 3]))
    bench.add(new_row(1, temperature=0.5, logprobs=2, logit_bias={9: -40.0}, logprob_token_ids=[9]))
    bench.add(new_row(2, temperature=0.0, logprobs=4))
    bench.add(new_row(3))
    for _ in range(2):
        sampled = bench.sample(logits, [3, 2, 1, 0])
        tokens = sampled.token_ids.tolist()
        entries = {found.row: found.entry for found in bench.logprobs(sampled)}
        assert entries[0].token_ids.tolist() == [tokens[3], 7, 140, 3]
        best = expected[2].topk(2).indices.tolist()
        assert entries[1].token_ids.tolist() == [tokens[2], *best, 9]
        for row, line in ((0, 3), (1, 2), (2, 1)):
            ids = torch.from_numpy(entries[row].token_ids).long()
            np.testing.assert_allclose(entries[row].logprobs, expected[line][ids], atol=1e-5)
        assert_entry(entries[2], logits[1], tokens[1], 4)


def test_a_row_that_takes_the_place_of_another_does_not_get_its_tokens() -> None:
    bench, logits = Bench(VOCAB), random_logits(1)
    bench.add(new_row(0, logprob_token_ids=[1, 2]))
    bench.sampler.remove(0)
    bench.add(new_row(0, temperature=0.0, logprobs=1))
    sampled = bench.sample(logits, [0])
    assert_entry(bench.logprobs(sampled)[0].entry, logits[0], int(sampled.token_ids[0]), 1)


def test_a_token_asked_for_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="logprob_token_ids: names token 150"):
        Bench(VOCAB).add(new_row(0, logprob_token_ids=[VOCAB]))


def test_a_failed_row_has_no_logprobs() -> None:
    bench, logits = Bench(VOCAB), random_logits(2)
    logits[0, 3] = torch.nan
    for row in range(2):
        bench.add(new_row(row, logprobs=2))
    sampled = bench.sample(logits, [0, 1])
    assert [found.row for found in bench.logprobs(sampled)] == [1]
    assert sampled.token_ids[0] < 0


@pytest.mark.parametrize("count", [0, 4, VOCAB])
def test_a_listing_of_many_lines_is_that_of_each(count: int) -> None:
    logits, next_ids = random_logits(130), torch.randint(VOCAB, (130,), generator=torch.Generator().manual_seed(1))
    listing = list_logprobs(logits, next_ids, count, next_ids.new_empty(130, 0))
    entries = entries_of(listing, Wanted([count] * 130, [0] * 130), VOCAB)
    for line, entry in enumerate(entries):
        assert_entry(entry, logits[line], int(next_ids[line]), count)


def test_half_precision_logits_give_float32_logprobs() -> None:
    logits, next_ids = random_logits(3).bfloat16(), torch.tensor([1, 2, 3])
    found = list_logprobs(logits, next_ids, 2, next_ids.new_empty(3, 0))
    expected = logits.float().log_softmax(dim=-1)
    np.testing.assert_allclose(found.chosen[1], expected[1, 2], atol=1e-5)
