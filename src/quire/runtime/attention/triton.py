"""The GPU backend: decodes by split-KV attention (flash decoding) over a work list, prompt chunks by tiles of packed
query heads.

Both read the block tables of the persistent rows in place, so a step gathers no tables. The plan of a step is made once
and read by every layer. Chunks over a quantized cache may attend over a dequantized copy instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.attention_cascade import (
    CascadePlan,
    SharedPrefix,
    allocate_cascade_plan,
    attend_prefixes,
    lay_out_groups,
    share_out_groups,
)
from quire.kernels.triton.attention_config import decode_configs, prefill_config
from quire.kernels.triton.attention_decode import paged_decode
from quire.kernels.triton.attention_prefill import PrefillPlan, lay_out_tiles, paged_prefill, rotates_queries
from quire.kernels.triton.attention_schedule import (
    SplitPlan,
    allocate_split_plan,
    fill_split_plan,
    with_config,
    with_own_lists,
)
from quire.kernels.triton.launch import num_processors
from quire.kernels.triton.rotary import QueryRotary
from quire.runtime.attention.backend import Kernels, LayerCache
from quire.runtime.attention.branches import Launch, SideBranch
from quire.runtime.attention.prefill_scratch import PrefillScratch, ScratchConfig, ScratchPlan, Spans
from quire.runtime.transfer import Uploader

if TYPE_CHECKING:
    from quire.runtime.attention.expanded import ExpandedStep

SPARE_TILES = 48  # partial tiles, at most one per chunk
CASCADE_BYTES = 40 << 20  # of keys and values that could be read while a cascade's second launch ramps up and down
# If the chunks of a step have more tiles per multiprocessor than this, they fill the device by themselves,
# and attention kernels run one after the other. An estimate: `python -m benchmarks.gpu.mixed_attention` times both.
BRANCHED_TILES = 8
Splits = Mapping[int | None, SplitPlan]  # by window of the layers


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step's tokens for the kernels: decodes come first, then chunks.

    A negative row marks a padding token: its key and value are neither read nor written, and its output is undefined.
    """

    rows: Tensor  # [tokens], int32: row of the block tables
    positions: Tensor  # [tokens], int64
    tables: Tensor  # [all rows, max blocks], int32
    lengths: Tensor  # [decodes]: keys that each decode sees, including its own; 0: a token of a chunk, or padding
    splits: Splits  # of the decodes; empty if there are none
    cascade: CascadePlan | None  # of the decodes' shared prefixes, for layers without a window
    prefill: PrefillPlan | None  # of the chunks
    scratch: ScratchPlan | None = None  # of the chunks in layers without a window, instead of `prefill`
    expanded: ExpandedStep | None = None  # of chunks over latents, instead of `prefill`
    rotary: QueryRotary | None = None  # in one layer: what the queries of chunks have yet to go through

    local: TritonPlan | None = None  # of layers with a window, if they have other heads

    @property
    def num_decodes(self) -> int:
        """How many of the first tokens the kernels for decodes visit. Padded steps have chunks among them."""
        return len(self.lengths)

    def over(self, tables: Tensor) -> TritonPlan:
        """Return the same step for layers with a window, which read other block tables."""
        return replace(self.local or self, tables=tables, cascade=None, scratch=None)


