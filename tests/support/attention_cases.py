"""Paged sequences with scattered blocks for attention kernels. Slots that no sequence holds are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.reference.attention import paged_attention
from triton_cases import DEVICE, ON_GPU, TOLERANCE

FLOAT8 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float16]


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class Paged:
    """Caches, and the block table and the length of each sequence."""

    heads: Heads
    key_cache: Tensor  # [blocks, kv heads, block, dim]
    value_cache: Tensor
    tables: Tensor  # [sequences, max blocks], int32
    lengths: tuple[int, ...]

    @property
    def query_dtype(self) -> torch.dtype:
        return DTYPES[0] if self.key_cache.dtype == FLOAT8 else self.key_cache.dtype

    def queries(self, tokens: int, seed: int = 1) -> Tensor:
        """[tokens, query heads, dim], strided as a part of a wider product is."""
        generator = torch.Generator().manual_seed(seed)
        wide = torch.randn(tokens, self.heads.query + 2, self.heads.dim, generator=generator)
        return wide.to(DEVICE, self.query_dtype)[:, : self.heads.query]

    def expected(self, query: Tensor, sequence: int, start: int, rule: AttentionRule) -> Tensor:
        """What tokens at positions start .. of a sequence must get, in float32."""
        return paged_attention(
            query.float(), self.key_cache, self.value_cache, self.tables[sequence], start, rule.scale,
            window=rule.window, is_chunked=rule.is_chunked, softcap=rule.softcap, sinks=rule.sinks,
            key_scale=rule.key_scale, value_scale=rule.value_scale,
        )  # fmt: skip


def paged(
    lengths: Sequence[int],
    heads: Heads,
    block_size: int,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    shared: Sequence[tuple[Sequence[int], int]] = (),
) -> Paged:
    """Random sequences. `shared` names groups of them that hold the same first blocks, and how many blocks."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    free = torch.randperm(sum(needed) + 1, generator=generator).tolist()
    tables = torch.zeros(len(lengths), max(1, *needed), dtype=torch.int32)
    for sequence, count in enumerate(needed):
        tables[sequence, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
    for members, blocks in shared:
        tables[list(members), :blocks] = tables[members[0], :blocks]
    shape = (sum(needed) + 1, heads.kv, block_size, heads.dim)
    caches = []
    for _ in range(2):
        cache = torch.full(shape, float("nan"))
        for sequence, length in enumerate(lengths):
            for position in range(length):
                numbers = torch.randn(heads.kv, heads.dim, generator=generator)
                cache[tables[sequence, position // block_size], :, position % block_size] = numbers
        caches.append(cache.to(dtype).to(DEVICE))
    return Paged(heads, caches[0], caches[1], tables.to(DEVICE), tuple(lengths))


def apart(case: Paged) -> Paged:
    """The same, with other layers' blocks of NaN before and behind each block."""
    caches = []
    for cache in (case.key_cache, case.value_cache):
        kv = cache.shape[1]
        wide = torch.full((len(cache), 3 * kv, *cache.shape[2:]), float("nan"), dtype=cache.dtype, device=DEVICE)
        wide[:, kv : 2 * kv] = cache
        caches.append(wide[:, kv : 2 * kv])
    return replace(case, key_cache=caches[0], value_cache=caches[1])


def rule_for(heads: Heads, **features: object) -> AttentionRule:
    """The usual scale; sinks=True makes some."""
    rule = AttentionRule(scale=heads.dim**-0.5)
    if features.pop("sinks", False):
        generator = torch.Generator().manual_seed(5)
        rule = replace(rule, sinks=torch.randn(heads.query, generator=generator).to(DEVICE))
    return replace(rule, **features)  # type: ignore[arg-type]


def close(got: Tensor, wanted: Tensor, cache: torch.dtype | None = None) -> None:
    """Equal but for rounding; a float8 cache is multiplied in float16."""
    tolerance = max(TOLERANCE[got.dtype], TOLERANCE[torch.float16] if cache == FLOAT8 else 0.0)
    torch.testing.assert_close(got.float(), wanted.float(), atol=tolerance, rtol=tolerance)
