"""Masks of grammars, on float32 logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quire.kernels.reference.masks import apply_masks as plain_masks
from quire.runtime.sampling.choice import NOTHING_ALLOWED, row_failures
from quire.runtime.sampling.make import make_sampler
from quire.runtime.sampling.masking import apply_masks
from quire.types.step import Masks
from tests.unit.runtime.sampling.bench import Bench, new_row
from tiny_models import DEVICE

VOCAB = 150


def bits_of(*allowed: list[int], words: int = -(-VOCAB // 32)) -> npt.NDArray[np.uint32]:
    bits = np.zeros((len(allowed), words), dtype=np.uint32)
    for line, tokens in enumerate(allowed):
        for token in tokens:
            bits[line, token // 32] |= np.uint32(1 << (token % 32))
    return bits


@pytest.mark.parametrize("words", [5, 4, 7])
@pytest.mark.parametrize("lines", [[0], [2, 0]])
def test_tokens_whose_bit_is_not_set_are_banned_in_the_masked_samples_alone(lines: list[int], words: int) -> None:
    rng = np.random.default_rng(words)
    bits = rng.integers(0, 2**32, (len(lines), words), dtype=np.uint32)
    logits = torch.randn(max(lines) + 1, VOCAB, generator=torch.Generator().manual_seed(1))
    wanted = logits.clone()
    plain_masks(wanted, torch.tensor(lines), torch.from_numpy(bits.view(np.int32)))
    apply_masks(logits, Masks(np.array(lines, dtype=np.int32), bits))
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_masked_rows_choose_among_what_is_allowed_and_the_others_as_ever(kernels: str) -> None:
    if kernels == "triton":
        pytest.importorskip("triton")
        if DEVICE != "cpu":
            pytest.skip("over memory of the CPU: for the interpreter")
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    bench = Bench(VOCAB)
    bench.sampler = make_sampler(16, VOCAB, bench.device, kernels)  # type: ignore[arg-type]
    bench.add(new_row(0, temperature=0.0))
    bench.add(new_row(1, temperature=1.0, seed=5, allowed_token_ids=[3, 77, 140]))
    bench.add(new_row(2, temperature=0.0, logit_bias={9: 100.0}, repetition_penalty=1.2))
    masks = Masks(np.array([1, 2], dtype=np.int32), bits_of([77, 78], [8, 10, 149]))
    found = bench.sampler.sample(logits.clone(), bench.samples([0, 1, 2], masks=masks), bench.history)
    allowed = logits[2, [8, 10, 149]]
    assert found.token_ids.tolist() == [int(logits[0].argmax()), 77, [8, 10, 149][int(allowed.argmax())]]
    again = bench.sampler.sample(logits.clone(), bench.samples([0, 1, 2]), bench.history)
    assert again.token_ids[2] == 9


def test_a_mask_that_leaves_nothing_fails_its_row_by_name() -> None:
    bench, logits = Bench(VOCAB), torch.randn(2, VOCAB)
    bench.add(new_row(0, temperature=1.0))
    bench.add(new_row(1, temperature=1.0))
    masks = Masks(np.array([1], dtype=np.int32), bits_of([]))
    found = bench.sampler.sample(logits, bench.samples([0, 1], masks=masks), bench.history).token_ids.numpy()
    assert found[0] >= 0
    assert found[1] == NOTHING_ALLOWED
    rows = np.array([0, 1], dtype=np.int32)
    (failure,) = row_failures(rows, found.astype(np.int32), masks.samples)
    assert failure.row == 1
    assert "the grammar allows no token" in failure.reason
    (failure,) = row_failures(rows, found.astype(np.int32))
    assert "allowed_token_ids" in failure.reason


def test_a_row_that_fails_at_several_positions_fails_once() -> None:
    marks = np.array([-2, 4, -1, -2], dtype=np.int32)
    rows = np.array([3, 5, 3, 6], dtype=np.int32)
    assert [failure.row for failure in row_failures(rows, marks)] == [3, 6]


def test_a_masked_row_has_the_raw_logprob_of_its_token() -> None:
    bench, logits = Bench(VOCAB), torch.randn(1, VOCAB)
    bench.add(new_row(0, temperature=0.0, logprobs=1))
    masks = Masks(np.array([0], dtype=np.int32), bits_of([5]))
    told = bench.logprobs(bench.sampler.sample(logits.clone(), bench.samples([0], masks=masks), bench.history))
    assert told[0].entry.token_ids.tolist() == [5, int(logits.argmax())]
    np.testing.assert_allclose(told[0].entry.logprobs, logits.log_softmax(-1)[0, [5, int(logits.argmax())]], atol=1e-5)
