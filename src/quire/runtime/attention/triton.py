"""The GPU backend: decode rows by split attention over a shared work list, prompt chunks by packed tiles.

Both read the block tables of the persistent rows in place, so a step gathers no tables; its plan is made once and
read by every layer. Chunks over a quantized cache may attend over a dequantized copy instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
from quire.kernels.triton.attention_prefill import PrefillPlan, lay_out_tiles, paged_prefill
from quire.kernels.triton.attention_schedule import (
    SplitPlan,
    allocate_split_plan,
    fill_split_plan,
    with_config,
    with_own_lists,
)
from quire.kernels.triton.launch import num_processors
from quire.runtime.attention.backend import Kernels, LayerCache
from quire.runtime.attention.branches import Launch, SideBranch
from quire.runtime.attention.prefill_scratch import PrefillScratch, ScratchConfig, ScratchPlan, Spans
from quire.runtime.transfer import Courier

SPARE_TILES = 48  # that are not full, one at most of each chunk
CASCADE_BYTES = 40 << 20  # of keys and values that are read while a cascade's second launch ramps up and down
# Where the chunks of a step would give each multiprocessor more tiles than this, they fill the device by themselves,
# and attention kernels run in turn. An estimate: `python -m benchmarks.gpu.mixed_attention` times both ways.
BRANCHED_TILES = 8
Splits = Mapping[int | None, SplitPlan]  # by the window of the layers that read it


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step's tokens as the kernels see them: the first `num_decodes` are rows that decode, the others chunks.

    A negative row marks a token of padding: nothing of it is read, written or promised.
    """

    rows: Tensor  # [tokens], int32: whose table
    positions: Tensor  # [tokens], int64
    tables: Tensor  # [all rows, max blocks], int32
    num_decodes: int
    splits: Splits  # of the decode rows; none where there are no such rows
    cascade: CascadePlan | None  # of their shared prefixes, for layers without a window
    prefill: PrefillPlan | None  # of the chunks
    scratch: ScratchPlan | None = None  # of the chunks in layers without a window, in place of `prefill`

    local: TritonPlan | None = None  # of layers with a window, where their heads are others

    def over(self, tables: Tensor) -> TritonPlan:
        """The same step, for layers that read other tables and have a window."""
        return replace(self.local or self, tables=tables, cascade=None, scratch=None)


