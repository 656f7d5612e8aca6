"""Attention cases at sizes that matter on a GPU: their memory, inputs and launches, and the reference results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule, CacheScales
from quire.kernels.reference.attention import paged_attention
from quire.kernels.reference.cache_quantize import INT4, group_of, quantize_heads, split_heads
from quire.kernels.triton import attention_prefill
from quire.kernels.triton.attention_cascade import (
    SharedPrefix,
    allocate_cascade_plan,
    attend_prefixes,
    lay_out_groups,
    share_out_groups,
)
from quire.kernels.triton.attention_config import PrefillConfig, SplitConfig, prefill_config
from quire.kernels.triton.attention_decode import paged_decode
from quire.kernels.triton.attention_prefill import PrefillPlan, lay_out_tiles, paged_prefill
from quire.kernels.triton.attention_schedule import allocate_split_plan, fill_split_plan
from quire.kernels.triton.cache_dequantize import dequantize_pages, lay_out_pages

HEADS = {"8B": (32, 8), "0.6B": (16, 8)}  # query, key/value
DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": INT4,
}  # fmt: skip
Layer = tuple[Tensor, Tensor, CacheScales | None]  # keys, values
Launch = Callable[[Tensor, Tensor, CacheScales | None], None]
DEVICE = torch.device("cuda")
LAYER_BYTES = 1 << 30  # caches of several layers are read in turn, so that none stays in the L2 cache


@dataclass(frozen=True, slots=True)
class Case:
    """The sequences of one attention call, as (first position, new tokens). One new token each is a decode."""

    name: str
    kind: str  # decode, prefill or cascade
    sequences: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = HEADS["8B"]
    dim: int = 128
    block: int = 16
    dtype: str = "bf16"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dependent: bool = False
    group: int = 0  # cascade: rows that share a prefix
    prefix: int = 0  # cascade: tokens of the prefix
    split: SplitConfig | None = None
    tile: PrefillConfig | None = None
    scales: bool = False  # heads have scales, as in the engine's quantized caches
    copied: int = 0  # prefill: attend over a dequantized copy, with this many tokens per page
    portable: bool = False  # prefill: use the portable kernel, even on Hopper GPUs

    @property
    def lengths(self) -> list[int]:
        return [start + count for start, count in self.sequences]

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values that must be read, shared ones once."""
        tokens = sum(self.lengths)
        if self.group:
            tokens -= self.prefix * (len(self.sequences) - len(self.sequences) // self.group)
        return 2 * tokens * self.heads[1] * self.dim * DTYPES[self.dtype].itemsize

    @property
    def flops(self) -> int:
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in self.sequences)
        return 4 * pairs * self.heads[0] * self.dim


