"""Repetition, presence and frequency penalties, applied only to the tokens in each row's history."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import check, check_rows
from quire.kernels.triton.sampling_weights import RowTokens

_CHUNK = 1024  # tokens of a history processed at a time


class RowPenalties(NamedTuple):
    """The penalties of every persistent row, on the device; indexed by row."""

    repetition: Tensor  # [all rows] float32; 1: off
    presence: Tensor  # [all rows] float32; 0: off
    frequency: Tensor  # [all rows] float32; 0: off

    @classmethod
    def make(cls, num_rows: int, device: torch.device) -> RowPenalties:
        """Allocate for rows without penalties."""
        off = torch.zeros(num_rows, dtype=torch.float32, device=device)
        return cls(torch.ones_like(off), off, off.clone())


@triton.jit
def _repeated(logits_ptr, tokens, known, repetition):
    """Return the model's logits of tokens after the repetition penalty."""
    x = tl.load(logits_ptr + tokens, mask=known, other=0.0).to(tl.float32)
    return tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)


@triton.jit
def _penalize_kernel(
    row_ptr, repetition_ptr, presence_ptr, frequency_ptr, tokens_ptr, length_ptr, num_prompt_ptr, logits_ptr, out_ptr,
    tokens_stride, logits_stride, out_stride, CHUNK: tl.constexpr,
):  # fmt: skip
    """Penalize one entry's row; its programs touch only the logits of tokens in the row's history."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + entry).to(tl.int64)
    known = row >= 0
    repetition = tl.load(repetition_ptr + row, mask=known, other=1.0)
    presence = tl.load(presence_ptr + row, mask=known, other=0.0)
    frequency = tl.load(frequency_ptr + row, mask=known, other=0.0)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        history, logits, out = tokens_ptr + row * tokens_stride, logits_ptr + entry * logits_stride, out_ptr
        out += entry * out_stride
        length, prompt = tl.load(length_ptr + row), tl.load(num_prompt_ptr + row)
        # The new value depends only on the model's logit, so a token that occurs twice is written twice with the same
        # value.
        for start in range(0, prompt, CHUNK):
            place = start + tl.arange(0, CHUNK)
            tokens = tl.load(history + place, mask=place < prompt, other=0)
            tl.store(out + tokens, _repeated(logits, tokens, place < prompt, repetition), mask=place < prompt)
        tl.debug_barrier()
        for start in range(prompt, length, CHUNK):
            place = start + tl.arange(0, CHUNK)
            tokens = tl.load(history + place, mask=place < length, other=0)
            x = _repeated(logits, tokens, place < length, repetition) - presence
            tl.store(out + tokens, x, mask=place < length)
        tl.debug_barrier()
        if frequency != 0.0:
            for start in range(prompt, length, CHUNK):
                place = start + tl.arange(0, CHUNK)
                tokens = tl.load(history + place, mask=place < length, other=0)
                each = tl.zeros((CHUNK,), tl.float32) - frequency
                tl.atomic_add(out + tokens, each, mask=place < length, sem="relaxed")


def penalize(
    logits: Tensor,  # [entries, vocab]: the model's, any float dtype
    rows: Tensor,  # [entries] int: persistent row of each entry; negative: padding
    penalties: RowPenalties,
    history: RowTokens,
    out: Tensor,  # [entries, vocab] float32, not the memory of `logits`
) -> None:
    """Write the logits after each row's penalties to `out`.

    Repetition divides positive logits of tokens in the prompt or output and multiplies the others, once. Presence is
    subtracted once from tokens in the output, frequency once per occurrence there. The subtractions per token are
    equal, so their order does not matter and the result is deterministic.
    """
    check_rows(logits, "logits")
    check_rows(out, "out")
    check(out.shape == logits.shape and out.dtype == torch.float32, "out is float32 of the shape of logits")
    check(out.data_ptr() != logits.data_ptr(), "out must be other memory than logits")
    if len(rows) == 0:
        return
    out.copy_(logits)
    _penalize_kernel[(len(rows),)](
        rows, *penalties, history.tokens, history.lengths, history.num_prompt, logits, out,
        history.tokens.stride(0), logits.stride(0), out.stride(0), CHUNK=_CHUNK, num_warps=8, num_stages=1,
    )  # fmt: skip
