"""Masks of bits on the device against one token after the other."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.reference import masks as reference
from quire.kernels.triton import masks
from quire.kernels.triton.masks import apply_masks
from triton_cases import DEVICE, DTYPES, ON_GPU, rand

VOCAB = 9_000 if ON_GPU else 700


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, several tiles of a small vocabulary."""
    if not ON_GPU:
        monkeypatch.setattr(masks, "TILE", 256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spare_words", [0, 2, -2])
def test_logits_of_tokens_that_are_not_allowed_become_minus_infinity(dtype: torch.dtype, spare_words: int) -> None:
    words = -(-VOCAB // 32) + spare_words
    generator = torch.Generator().manual_seed(words)
    bits = torch.randint(-(2**31), 2**31, (3, words), dtype=torch.int32, generator=generator)
    bits[1] = 0
    logits = rand(5, VOCAB, dtype=dtype, seed=1)
    wanted, lines = logits.cpu().clone(), torch.tensor([4, 0, 2], dtype=torch.int32)
    reference.apply_masks(wanted, lines, bits)
    apply_masks(logits, lines.to(DEVICE), bits.to(DEVICE))
    assert torch.equal(logits.cpu(), wanted)


def test_no_masks_change_nothing() -> None:
    logits = rand(2, 50)
    before = logits.clone()
    nothing = torch.empty(0, dtype=torch.int32, device=DEVICE)
    apply_masks(logits, nothing, nothing.view(0, 1))
    assert torch.equal(logits, before)


def test_bits_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous int32"):
        apply_masks(rand(1, 50), torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros(1, 2, device=DEVICE))
