"""The same numbers as transformers' logits processors, where those define the same thing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.runtime.sampling.choosers.top_k import DrawFromTopK
from quire.runtime.sampling.choosers.top_p import DrawFromTopP
from quire.runtime.sampling.tiles import tile_max
from quire.runtime.sampling.transforms.min_p import MinP
from quire.runtime.sampling.transforms.repetition import RepetitionPenalty
from quire.runtime.sampling.transforms.temperature import Temperature
from tests.unit.runtime.sampling.bench import CPU, new_row, transform_rows

transformers = pytest.importorskip("transformers")

VOCAB = 320


def random_logits(lines: int, scale: float = 3.0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(lines, vocab, generator=torch.Generator().manual_seed(vocab)) * scale


@pytest.mark.parametrize("penalty", [0.7, 1.1, 1.9])
def test_repetition_penalty(penalty: float) -> None:
    logits, known = random_logits(4), torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(0))
    news = [
        new_row(row, prompt=line[:4], output=line[4:], repetition_penalty=penalty)
        for row, line in enumerate(known.tolist())
    ]
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(known, logits.clone())
    assert torch.equal(transform_rows(RepetitionPenalty(4, CPU), logits, news), expected)


@pytest.mark.parametrize("temperature", [0.2, 0.8, 1.7])
def test_temperature(temperature: float) -> None:
    logits = random_logits(4)
    news = [new_row(row, temperature=temperature) for row in range(4)]
    expected = transformers.TemperatureLogitsWarper(temperature)(None, logits.clone())
    torch.testing.assert_close(transform_rows(Temperature(4, CPU), logits, news), expected)


@pytest.mark.parametrize("min_p", [0.02, 0.1, 0.6])
def test_min_p(min_p: float) -> None:
    logits = random_logits(16)
    expected = transformers.MinPLogitsWarper(min_p)(None, logits.clone())
    assert torch.equal(
        transform_rows(MinP(16, CPU), logits, [new_row(row, min_p=min_p) for row in range(16)]), expected
    )


def drawn_frequencies(chooser: DrawFromTopK | DrawFromTopP, logits: Tensor, **params: object) -> Tensor:
    """How often each token is drawn from one line of logits by evenly spread random numbers."""
    count = 4_096
    chooser.add(new_row(0, **params))  # type: ignore[arg-type]
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    slots = torch.full((count,), chooser.members.slot(0))
    lines = logits.expand(count, -1).contiguous()
    tokens = chooser.choose(lines, tile_max(lines), slots, uniform)
    return torch.bincount(tokens, minlength=logits.shape[0]) / count


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (7, 1.0), (200, 1.0), (40, 0.9), (200, 0.3)])
def test_top_k_with_and_without_top_p(top_k: int, top_p: float) -> None:
    logits = random_logits(1)
    masked = transformers.TopKLogitsWarper(top_k)(None, logits.clone())
    expected = transformers.TopPLogitsWarper(top_p)(None, masked).softmax(dim=-1)[0]
    found = drawn_frequencies(DrawFromTopK(1, VOCAB, CPU), logits[0], top_k=top_k, top_p=top_p)
    assert not found[expected == 0].any()
    assert (found - expected).abs().max() < 2 / 4_096


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_top_p(top_p: float, scale: float) -> None:
    logits = random_logits(1, scale)
    expected = transformers.TopPLogitsWarper(top_p)(None, logits.clone()).softmax(dim=-1)[0]
    found = drawn_frequencies(DrawFromTopP(1, VOCAB, CPU), logits[0], top_p=top_p)
    assert not found[expected == 0].any()
    assert (found - expected).abs().max() < 2 / 4_096
