"""Common parts of the sampling kernels: a row's random number, its scaled logits, and their integer weights.

A token's weight is its probability relative to the most likely token's, in units so small that the weights of a
vocabulary sum to less than 2**53. Sums of integers are exact in any order, so the drawn token is bitwise the same
however the row is cut into tiles. A token too unlikely for one unit has weight zero and is never drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from quire.kernels.triton.launch import INTERPRETED

TILE = 4096  # tokens of a row per program
COLDEST = tl.constexpr(1e-20)  # lower bound of temperatures: below it float32 logits could overflow
NOT_FINITE = tl.constexpr(-1)
NOTHING_ALLOWED = tl.constexpr(-2)
_PYTHON = tl.constexpr(INTERPRETED)
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)  # SplitMix64
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_TWO_TO_MINUS_52 = tl.constexpr(2.0**-52)


class RowParameters(NamedTuple):
    """The sampling parameters of every persistent row, on the device; indexed by row."""

    temperature: Tensor  # [all rows] float32; 0: greedy, the others are ignored
    top_k: Tensor  # [all rows] int32; 0: off
    top_p: Tensor  # [all rows] float64; 1: off
    log_min_p: Tensor  # [all rows] float32: log of min_p; minus infinity: off
    stream: Tensor  # [all rows] int64: initial state of the row's SplitMix64 stream, a hash of (seed, sample index)

    @classmethod
    def make(cls, num_rows: int, device: torch.device) -> RowParameters:
        """Allocate for rows that are all greedy."""
        return cls(
            torch.zeros(num_rows, dtype=torch.float32, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.ones(num_rows, dtype=torch.float64, device=device),
            torch.full((num_rows,), float("-inf"), dtype=torch.float32, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
        )


class RowTokens(NamedTuple):
    """The tokens of every persistent row, on the device."""

    tokens: Tensor  # [all rows, capacity] int32
    lengths: Tensor  # [all rows] int64: number of tokens
    num_prompt: Tensor  # [all rows] int64: length of the prompt


def units(vocab_size: int) -> float:
    """Return the weight of the most likely token."""
    return 2.0 ** (53 - (vocab_size - 1).bit_length())


@triton.jit
def uniform(start, num_outputs):
    """Return a float64 in (0, 1) for the token after `num_outputs` generated ones of the stream that starts at
    `start`."""
    state = start.to(tl.uint64, bitcast=True) + (num_outputs + 1).to(tl.uint64) * _GAMMA
    state = (state ^ (state >> 30)) * _MIX_1
    state = (state ^ (state >> 27)) * _MIX_2
    state = state ^ (state >> 31)
    return ((state >> 12).to(tl.float64) + 0.5) * _TWO_TO_MINUS_52


@triton.jit
def share_of(total, number):
    """Return floor(number * total), at most total - 1, for int64 `total`."""
    share = tl.floor(number * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(share, total - 1)


@triton.jit
def row_best(best_ptr, TILES: tl.constexpr, count):
    """Return the highest logit of a row from its tiles', and the first tile that has it."""
    tile = tl.arange(0, TILES)
    best = tl.load(best_ptr + tile, mask=tile < count, other=float("-inf"))
    return tl.max(best, 0, return_indices=True)


@triton.jit
def row_mass(mass_ptr, TILES: tl.constexpr, count):
    """Return the weight of a row, int64, from its tiles'."""
    tile = tl.arange(0, TILES)
    return tl.sum(tl.load(mass_ptr + tile, mask=tile < count, other=0))


@triton.jit
def _exp(x):
    """exp as torch rounds it on CUDA; the fast exp would occasionally draw other tokens."""
    if _PYTHON:
        return tl.exp(x)
    return libdevice.exp(x)


@triton.jit
def divided(x, temperature):
    """Return x / temperature rounded to nearest, by one reciprocal and two correction steps; NaN for infinite x.

    Exact unless x or the quotient is near the ends of float32's range (below 1e-30 or above 1e30).
    """
    if _PYTHON:
        return tl.div_rn(x, temperature)
    inverse = tl.div_rn(1.0, temperature)
    near = x * inverse
    near = tl.fma(tl.fma(-near, temperature, x), inverse, near)
    return tl.fma(tl.fma(-near, temperature, x), inverse, near)


@triton.jit
def scaled_logits(logits_ptr, token, vocab_size, temperature, best, log_min_p):
    """Return logits divided by the temperature in float32; minus infinity past the vocabulary and where min_p drops the
    token.

    `best` is the row's highest logit divided by the temperature.
    """
    x = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    x = divided(x, temperature)
    return tl.where(x >= best + log_min_p, x, float("-inf"))  # also maps NaN (infinite x divided) to minus infinity


@triton.jit
def weights_of(x, best, unit):
    """Return the weights of scaled logits: integers in float32."""
    return tl.floor(_exp(x - best) * unit)