class TritonAttention:
    """Implements AttentionBackend on CUDA, or on any device with Triton's interpreter. Unwritten cache slots do not
    affect results.

    `dependent_rows`: number of tokens of a step from which kernels use programmatic dependent launch.
    """

    kernels: Kernels = "triton"

    def __init__(
        self, heads: Heads, dtype: torch.dtype, device: torch.device, *, dependent_rows: int,
        scratch: ScratchConfig | None = None,
    ) -> None:  # fmt: skip
        """`dtype`: of the cache. `scratch`: when chunks attend over a dequantized copy of their keys and values, if
        ever."""
        self._heads, self._dependent_rows, self._scratch_config = heads, dependent_rows, scratch
        self._scratch: PrefillScratch | None = None
        self._windows: dict[int | None, None] = {}  # the windows of all layers, without duplicates, in order
        self._has_chunks = False  # windows are chunks
        self._copies = True  # whether the kernel that reads a dequantized copy supports all layers
        self._prefill = prefill_config(heads.dim, dtype, device)
        self._reserved: Reserved | None = None
        self._side: SideBranch | None = None
        self._most_branched = 0  # largest step, in tokens, whose chunks attend beside its decodes

    def accept(self, rule: AttentionRule) -> None:
        """Accept every rule. Must be called before `reserve`."""
        self._windows[rule.window] = None
        self._has_chunks |= rule.is_chunked
        self._copies &= rule.slopes is None

    def reserve(self, caches: Sequence[LayerCache], max_rows: int, scratch_tokens: int = 0) -> None:
        """Allocate the work lists for steps of up to `max_rows` decodes. `caches`: one layer of each block table.

        If chunks attend over a dequantized copy, it has room for `scratch_tokens` tokens of all sequences of a step
        together.
        """
        key = caches[0].seen_keys
        if self._scratch_config is not None and self._copies and caches[0].scales is not None and None in self._windows:
            self._scratch = PrefillScratch(self._scratch_config, self._heads, scratch_tokens, key.device)
        cascade = allocate_cascade_plan(key, self._heads.num_query, max_rows, max_rows)
        self._reserved = Reserved.of(key, self._heads, max_rows, tuple(self._windows), cascade)
        self._reserve_branch(key.device)

    def _reserve_branch(self, device: torch.device) -> None:
        """Make the second stream, on CUDA devices."""
        tokens_per_tile = self._prefill.block_m / self._heads.num_query  # a tile belongs to one KV head
        self._most_branched = int(BRANCHED_TILES * num_processors(device) * tokens_per_tile)
        # Kernels that need a whole multiprocessor find none beside many small ones, unless they have priority.
        self._side = SideBranch(device, is_first=True) if device.type == "cuda" else None

    def is_dependent(self, num_tokens: int) -> bool:
        """Whether the kernels of a step use programmatic dependent launch."""
        return num_tokens >= self._dependent_rows

    @property
    def rows_per_unit(self) -> int:
        """How many rows of a group read their shared prefix together."""
        return self.memory.cascade.rows_per_unit

    @property
    def least_saved(self) -> int:
        """The number of tokens that a layer must not need to read again for a cascade to be faster."""
        return self.memory.least_saved

    def set_groups(self, groups: Sequence[SharedPrefix]) -> None:
        """Set the shared prefixes for plans with a cascade, from the next launch on, including captured ones. Only
        enqueues. Must not be called in a capture.

        Groups name decodes by their index in the step, all below the number of `lengths` that the step is planned with.
        """
        plan = self.memory.cascade
        self.memory.uploader.upload_into(plan.numbers, lay_out_groups(plan, groups))
        share_out_groups(plan)

    def rehearse_groups(self) -> None:
        """Launch the kernel of `set_groups` for the groups that are set. It changes nothing."""
        share_out_groups(self.memory.cascade)

    def num_tiles(self, spans: Spans) -> int:
        """Return how many tiles these chunks take."""
        group, block_m = self._heads.num_query // self._heads.num_kv, self._prefill.block_m
        return int((-(-spans[:, 2] * group // block_m)).sum())

    def tile_room(self, num_tokens: int) -> int:
        """Return how many tiles suffice for chunks of `num_tokens` tokens in total, if there are at most a few dozen
        chunks."""
        group, block_m = self._heads.num_query // self._heads.num_kv, self._prefill.block_m
        return -(-num_tokens * group // block_m) + min(num_tokens, SPARE_TILES)

    @property
    def has_scratch(self) -> bool:
        """Whether the chunks of some steps attend over scratch memory: a dequantized copy, or expanded latents."""
        return self._scratch is not None

    def scratch_passes(self, spans: Spans) -> int:
        """Return how often these chunks fill scratch memory in a layer: once if they attend over a dequantized copy, 0
        if they read the cache itself. Chunks over latents may take several passes."""
        return int(self._scratch is not None and self._scratch.is_faster(spans))

    def tiles(self, spans: Spans, room: int | None = None, *, scratch: int = 0) -> Tensor:
        """Return the tile list of a step's chunks, on the host, padded to `room`. With `scratch` (`scratch_passes`),
        the lists of the dequantized copy come before it."""
        group = self._heads.num_query // self._heads.num_kv
        tiles = lay_out_tiles(spans, group, self._prefill.block_m, room)  # type: ignore[arg-type]  # reads any lines of 4
        if not scratch:
            return tiles
        assert self._scratch is not None
        return torch.cat((self._scratch.lists(spans, self._prefill.block_m, room), tiles))

    def plan(
        self,
        rows: Tensor,  # [tokens], int32
        positions: Tensor,  # [tokens], int64
        lengths: Tensor,  # [decodes]: keys that each decode sees, including its own; 0: padding
        tables: Tensor,  # [all rows, max blocks], int32
        tiles: Tensor | None,  # the result of `tiles`, on the device
        *,
        cascade: bool = False,  # shared prefixes are read once per group (see `set_groups`)
        scratch: int = 0,  # with which `tiles` was made
    ) -> TritonPlan:
        """Make the plan of a step, by one launch per window that layers have. Valid until the next plan is made.

        The kernel configuration for decodes depends only on the number of `lengths`, padding included.
        """
        count = len(lengths)
        splits = self.memory.splits_for(count) if count else {}
        prefixes = self.memory.cascade if cascade and None in splits else None
        for window, split in splits.items():
            begins = None if prefixes is None or window is not None else prefixes.begins[:count]
            fill_split_plan(
                split, lengths, begins=begins, table_rows=rows[:count], window=window, chunked=self._has_chunks
            )
        copied = None
        if scratch:
            assert tiles is not None
            assert self._scratch is not None
            copied, tiles = self._scratch.plan(tiles, self._prefill)
        prefill = None if tiles is None else PrefillPlan(self._prefill, tiles)
        return TritonPlan(rows, positions, tables, lengths, splits, prefixes, prefill, copied)

    def defer_rotary(
        self, query: Tensor, cache: LayerCache, plan: TritonPlan, rule: AttentionRule, rotary: QueryRotary
    ) -> TritonPlan:
        """Return the plan for a layer in which the attention of chunks norms and rotates their queries as it loads
        them, or `plan` itself if it cannot, or there are no chunks: then all queries must be rotated before."""
        if plan.scratch is not None and rule.window is None:
            can_rotate = plan.scratch.memory.rotates_queries(query, plan.scratch, rule, rotary)
        else:
            memory = (query, cache.key, cache.value)
            can_rotate = plan.prefill is not None and rotates_queries(*memory, plan.prefill, rule, rotary, cache.scales)
        return replace(plan, rotary=rotary) if can_rotate else plan

    def attend(
        self,
        query: Tensor,
        key: Tensor,  # noqa: ARG002
        value: Tensor,  # noqa: ARG002
        cache: LayerCache,
        plan: TritonPlan,
        rule: AttentionRule,
    ) -> Tensor:
        """Attend for all tokens of a step. Chunks read their own keys from the cache, too: measured on an H200, that is
        not slower than reading `key`. Decodes, after their shared prefixes, run beside the chunks of the same step."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)  # [tokens, query heads, dim]
        chunks = partial(self._attend_chunks, query, cache, plan, rule, out)
        decodes = partial(self._attend_decodes, query, cache, plan, rule, out)
        self._attend_both(plan, chunks, decodes, len(query))
        return out.flatten(1)

    def _attend_both(self, plan: TritonPlan, chunks: Launch, decodes: Launch, num_tokens: int) -> None:
        """Launch the plan's chunks and decodes: on parallel branches if the step is small enough, otherwise one after
        the other. They write different tokens of one tensor, and share no other memory that either writes."""
        has_chunks = plan.prefill is not None or plan.scratch is not None or plan.expanded is not None
        if plan.num_decodes and has_chunks and self._side is not None and num_tokens <= self._most_branched:
            self._side.run_beside(chunks, decodes)
            return
        if plan.num_decodes:
            decodes()
        if has_chunks:
            chunks()

    def _attend_decodes(
        self, query: Tensor, cache: LayerCache, plan: TritonPlan, rule: AttentionRule, out: Tensor
    ) -> None:
        more: dict[str, Any] = {"scales": cache.scales, "dependent": self.is_dependent(len(query))}
        count, prefix = plan.num_decodes, None
        memory = (query[:count], cache.key, cache.value, plan.tables)
        if plan.cascade is not None and rule.window is None:
            prefix = attend_prefixes(*memory, plan.cascade, rule, **more)
        paged_decode(*memory, plan.splits[rule.window], rule, out=out[:count], prefix=prefix, **more)

    def _attend_chunks(
        self, query: Tensor, cache: LayerCache, plan: TritonPlan, rule: AttentionRule, out: Tensor
    ) -> None:
        more: dict[str, Any] = {"rotary": plan.rotary, "dependent": self.is_dependent(len(query))}
        if plan.scratch is not None and rule.window is None:
            plan.scratch.memory.attend(query, cache, plan.tables, plan.scratch, rule, out, **more)
        elif plan.prefill is not None:
            memory = (query, cache.key, cache.value, plan.tables)
            paged_prefill(*memory, plan.prefill, rule, out=out, scales=cache.scales, **more)

    @property
    def memory(self) -> Reserved:
        assert self._reserved is not None, "reserve() was not called"
        return self._reserved


@dataclass(frozen=True, slots=True)
class Reserved:
    """Preallocated work lists of decodes and of their shared prefixes. All work lists of a window share memory."""

    splits: tuple[tuple[int, Splits], ...]  # (most rows, lists), ascending
    cascade: CascadePlan
    least_saved: int
    uploader: Uploader

    @classmethod
    def of(
        cls, key: Tensor, heads: Heads, max_rows: int, windows: tuple[int | None, ...], cascade: CascadePlan
    ) -> Reserved:
        configs = decode_configs((heads.num_query, heads.num_kv), key.shape[3], key.dtype, key.device, max_rows)
        largest = max((config for _, config in configs), key=lambda config: config.programs)
        memory = allocate_split_plan(key, heads.num_query, max_rows, config=largest)
        lists = {window: with_own_lists(memory) for window in windows}
        splits = tuple(
            (most, {window: with_config(own, config) for window, own in lists.items()}) for most, config in configs
        )
        token_bytes = 2 * key.shape[1] * key.shape[3] * key.element_size()
        return cls(splits, cascade, -(-CASCADE_BYTES // token_bytes), Uploader(key.device))

    def splits_for(self, rows: int) -> Splits:
        if rows > self.splits[-1][0]:
            raise ValueError(f"{rows} decode rows, but {self.splits[-1][0]} were reserved for")
        return next(splits for most, splits in self.splits if rows <= most)
