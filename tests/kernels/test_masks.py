"""Masks of bits on the device against one token after the other."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.reference import masks as reference
from quire.kernels.triton import masks
from quire.kernels.triton.masks import apply_masks, apply_row_masks
from triton_cases import DEVICE, ON_GPU, rand

VOCAB = 9_003 if ON_GPU else 701  # no multiple of a word, a tile or a vector
ALL_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, several tiles of a small vocabulary."""
    if not ON_GPU:
        monkeypatch.setattr(masks, "TILE", 256)


def random_bits(lines: int, words: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(words)
    return torch.randint(-(2**31), 2**31, (lines, words), dtype=torch.int32, generator=generator)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("spare_words", [0, 2, -2])
def test_logits_of_tokens_that_are_not_allowed_become_minus_infinity(dtype: torch.dtype, spare_words: int) -> None:
    words = -(-VOCAB // 32) + spare_words
    bits = random_bits(3, words)
    bits[1] = 0
    logits = rand(5, VOCAB, dtype=dtype, seed=1)
    wanted, lines = logits.cpu().clone(), torch.tensor([4, 0, 2], dtype=torch.int32)
    reference.apply_masks(wanted, lines, bits)
    apply_masks(logits, lines.to(DEVICE), bits.to(DEVICE))
    assert torch.equal(logits.cpu(), wanted)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("spare_words", [0, 2, -2])
def test_rows_with_a_mask_are_masked_and_padding_and_all_other_rows_are_not_touched(
    dtype: torch.dtype, spare_words: int
) -> None:
    bits = random_bits(6, -(-VOCAB // 32) + spare_words)
    bits[5] = 0
    flags = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.int32)
    rows = torch.tensor([3, -1, 4, 5, 0, -1], dtype=torch.int32)  # row 2 has a mask and is in no entry
    wide = rand(6, VOCAB + 5, dtype=dtype, seed=2)  # lines that lie apart
    logits = wide[:, :VOCAB]
    before, wanted = wide.clone(), logits.cpu().clone()
    reference.apply_row_masks(wanted, rows, flags, bits)
    apply_row_masks(logits, rows.to(DEVICE), flags.to(DEVICE), bits.to(DEVICE))
    assert torch.equal(logits.cpu(), wanted)
    for entry in (1, 2, 5):
        assert torch.equal(wide[entry], before[entry])
    assert torch.equal(wide[:, VOCAB:], before[:, VOCAB:])
    assert not logits[3].isfinite().any()


def test_masks_by_row_are_refused_where_a_row_has_no_line_or_no_flag() -> None:
    rows, flags = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.ones(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="a flag and a line of bits for each row"):
        apply_row_masks(rand(1, 50), rows, flags, torch.zeros(3, 2, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="a row per entry"):
        apply_row_masks(rand(2, 50), rows, flags, torch.zeros(2, 2, dtype=torch.int32, device=DEVICE))


def test_no_masks_change_nothing() -> None:
    logits = rand(2, 50)
    before = logits.clone()
    nothing = torch.empty(0, dtype=torch.int32, device=DEVICE)
    apply_masks(logits, nothing, nothing.view(0, 1))
    apply_row_masks(logits[:0], nothing, nothing, nothing.view(0, 1))
    assert torch.equal(logits, before)


def test_bits_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous int32"):
        apply_masks(rand(1, 50), torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros(1, 2, device=DEVICE))
