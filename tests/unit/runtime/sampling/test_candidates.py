"""The likeliest next tokens that beams choose from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.runtime.sampling.ranking import best_tokens
from quire.runtime.sampling.reports import Report, all_candidates, merged
from quire.runtime.sampling.sampler import Sampled
from quire.runtime.sampling.tiles import tile_max
from quire.types.sampling import TokenRules
from quire.types.step import Candidates, Masks
from tests.unit.runtime.sampling import naive
from tests.unit.runtime.sampling.bench import Bench, new_row

VOCAB = 320


def told(sampled: Sampled) -> Candidates | None:
    pending = sampled.report.candidates
    return pending.finish([tensor.cpu() for tensor in pending.tensors])


def random_logits(lines: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(lines, vocab, generator=torch.Generator().manual_seed(seed)) * 3


ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3, "top_k": 2},  # neither changes what is likely
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"logit_bias": {3: 5.0, 300: 2.0}, "allowed_token_ids": [3, 4, 300, 9, 11, 77, 100]},
    {"min_tokens": 9, "rules": TokenRules(end_ids=(0, 1, 2))},
    {"rules": TokenRules(bad_words=((4,), (9, 7)))},
]


def test_candidates_are_log_probabilities_changed_as_beam_search_changes_them() -> None:
    bench, logits = Bench(VOCAB), random_logits(len(ASKED) + 1)
    for row, asked in enumerate(ASKED):
        new = new_row(row, prompt=[5, 6, 300], output=[4, 9, 9, 300], **{"temperature": 0.0, **asked})
        bench.add(new._replace(num_candidates=5))
    bench.add(new_row(9, temperature=0.0))
    found = told(bench.sample(logits, [*range(len(ASKED)), 9]))
    assert found is not None
    assert found.samples.tolist() == list(range(len(ASKED)))
    assert (found.token_ids.dtype, found.scores.dtype) == (np.int32, np.float32)
    for row, asked in enumerate(ASKED):
        greedy = {**asked, "temperature": 0.0}
        new = new_row(row, prompt=[5, 6, 300], output=[4, 9, 9, 300], **greedy)
        scores = naive.transformed(logits[row].double().log_softmax(dim=-1).tolist(), new)
        best = naive.ranked(scores)[:5]
        assert found.token_ids[row].tolist() == best
        np.testing.assert_allclose(found.scores[row], [scores[token] for token in best], atol=2e-5)


def test_rows_with_candidates_list_as_many_as_the_row_that_wants_most() -> None:
    bench, logits = Bench(VOCAB), random_logits(3, 1)
    bench.add(new_row(0)._replace(num_candidates=2))
    bench.add(new_row(1))
    bench.add(new_row(2)._replace(num_candidates=VOCAB + 8))
    found = told(bench.sample(logits, [0, 1, 2]))
    assert found is not None
    assert found.samples.tolist() == [0, 2]
    assert found.token_ids.shape == found.scores.shape == (2, VOCAB)
    assert sorted(found.token_ids[0].tolist()) == list(range(VOCAB))
    bench.sampler.remove(2)
    alone = told(bench.sample(logits[:1], [0]))
    assert alone is not None
    assert alone.token_ids.tolist() == found.token_ids[:1, :2].tolist()
    assert alone.scores.tolist() == found.scores[:1, :2].tolist()


def test_tokens_under_a_mask_come_first_and_the_rest_scores_minus_infinity() -> None:
    bench, logits = Bench(VOCAB), random_logits(1, 2)
    bench.add(new_row(0)._replace(num_candidates=4))
    bits = np.zeros((1, 10), dtype=np.uint32)
    bits[0, 1], bits[0, 9] = 1 << 3, 1 << 31  # tokens 35 and 319
    samples = bench.samples([0], masks=Masks(np.array([0], dtype=np.int32), bits))
    found = told(bench.sampler.sample(logits.clone(), samples, bench.history))
    assert found is not None
    first = sorted([35, 319], key=lambda token: -float(logits[0, token]))
    assert found.token_ids[0].tolist() == [*first, 0, 1]  # of those that are not allowed, the lowest ids
    expected = logits.log_softmax(dim=-1)[0, first].tolist()
    np.testing.assert_allclose(found.scores[0], [*expected, -np.inf, -np.inf], atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), vocab=st.sampled_from([64, 640, 700, 2048]), width=st.sampled_from([1, 3, 8, 60]))
def test_of_equal_scores_the_lowest_ids_are_best(seed: int, vocab: int, width: int) -> None:
    scores = random_logits(3, seed, vocab).round()
    scores[1] = -0.0
    scores[2, ::2] = float("-inf")
    values, ids = best_tokens(scores, tile_max(scores), width)
    wanted = torch.sort(scores, dim=-1, descending=True, stable=True)
    assert ids.tolist() == wanted.indices[:, :width].tolist()
    assert values.tolist() == wanted.values[:, :width].tolist()


def test_reports_of_parts_become_one() -> None:
    first = Report(candidates=all_candidates(torch.tensor([[4, 5]]), torch.tensor([[-1.0, -2.0]]), np.array([2])))
    second = Report(candidates=all_candidates(torch.tensor([[6]]), torch.tensor([[-3.0]]), np.array([7])))
    both = merged([first, Report(), second]).candidates
    found = both.finish(both.tensors)
    assert found is not None
    assert found.samples.tolist() == [2, 7]
    assert found.token_ids.tolist() == [[4, 5], [6, 0]]
    assert found.scores.tolist() == [[-1.0, -2.0], [-3.0, -np.inf]]
    nothing = merged([Report(), Report()])
    assert nothing.candidates.finish(()) is None
    assert nothing.logprobs.finish(()) == ()


def test_a_row_that_is_no_number_fails_and_its_neighbours_do_not() -> None:
    bench, logits = Bench(VOCAB), random_logits(2, 3)
    logits[0, 4] = torch.nan
    for row in (0, 1):
        bench.add(new_row(row, temperature=0.0)._replace(num_candidates=3))
    sampled = bench.sample(logits, [0, 1])
    found = told(sampled)
    assert found is not None
    assert sampled.token_ids[0] < 0
    assert found.token_ids[1].tolist() == logits[1].topk(3).indices.tolist()
    with pytest.raises(AssertionError):
        bench.add(new_row(1)._replace(num_candidates=3))  # rows are released before they are placed again
