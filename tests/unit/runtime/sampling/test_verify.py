"""A row that comes several times in a batch, each time with more of a draft known: what verification needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.make import make_sampler
from quire.runtime.sampling.sampler import Sampler
from quire.runtime.sampling.samples import Samples
from quire.types.sampling import TokenRules
from quire.types.step import Masks
from tests.unit.runtime.sampling.bench import CPU, Bench, new_row
from tests.unit.runtime.sampling.test_sampler import MENU
from tiny_models import DEVICE

VOCAB, DRAFTED = 200, 3
MENUS: list[dict[str, Any]] = [
    *MENU,
    {"temperature": 0.9, "frequency_penalty": 1.5, "top_p": 0.9},
    {"temperature": 0.0, "presence_penalty": 2.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "min_tokens": 7, "rules": TokenRules(end_ids=tuple(range(0, VOCAB, 3)))},
    {"temperature": 1.0, "rules": TokenRules(bad_words=tuple((a, b) for a in range(40) for b in range(0, 200, 9)))},
]


def benches(kernels: str) -> tuple[Bench, Bench]:
    """Two that hold the same rows, one for plain decoding by torch and one to verify in."""
    made = (Bench(VOCAB, num_rows=len(MENUS)), Bench(VOCAB, num_rows=len(MENUS)))
    made[1].sampler = make_sampler(len(MENUS), VOCAB, CPU, kernels, len(MENUS) * DRAFTED)  # type: ignore[arg-type]
    for bench in made:
        for row, asked in enumerate(MENUS):
            bench.add(new_row(row, prompt=[1, 2, row], output=[3, 9, row], seed=row, sample_index=row % 2, **asked))
    return made


def logits_of(seed: int) -> Tensor:  # [rows, drafted, vocab]
    return torch.randn(len(MENUS), DRAFTED, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def hold(bench: Bench, row: int, start: int, tokens: list[int]) -> None:
    """Write what a row holds from a position on, as a worker does."""
    bench.history.tokens[row, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    bench.history.lengths[row] = start + len(tokens)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_every_position_of_a_draft_gives_the_token_that_plain_decoding_gives(kernels: str) -> None:
    if kernels == "triton":
        pytest.importorskip("triton")
        if DEVICE != "cpu":
            pytest.skip("over memory of the CPU: for the interpreter")
    plain, verifying = benches(kernels)
    logits, rows = logits_of(3), list(range(len(MENUS)))
    wanted = [plain.tokens(logits[:, place], rows) for place in range(DRAFTED)]  # [drafted][rows]
    for row in rows:
        hold(verifying, row, 6, [wanted[place][row] for place in range(DRAFTED - 1)])
    order = [row for row in rows for _ in range(DRAFTED)]
    samples = verifying.samples(order, [6 + place for _ in rows for place in range(DRAFTED)])
    found = verifying.sampler.sample(logits.flatten(0, 1).clone(), samples, verifying.history).token_ids
    assert found.view(len(rows), DRAFTED).T.tolist() == wanted


def test_what_follows_a_wrong_token_of_a_draft_does_not_change_what_comes_before_it() -> None:
    plain, verifying = benches("torch")
    logits, rows = logits_of(4), list(range(len(MENUS)))
    first = plain.tokens(logits[:, 0], rows)
    second = plain.tokens(logits[:, 1], rows)
    for row in rows:
        hold(verifying, row, 6, [first[row], 199 - second[row]])
    order = [row for row in rows for _ in range(DRAFTED)]
    samples = verifying.samples(order, [6 + place for _ in rows for place in range(DRAFTED)])
    found = verifying.sampler.sample(logits.flatten(0, 1).clone(), samples, verifying.history).token_ids
    assert found.view(len(rows), DRAFTED)[:, :2].T.tolist() == [first, second]


def test_logprobs_of_a_draft_come_in_the_order_of_its_positions() -> None:
    bench, logits = Bench(VOCAB), logits_of(5)[:4, 0]
    bench.add(new_row(2, output=[4, 4, 4], temperature=0.0, logprobs=0))
    sampled = bench.sampler.sample(logits.clone(), bench.samples([2] * 4, [1, 2, 3, 4]), bench.history)
    told = bench.logprobs(sampled)
    best = logits.log_softmax(dim=-1).max(dim=-1)
    assert [each.row for each in told] == [2] * 4
    assert [int(each.entry.token_ids[0]) for each in told] == best.indices.tolist() == sampled.token_ids.tolist()
    np.testing.assert_allclose([each.entry.logprobs[0] for each in told], best.values, atol=1e-5)


def test_some_of_the_samples_keep_their_lengths_places_and_masks() -> None:
    masks = Masks(np.array([1, 3], dtype=np.int32), np.array([[1], [2]], dtype=np.uint32))
    lengths = np.array([4, 5, 6, 9])
    samples = Samples(np.array([7, 7, 7, 1], dtype=np.int32), lengths, torch.from_numpy(lengths), np.arange(4), masks)
    chosen = np.array([0, 2, 3])
    some = samples.select(chosen, torch.from_numpy(chosen))
    assert (some.rows.tolist(), some.lengths.tolist(), some.on_device.tolist()) == ([7, 7, 1], [4, 6, 9], [4, 6, 9])
    assert some.places.tolist() == [0, 2, 3]
    assert some.masks is not None
    assert (some.masks.samples.tolist(), some.masks.bits.tolist()) == ([2], [[2]])
    none = np.array([0])
    assert samples.select(none, torch.from_numpy(none)).masks is None


def test_a_sampler_without_rows_chooses_greedily_for_any_number_of_samples() -> None:
    logits = logits_of(6)[0]
    history = TokenHistory(torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2).long(), torch.zeros(2).long())
    lengths = np.array([3, 4, 5])
    samples = Samples(np.zeros(3, dtype=np.int32), lengths, torch.from_numpy(lengths), np.arange(3))
    found = Sampler(2, VOCAB, torch.device("cpu")).sample(logits[:3].clone(), samples, history).token_ids
    assert found.tolist() == logits[:3].argmax(dim=-1).tolist()
