"""Attention at the sizes that matter on a GPU: memory, inputs, launches and the truth they are held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.reference.attention import paged_attention
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

HEADS = {"8B": (32, 8), "0.6B": (16, 8)}  # query, key/value
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
DEVICE = torch.device("cuda")
LAYER_BYTES = 1 << 30  # caches of several layers are read in turn, so that none is left in the L2


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of one attention call: (first position, new tokens) each. One new token each: a decode."""

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
    prefix: int = 0  # cascade: its tokens
    split: SplitConfig | None = None
    tile: PrefillConfig | None = None

    @property
    def lengths(self) -> list[int]:
        return [start + count for start, count in self.sequences]

    @property
    def num_bytes(self) -> int:
        """Keys and values that must be read: shared ones once."""
        tokens = sum(self.lengths)
        if self.group:
            tokens -= self.prefix * (len(self.sequences) - len(self.sequences) // self.group)
        return 2 * tokens * self.heads[1] * self.dim * DTYPES[self.dtype].itemsize

    @property
    def flops(self) -> int:
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in self.sequences)
        return 4 * pairs * self.heads[0] * self.dim


class Bench:
    """A case in memory: caches of as many layers as it takes to leave the L2, and a launch for each."""

    def __init__(self, case: Case, seed: int = 0, layer_bytes: int = LAYER_BYTES) -> None:
        torch.manual_seed(seed)
        self.case = case
        query_heads, kv_heads = case.heads
        self.tables, num_blocks = self._tables()
        shape, dtype = (num_blocks, kv_heads, case.block, case.dim), DTYPES[case.dtype]
        layer = 2 * num_blocks * kv_heads * case.block * case.dim * dtype.itemsize
        num_layers = max(1, min(16, layer_bytes // layer))
        self.layers = [(self._random(shape, dtype), self._random(shape, dtype)) for _ in range(num_layers)]
        self.tokens = sum(count for _, count in case.sequences)
        self.query = self._random((self.tokens, query_heads, case.dim), torch.bfloat16)
        self.out = torch.empty_like(self.query)
        sinks = torch.randn(query_heads, device=DEVICE) if case.sinks else None
        scales = (0.5, 1.5) if case.dtype == "fp8" else (1.0, 1.0)
        self.rule = AttentionRule(case.dim**-0.5, case.softcap, case.window, sinks, *scales)
        self._launch = {"decode": self._decode, "prefill": self._prefill, "cascade": self._cascade}[case.kind]()

    def launches(self) -> list[Callable[[], None]]:
        return [lambda keys=keys, values=values: self._launch(keys, values) for keys, values in self.layers]

    def error(self, sample: int = 6) -> float:
        """Largest difference from the reference over some sequences, after one launch over poisoned output."""
        self.out.fill_(float("nan"))
        keys, values = self.layers[-1]
        self._launch(keys, values)
        worst, begin = 0.0, 0
        chosen = set(torch.linspace(0, len(self.case.sequences) - 1, sample).long().tolist())
        for number, (start, count) in enumerate(self.case.sequences):
            if number in chosen:
                last = min(count, 64)  # the newest tokens: all scores of a long chunk would not fit
                span = slice(begin + count - last, begin + count)
                wanted = paged_attention(
                    self.query[span].float(), keys, values, self.tables[number], start + count - last, self.rule.scale,
                    window=self.rule.window, softcap=self.rule.softcap, sinks=self.rule.sinks,
                    key_scale=self.rule.key_scale, value_scale=self.rule.value_scale,
                )  # fmt: skip
                difference = (self.out[span].float() - wanted).abs().max().item()
                worst = max(worst, difference if difference == difference else float("inf"))
            begin += count
        return worst

    def _tables(self) -> tuple[Tensor, int]:
        """Scattered blocks, the rows of a group holding the same first ones; and how many blocks there are."""
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

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).to(dtype)

    def _decode(self) -> Callable[[Tensor, Tensor], None]:
        case = self.case
        self.plan = allocate_split_plan(self.layers[0][0], case.heads[0], len(case.sequences), config=case.split)
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
        fill_split_plan(self.plan, self.lengths, window=case.window)
        torch.cuda.synchronize()
        return lambda keys, values: paged_decode(
            self.query, keys, values, self.tables, self.plan, self.rule, out=self.out, dependent=case.dependent
        )  # type: ignore[func-returns-value]

    def _prefill(self) -> Callable[[Tensor, Tensor], None]:
        case, begin, chunks = self.case, 0, []
        for row, (start, count) in enumerate(case.sequences):
            chunks.append((begin, start, count, row))
            begin += count
        config = case.tile or prefill_config(case.dim, DTYPES[case.dtype], DEVICE)
        tiles = lay_out_tiles(chunks, case.heads[0] // case.heads[1], config.block_m)
        plan = PrefillPlan(config, tiles.to(DEVICE))
        return lambda keys, values: paged_prefill(self.query, keys, values, self.tables, plan, self.rule, out=self.out)  # type: ignore[func-returns-value]

    def _cascade(self) -> Callable[[Tensor, Tensor], None]:
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

        def launch(keys: Tensor, values: Tensor) -> None:
            part = attend_prefixes(self.query, keys, values, self.tables, cascade, self.rule, dependent=case.dependent)
            more = {"out": self.out, "prefix": part, "dependent": case.dependent}
            paged_decode(self.query, keys, values, self.tables, plan, self.rule, **more)  # type: ignore[arg-type]

        return launch
