"""Makes the sampler for a model's kernels."""

from __future__ import annotations

import torch

from quire.runtime.attention.backend import Kernels
from quire.runtime.sampling.native_choice import NativeChoice
from quire.runtime.sampling.sampler import Sampler


def make_sampler(
    num_rows: int, vocab_size: int, device: torch.device, kernels: Kernels, num_samples: int | None = None
) -> Sampler:
    """Return the sampler. With Triton or the compiled kernels, these also choose the tokens; Triton's steps can be
    captured.

    `num_samples`: the most samples per step, if rows that verify drafts sample several tokens each.
    """
    if kernels == "native":
        return Sampler(num_rows, vocab_size, device, NativeChoice(num_rows))
    if kernels != "triton":
        return Sampler(num_rows, vocab_size, device)
    from quire.runtime.sampling.triton_choice import TritonChoice

    return Sampler(num_rows, vocab_size, device, TritonChoice(num_rows, vocab_size, device, num_samples))
