"""Scratch memory for the dequantized keys and values of a step's prompt chunks, one layer at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.attention_config import PrefillConfig
from quire.kernels.triton.attention_prefill import PrefillPlan, lay_out_tiles, paged_prefill, rotates_queries
from quire.kernels.triton.cache_dequantize import PAGE_NUMBERS, dequantize_pages, lay_out_pages
from quire.kernels.triton.rotary import QueryRotary
from quire.runtime.attention.backend import LayerCache

Spans = npt.NDArray[np.int64]  # [chunks, 4]: first token in the batch, its position, tokens, row

# Query rows that must read an average key for a copy to save time. By the rates of both attention kernels on an H200
# (269 and 566 TFLOP/s: `python -m benchmarks.gpu.kernels_attention --json FILE --only "2048 after 6144"`) and by its
# bandwidth, 220 rows save the time to dequantize a key of 128 elements.
LEAST_ROWS = 256
PAGE = 64  # tokens: the kernel for Hopper GPUs loads that many with one copy


@dataclass(frozen=True, slots=True)
class ScratchConfig:
    """When prompt chunks attend over a dequantized copy: if an average key that they see is read by at least
    `least_rows` packed query rows of its head."""

    dtype: torch.dtype  # of the copy: the dtype of the queries
    least_rows: int = LEAST_ROWS
    page: int = PAGE


class PrefillScratch:
    """Scratch memory for one layer's keys and values of all sequences that have a chunk in a step.

    Sequences take whole pages, one after the other, so one block table serves all steps: its entry p is page p, and a
    sequence's row in the table is its first page.
    """

    def __init__(self, config: ScratchConfig, heads: Heads, num_tokens: int, device: torch.device) -> None:
        self._config, self._group = config, heads.num_query // heads.num_kv
        self._capacity = -(-num_tokens // config.page) // 2 * 2 + 1  # odd: the page list is whole tile lines
        shape = (self._capacity, heads.num_kv, config.page, heads.dim)
        self._keys = torch.empty(shape, dtype=config.dtype, device=device)
        self._values = torch.empty_like(self._keys)
        self._tables = torch.arange(self._capacity, dtype=torch.int32, device=device)[:, None]

    def is_faster(self, spans: Spans) -> bool:
        """Whether these chunks should attend over a copy, and its pages suffice for the keys that they see."""
        if len(spans) == 0:
            return False
        starts, counts = np.asarray(spans)[:, 1:3].T
        lengths = starts + counts
        if int((-(-lengths // self._config.page)).sum()) > self._capacity:
            return False
        pairs = int((counts * starts + counts * (counts + 1) // 2).sum())  # (query token, key) pairs
        return self._group * pairs >= self._config.least_rows * int(lengths.sum())

    def lists(self, spans: Spans, block_m: int, room: int | None = None) -> Tensor:
        """Return the page list and the tile list of a step's chunks, on the host: int32, in lines of the size of a
        tile. Tiles name first pages instead of rows, and are padded to `room`."""
        moved = np.array(spans, dtype=np.int64).reshape(-1, 4)
        pages, moved[:, 3] = lay_out_pages(
            moved[:, 3], moved[:, 1] + moved[:, 2], self._config.page, self._capacity
        )  # fmt: skip
        tiles = lay_out_tiles(moved, self._group, block_m, room)  # type: ignore[arg-type]  # reads any lines of 4
        return torch.cat((torch.from_numpy(pages).view(-1, tiles.shape[1]), tiles))

    def plan(self, lists: Tensor, config: PrefillConfig) -> tuple[ScratchPlan, Tensor]:
        """Return the plan of a step, and the tiles over the cache itself. `lists`, on the device, is the result of
        `lists` followed by as many tiles over the cache."""
        num_lines = (1 + self._capacity) * PAGE_NUMBERS // lists.shape[1]
        pages = lists[:num_lines].view(-1, PAGE_NUMBERS)
        moved, tiles = lists[num_lines:].view(2, -1, lists.shape[1])
        return ScratchPlan(self, pages, PrefillPlan(config, moved)), tiles

    def attend(
        self, query: Tensor, cache: LayerCache, tables: Tensor, plan: ScratchPlan, rule: AttentionRule, out: Tensor,
        *, rotary: QueryRotary | None, dependent: bool,
    ) -> None:  # fmt: skip
        """Dequantize the keys and values that the plan's chunks see in a layer, and attend over the copy. Other tokens
        of `out` are not written."""
        assert cache.scales is not None, "only caches with scales are dequantized"
        copy = (self._keys, self._values)
        dequantize_pages((cache.key, cache.value), cache.scales, tables, plan.pages, copy, dependent=dependent)
        paged_prefill(query, *copy, self._tables, plan.prefill, rule, out=out, rotary=rotary, dependent=dependent)

    def rotates_queries(self, query: Tensor, plan: ScratchPlan, rule: AttentionRule, rotary: QueryRotary) -> bool:
        """Whether `attend` can norm and rotate queries as it loads them."""
        return rotates_queries(query, self._keys, self._values, plan.prefill, rule, rotary)


@dataclass(frozen=True, slots=True)
class ScratchPlan:
    """The plan of a step whose chunks attend over a dequantized copy."""

    memory: PrefillScratch
    pages: Tensor  # [1 + capacity, PAGE_NUMBERS], int32
    prefill: PrefillPlan  # its tiles name first pages
