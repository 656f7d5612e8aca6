"""The GPU backend: decode rows by split attention over a shared work list, prompt chunks by packed tiles.

Both read the block tables of the persistent rows in place, so a step gathers no tables; its plan is made once and
read by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.triton.attention_config import prefill_config
from quire.kernels.triton.attention_decode import paged_decode
from quire.kernels.triton.attention_prefill import PrefillPlan, lay_out_tiles, paged_prefill
from quire.kernels.triton.attention_rule import AttentionRule
from quire.kernels.triton.attention_schedule import SplitPlan, allocate_split_plan, fill_split_plan
from quire.runtime.attention.backend import Kernels, LayerCache

SPARE_TILES = 48  # that are not full, one at most of each chunk
Span = tuple[int, int, int, int]  # of a chunk: first token in the batch, its position, tokens, row


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step's tokens as the kernels see them: the first `num_decodes` are rows that decode, the others chunks.

    A negative row marks a token of padding: nothing of it is read, written or promised.
    """

    rows: Tensor  # [tokens], int32: whose table
    positions: Tensor  # [tokens], int64
    tables: Tensor  # [all rows, max blocks], int32
    num_decodes: int
    split: SplitPlan | None  # of the decode rows
    prefill: PrefillPlan | None  # of the chunks


class TritonAttention:
    """CUDA, or any device under Triton's interpreter. Reads no slot of the cache that was not written.

    `dependent`: kernels are launched while the ones before them still run.
    """

    kernels: Kernels = "triton"

    def __init__(self, heads: Heads, scale: float, *, dependent: bool) -> None:
        self._heads, self.dependent = heads, dependent
        self._rule = AttentionRule(scale)
        self._prefill = prefill_config(heads.dim)
        self._split: SplitPlan | None = None

    def reserve(self, cache: LayerCache, max_rows: int) -> None:
        """Allocate the work list for steps of up to `max_rows` decode rows over caches like this one."""
        self._split = allocate_split_plan(cache.key, self._heads.num_query, max_rows)

    def num_tiles(self, chunks: Sequence[Span]) -> int:
        """Tiles that these chunks take."""
        group, block_m = self._heads.num_query // self._heads.num_kv, self._prefill.block_m
        return sum(-(-num_tokens * group // block_m) for _, _, num_tokens, _ in chunks)

    def tile_room(self, num_tokens: int) -> int:
        """Tiles to have room for where chunks are `num_tokens` long together and not more than a few dozen."""
        group, block_m = self._heads.num_query // self._heads.num_kv, self._prefill.block_m
        return -(-num_tokens * group // block_m) + min(num_tokens, SPARE_TILES)

    def tiles(self, chunks: Sequence[Span], room: int | None = None) -> Tensor:
        """The tile list of a step's chunks, on the host, padded to `room`."""
        return lay_out_tiles(chunks, self._heads.num_query // self._heads.num_kv, self._prefill.block_m, room)

    def plan(
        self,
        rows: Tensor,  # [tokens], int32
        positions: Tensor,  # [tokens], int64
        lengths: Tensor,  # [decodes]: keys each decode row sees, its own included; 0: padding
        tables: Tensor,  # [all rows, max blocks], int32
        tiles: Tensor | None,  # what `tiles` made, on the device
    ) -> TritonPlan:
        """The plan of a step, by one launch at most. Holds until the next one is made."""
        split = self._split if len(lengths) else None
        assert len(lengths) == 0 or split is not None, "reserve() was not called"
        if split is not None:
            fill_split_plan(split, lengths, table_rows=rows[: len(lengths)])
        prefill = None if tiles is None else PrefillPlan(self._prefill, tiles)
        return TritonPlan(rows, positions, tables, len(lengths), split, prefill)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, plan: TritonPlan) -> Tensor:  # noqa: ARG002
        """Chunks read their own keys from the cache too: measured on an H200, that is no slower than `key` itself."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)  # [tokens, query heads, dim]
        if plan.split is not None:
            count = plan.num_decodes
            paged_decode(
                query[:count], cache.key, cache.value, plan.tables, plan.split, self._rule,
                out=out[:count], dependent=self.dependent,
            )  # fmt: skip
        if plan.prefill is not None:
            paged_prefill(
                query, cache.key, cache.value, plan.tables, plan.prefill, self._rule,
                out=out, dependent=self.dependent,
            )  # fmt: skip
        return out.flatten(1)
