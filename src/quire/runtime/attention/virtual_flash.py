"""Attention over the virtual layout on a GPU, in one call per layer: torch's flash kernel for sequences of different
lengths.

The kernel expects keys packed one sequence after the other, and gets the offset and length of each sequence. Given the
offsets of the rows' address ranges instead, it reads the keys in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.runtime.attention.backend import Kernels, LayerCache
from quire.runtime.attention.virtual import VirtualLayer, VirtualSpans, refuse_rule
from quire.runtime.sampling.samples import Longs
from quire.runtime.transfer import Uploader


@dataclass(frozen=True, slots=True)
class FlashRun:
    """Spans that one call handles: tokens begin .. end of the batch."""

    begin: int
    end: int
    starts: Tensor  # [spans + 1], int32: offset of each span in these tokens
    firsts: Tensor  # [spans + 1], int32: index of each sequence's first token in the cache; the last is unused
    lengths: Tensor  # [spans], int32
    most_tokens: int
    longest: int


class FlashVirtualAttention:
    """Implements AttentionBackend for float16 and bfloat16 on CUDA."""

    kernels: Kernels = "torch"

    def __init__(self, device: torch.device) -> None:
        self._uploader = Uploader(device)

    def accept(self, rule: AttentionRule) -> None:
        refuse_rule(rule)

    def prepare(self, spans: VirtualSpans) -> tuple[FlashRun, ...]:
        """Plan decodes and chunks separately: for single tokens the kernel splits long sequences."""
        cuts = (0, spans.num_decodes, len(spans.counts))
        return tuple(self._run(spans, low, high) for low, high in pairwise(cuts) if low < high)

    def attend(
        self,
        query: Tensor,
        key: Tensor,  # noqa: ARG002  read from the cache instead
        value: Tensor,  # noqa: ARG002
        cache: LayerCache,
        plan: tuple[FlashRun, ...],
        rule: AttentionRule,
    ) -> Tensor:
        assert isinstance(cache, VirtualLayer)
        parts = [self._attend(query[run.begin : run.end], cache, run, rule.scale) for run in plan]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, spans: VirtualSpans, low: int, high: int) -> FlashRun:
        counts, lengths = spans.counts[low:high], spans.lengths[low:high]
        begin = int(spans.begins[low])
        starts = _int32(np.concatenate(([0], np.cumsum(counts))))
        firsts = _int32(np.append(spans.firsts[low:high], 0))
        start, first, length = self._uploader.upload(starts, firsts, _int32(lengths))
        return FlashRun(begin, begin + int(counts.sum()), start, first, length, int(counts.max()), int(lengths.max()))

    def _attend(self, query: Tensor, cache: VirtualLayer, run: FlashRun, scale: float) -> Tensor:
        """Return [tokens, query heads * dim]."""
        out: Tensor = torch.ops.aten._flash_attention_forward(
            query,
            cache.key_tokens,
            cache.value_tokens,
            run.starts,
            run.firsts,
            run.most_tokens,
            run.longest,
            0.0,  # no dropout
            run.most_tokens > 1,  # causal: the last token of a span sees all its keys
            False,  # no debug mask
            scale=scale,
            seqused_k=run.lengths,
        )[0]
        return out.flatten(1)


def can_flash(heads: Heads, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's flash kernel supports these heads without padding them."""
    fits = heads.dim % 8 == 0 and heads.dim <= 256 and dtype in (torch.float16, torch.bfloat16)
    return device.type == "cuda" and fits and torch.backends.cuda.is_flash_attention_available()


def _int32(numbers: Longs) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return numbers.astype(np.int32)
