"""Log-probabilities on the device against plain torch."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.reference import sampling as reference
from quire.kernels.triton.logprobs import MOST_LISTED, Logprobs, LogprobSpace, logprobs
from triton_cases import DEVICE, DTYPES, rand


def _found(logits: torch.Tensor, ids: torch.Tensor, listed: int) -> Logprobs:
    entries, vocab_size = logits.shape
    out = Logprobs.make(entries, listed, DEVICE)
    logprobs(logits, ids, LogprobSpace.make(entries, vocab_size, DEVICE), out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "listed"), [(5000, 5), (40, 0), (8200, MOST_LISTED)])
def test_logprobs_ranks_and_lists_are_those_of_torch(vocab_size: int, listed: int, dtype: torch.dtype) -> None:
    logits = rand(3, vocab_size, dtype=dtype, seed=1, scale=3.0)
    ids = torch.tensor([0, vocab_size - 1, int(logits[2].argmax())], device=DEVICE)
    out = _found(logits, ids, listed)
    chosen, ranks, top_ids, top = reference.logprobs(logits, ids, listed)
    torch.testing.assert_close(out.chosen, chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.top_logprobs, top, rtol=1e-5, atol=1e-5)
    assert out.rank.tolist() == ranks.tolist()
    assert out.top_ids.tolist() == top_ids.tolist()


def test_equal_logits_are_listed_by_id_and_forbidden_ones_come_last() -> None:
    logits = torch.full((1, 4200), float("-inf"), device=DEVICE)
    logits[0, [4100, 7, 3000]] = torch.tensor([1.0, 1.0, 2.0], device=DEVICE)
    out = _found(logits, torch.tensor([7], device=DEVICE), 5)
    assert out.top_ids.tolist() == [[3000, 7, 4100, 0, 1]]
    assert out.top_logprobs[0, 3] == float("-inf")
    assert out.rank.tolist() == [2]


def test_a_failed_row_is_given_the_logprob_of_token_zero() -> None:
    logits = rand(1, 50)
    out = _found(logits, torch.tensor([-1], device=DEVICE), 1)
    torch.testing.assert_close(out.chosen, logits.log_softmax(dim=-1)[:, 0], rtol=1e-5, atol=1e-5)


def test_more_than_the_most_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        _found(rand(1, 50), torch.tensor([0], device=DEVICE), MOST_LISTED + 1)