class TritonAttention:
    """CUDA, or any device under Triton's interpreter. Slots of the cache that were not written change nothing.

    `dependent_rows`: tokens of a step from which kernels are launched while the ones before them still run.
    """

    kernels: Kernels = "triton"

    def __init__(
        self, heads: Heads, dtype: torch.dtype, device: torch.device, *, dependent_rows: int,
        scratch: ScratchConfig | None = None,
    ) -> None:  # fmt: skip
        """dtype: of the cache; scratch: whether and when chunks attend over a dequantized copy of what they see."""
        self._heads, self._dependent_rows, self._scratch_config = heads, dependent_rows, scratch
        self._scratch: PrefillScratch | None = None
        self._windows: dict[int | None, None] = {}  # of all layers, each once, in their order
        self._prefill = prefill_config(heads.dim, dtype, device)
        self._reserved: Reserved | None = None
        self._side: SideBranch | None = None
        self._most_branched = 0  # tokens of a step whose chunks attend beside its decode rows

    def accept(self, rule: AttentionRule) -> None:
        """All of them, before `reserve`."""
        self._windows[rule.window] = None

    def reserve(self, caches: Sequence[LayerCache], max_rows: int, scratch_tokens: int = 0) -> None:
        """Allocate the work lists for steps of up to `max_rows` decode rows; caches: one of a layer of each table.

        Where chunks attend over a dequantized copy, it has room for `scratch_tokens` of all sequences of a step."""
        key = caches[0].seen_keys
        if self._scratch_config is not None and caches[0].scales is not None and None in self._windows:
            self._scratch = PrefillScratch(self._scratch_config, self._heads, scratch_tokens, key.device)
        cascade = allocate_cascade_plan(key, self._heads.num_query, max_rows, max_rows)
        self._reserved = Reserved.of(key, self._heads, max_rows, tuple(self._windows), cascade)
        self._reserve_branch(key.device)

    def _reserve_branch(self, device: torch.device) -> None:
        """Have a second stream, where the device has streams."""
        tokens_per_tile = self._prefill.block_m / self._heads.num_query  # a tile is under one key/value head
        self._most_branched = int(BRANCHED_TILES * num_processors(device) * tokens_per_tile)
        # Kernels that need a whole multiprocessor find none beside many small ones, unless they are first.
        self._side = SideBranch(device, is_first=True) if device.type == "cuda" else None

    def is_dependent(self, num_tokens: int) -> bool:
        """Whether kernels of a step are launched while the ones before them still run."""
        return num_tokens >= self._dependent_rows

    @property
    def rows_per_unit(self) -> int:
        """How many rows of a group read their prefix together."""
        return self.memory.cascade.rows_per_unit

    @property
    def least_saved(self) -> int:
        """Tokens that groups must save a layer from reading for a cascade to take less time than it costs."""
        return self.memory.least_saved

    def set_groups(self, groups: Sequence[SharedPrefix]) -> None:
        """What plans with a cascade mean from the next launch on, captured ones too. Only enqueues; not in a capture.

        Groups name decode rows by their places in the step, all below the `lengths` that the step is planned with.
        """
        plan = self.memory.cascade
        self.memory.courier.send_into(plan.numbers, lay_out_groups(plan, groups))
        share_out_groups(plan)

    def num_tiles(self, spans: Spans) -> int:
        """Tiles that these chunks take."""
        group, block_m = self._heads.num_query // self._heads.num_kv, self._prefill.block_m
        return int((-(-spans[:, 2] * group // block_m)).sum())

    def tile_room(self, num_tokens: int) -> int:
        """Tiles to have room for where chunks are `num_tokens` long together and not more than a few dozen."""
        group, block_m = self._heads.num_query // self._heads.num_kv, self._prefill.block_m
        return -(-num_tokens * group // block_m) + min(num_tokens, SPARE_TILES)

    @property
    def has_scratch(self) -> bool:
        """Whether chunks of some steps attend over a dequantized copy of what they see."""
        return self._scratch is not None

    def takes_scratch(self, spans: Spans) -> bool:
        """Whether these chunks do."""
        return self._scratch is not None and self._scratch.pays(spans)

    def tiles(self, spans: Spans, room: int | None = None, *, scratch: bool = False) -> Tensor:
        """The tile list of a step's chunks, on the host, padded to `room`; with `scratch`, behind the lists of their
        dequantized copy."""
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
        lengths: Tensor,  # [decodes]: keys each decode row sees, its own included; 0: padding
        tables: Tensor,  # [all rows, max blocks], int32
        tiles: Tensor | None,  # what `tiles` made, on the device
        *,
        cascade: bool = False,  # prefixes are read once for each of the groups that are set
        scratch: bool = False,  # `tiles` was made with it
    ) -> TritonPlan:
        """The plan of a step, by one launch for each window that layers have. Holds until the next one is made.

        How decode rows are run depends on how many `lengths` there are, padding included, and on nothing else.
        """
        count = len(lengths)
        splits = self.memory.splits_for(count) if count else {}
        prefixes = self.memory.cascade if cascade and None in splits else None
        for window, split in splits.items():
            begins = None if prefixes is None or window is not None else prefixes.begins[:count]
            fill_split_plan(split, lengths, begins=begins, table_rows=rows[:count], window=window)
        copied = None
        if scratch:
            assert tiles is not None
            assert self._scratch is not None
            copied, tiles = self._scratch.plan(tiles, self._prefill)
        prefill = None if tiles is None else PrefillPlan(self._prefill, tiles)
        return TritonPlan(rows, positions, tables, count, splits, prefixes, prefill, copied)

    def attend(
        self,
        query: Tensor,
        key: Tensor,  # noqa: ARG002
        value: Tensor,  # noqa: ARG002
        cache: LayerCache,
        plan: TritonPlan,
        rule: AttentionRule,
    ) -> Tensor:
        """Chunks read their own keys from the cache too: measured on an H200, that is no slower than `key` itself.
        Decode rows, after the prefixes that they share, attend beside the chunks of the same step."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)  # [tokens, query heads, dim]
        chunks = partial(self._attend_chunks, query, cache, plan, rule, out)
        decodes = partial(self._attend_decodes, query, cache, plan, rule, out)
        self._attend_both(plan, chunks, decodes, len(query))
        return out.flatten(1)

    def _attend_both(self, plan: TritonPlan, chunks: Launch, decodes: Launch, num_tokens: int) -> None:
        """Launch what the plan has of the two: on parallel branches where that pays, else one after the other. They
        write different tokens of one tensor, and have no other memory in common that either writes."""
        has_chunks = plan.prefill is not None or plan.scratch is not None
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
        dependent = self.is_dependent(len(query))
        if plan.scratch is not None and rule.window is None:
            copied = plan.scratch
            copied.memory.attend(query, cache, plan.tables, copied, rule, out, dependent=dependent)
        elif plan.prefill is not None:
            memory = (query, cache.key, cache.value, plan.tables)
            paged_prefill(*memory, plan.prefill, rule, out=out, scales=cache.scales, dependent=dependent)

    @property
    def memory(self) -> Reserved:
        assert self._reserved is not None, "reserve() was not called"
        return self._reserved


@dataclass(frozen=True, slots=True)
class Reserved:
    """Work lists in memory of their own: those of decode rows, all of a window in one place, and that of their
    prefixes."""

    splits: tuple[tuple[int, Splits], ...]  # ascending: the most rows that each is for
    cascade: CascadePlan
    least_saved: int
    courier: Courier

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
        return cls(splits, cascade, -(-CASCADE_BYTES // token_bytes), Courier(key.device))

    def splits_for(self, rows: int) -> Splits:
        if rows > self.splits[-1][0]:
            raise ValueError(f"{rows} decode rows, but {self.splits[-1][0]} were reserved for")
        return next(splits for most, splits in self.splits if rows <= most)