class Bench:
    """A case in memory: caches of enough layers to exceed the L2 cache, and a launch for each."""

    def __init__(self, case: Case, seed: int = 0, layer_bytes: int = LAYER_BYTES) -> None:
        torch.manual_seed(seed)
        self.case = case
        query_heads, kv_heads = case.heads
        self.tables, num_blocks = self._tables()
        shape, dtype = (num_blocks, kv_heads, case.block, case.dim), DTYPES[case.dtype]
        layer = 2 * num_blocks * kv_heads * case.block * case.dim * dtype.itemsize
        num_layers = max(1, min(16, layer_bytes // layer))
        self.layers = [self._layer(shape, dtype) for _ in range(num_layers)]
        self.tokens = sum(count for _, count in case.sequences)
        self.query = self._random((self.tokens, query_heads, case.dim), torch.bfloat16)
        self.out = torch.empty_like(self.query)
        sinks = torch.randn(query_heads, device=DEVICE) if case.sinks else None
        scales = (0.5, 1.5) if case.dtype == "fp8" and not case.scales else (1.0, 1.0)
        self.rule = AttentionRule(case.dim**-0.5, case.softcap, case.window, sinks, *scales)
        self._launch = {"decode": self._decode, "prefill": self._prefill, "cascade": self._cascade}[case.kind]()

    def launches(self) -> list[Callable[[], None]]:
        return [lambda layer=layer: self._launch(*layer) for layer in self.layers]

    def error(self, sample: int = 6) -> float:
        """Return the largest difference from the reference over some sequences, after one launch with poisoned
        output."""
        self.out.fill_(float("nan"))
        keys, values, scales = self.layers[-1]
        key_scales, value_scales = scales or (None, None)
        self._launch(keys, values, scales)
        worst, begin = 0.0, 0
        chosen = set(torch.linspace(0, len(self.case.sequences) - 1, sample).long().tolist())
        for number, (start, count) in enumerate(self.case.sequences):
            if number in chosen:
                last = min(count, 64)  # the newest tokens, because all scores of a long chunk would not fit
                span = slice(begin + count - last, begin + count)
                wanted = paged_attention(
                    self.query[span].float(), keys, values, self.tables[number], start + count - last, self.rule.scale,
                    window=self.rule.window, softcap=self.rule.softcap, sinks=self.rule.sinks,
                    key_scale=self.rule.key_scale, value_scale=self.rule.value_scale, key_scales=key_scales,
                    value_scales=value_scales,
                )  # fmt: skip
                difference = (self.out[span].float() - wanted).abs().max().item()
                worst = max(worst, difference if difference == difference else float("inf"))
            begin += count
        return worst

    def _tables(self) -> tuple[Tensor, int]:
        """Return block tables with scattered blocks, in which the rows of a group share their first blocks, and the
        number of blocks."""
        needed = [-(-length // self.case.block) for length in self.case.lengths]
        width = -(-max(needed) // 16) * 16
        free, tables = torch.randperm(sum(needed)), torch.zeros(len(needed), width, dtype=torch.int32)
        begin = 0
        for row, count in enumerate(needed):
            tables[row, :count] = free[begin : begin + count]
            begin += count
            if self.case.group:
                shared = self.case.prefix // self.case.block
                tables[row, :shared] = tables[row // self.case.group * self.case.group, :shared]
        return tables.to(DEVICE), sum(needed)

    def _layer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layer:
        if not self.case.scales:
            return self._random(shape, dtype), self._random(shape, dtype), None
        (keys, of_keys), (values, of_values) = (self._quantized(shape, dtype) for _ in range(2))
        return keys, values, (of_keys, of_values)

    def _quantized(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return random heads in the format of a quantized cache, and their scales, which follow the head in a
        block."""
        blocks, kv_heads, size, dim = shape
        head = dim // 2 + 4 * (dim // group_of(dim)) if dtype == INT4 else dim + 4
        memory = torch.empty(blocks, kv_heads, size * head, dtype=torch.uint8, device=DEVICE)
        held, scales = split_heads(memory, dtype, size, dim)
        numbers, own = quantize_heads(self._random(shape, torch.bfloat16), dtype)
        held.view(torch.uint8).copy_(numbers.view(torch.uint8))
        scales.copy_(own)
        return held, scales

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).to(dtype)

    def _decode(self) -> Launch:
        case = self.case
        self.plan = allocate_split_plan(self.layers[0][0], case.heads[0], len(case.sequences), config=case.split)
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
        fill_split_plan(self.plan, self.lengths, window=case.window)
        torch.cuda.synchronize()
        return lambda keys, values, scales: paged_decode(
            self.query, keys, values, self.tables, self.plan, self.rule, out=self.out, scales=scales,
            dependent=case.dependent,
        )  # type: ignore[func-returns-value]  # fmt: skip

    def _prefill(self) -> Launch:
        case, begin, chunks = self.case, 0, []
        for row, (start, count) in enumerate(case.sequences):
            chunks.append((begin, start, count, row))
            begin += count
        config = case.tile or prefill_config(case.dim, DTYPES[case.dtype], DEVICE)
        if case.copied:
            return self._copied(chunks, config)
        tiles = lay_out_tiles(chunks, case.heads[0] // case.heads[1], config.block_m)
        plan = PrefillPlan(config, tiles.to(DEVICE))

        def launch(keys: Tensor, values: Tensor, scales: CacheScales | None) -> None:
            forced = patch.object(attention_prefill, "fits_hopper", return_value=False)
            with forced if case.portable else nullcontext():
                paged_prefill(self.query, keys, values, self.tables, plan, self.rule, out=self.out, scales=scales)

        return launch

    def _copied(self, chunks: list[tuple[int, int, int, int]], config: PrefillConfig) -> Launch:
        """Launch as the engine does on Hopper GPUs: dequantize everything that chunks see, then attend over the
        copy."""
        case, page = self.case, self.case.copied
        rows, lengths = np.arange(len(chunks)), np.array(case.lengths)
        capacity = int((-(-lengths // page)).sum())
        numbers, firsts = lay_out_pages(rows, lengths, page, capacity)
        pages = torch.from_numpy(numbers).to(DEVICE)
        shape = (capacity, case.heads[1], page, case.dim)
        copy = tuple(torch.empty(shape, dtype=self.query.dtype, device=DEVICE) for _ in range(2))
        moved = [(*chunk[:3], int(first)) for chunk, first in zip(chunks, firsts, strict=True)]
        tiles = lay_out_tiles(moved, case.heads[0] // case.heads[1], config.block_m)
        plan = PrefillPlan(config, tiles.to(DEVICE))
        table = torch.arange(capacity, dtype=torch.int32, device=DEVICE)[:, None]

        def launch(keys: Tensor, values: Tensor, scales: CacheScales | None) -> None:
            assert scales is not None, "only caches with scales are dequantized"
            dequantize_pages((keys, values), scales, self.tables, pages, copy, dependent=case.dependent)  # type: ignore[arg-type]
            paged_prefill(self.query, *copy, table, plan, self.rule, out=self.out, dependent=case.dependent)

        return launch

    def _cascade(self) -> Launch:
        case, rows = self.case, len(self.case.sequences)
        cache = self.layers[0][0]
        cascade = allocate_cascade_plan(cache, case.heads[0], rows, rows, config=case.split)
        starts = range(0, rows, case.group)
        groups = [SharedPrefix(tuple(range(i, i + case.group)), case.prefix, i) for i in starts]
        cascade.numbers.copy_(torch.from_numpy(lay_out_groups(cascade, groups)))
        share_out_groups(cascade)
        plan = allocate_split_plan(cache, case.heads[0], rows)
        fill_split_plan(plan, torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE), begins=cascade.begins)
        torch.cuda.synchronize()

        def launch(keys: Tensor, values: Tensor, scales: CacheScales | None) -> None:
            more = {"scales": scales, "dependent": case.dependent}
            part = attend_prefixes(self.query, keys, values, self.tables, cascade, self.rule, **more)  # type: ignore[arg-type]
            more |= {"out": self.out, "prefix": part}
            paged_decode(self.query, keys, values, self.tables, plan, self.rule, **more)  # type: ignore[arg-type]

        return launch
