"""The native backend reads shared first blocks once for several sequences, with bitwise equal results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.native.loader import why_not_native
from quire.runtime.attention.backend import AttentionBatch, ChunkSpan, LayerCache, layer_cache
from quire.runtime.attention.reference import ReferenceAttention
from quire.runtime.attention.registry import make_backend
from quire.runtime.layers.weights import Placement

CPU = torch.device("cpu")
MISSING = why_not_native(torch.float32, CPU)
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

BLOCKS = 400


@dataclass(frozen=True)
class Sequence:
    """`shared` blocks from `family` on, then own ones; the last `tokens` of `length` positions are computed."""

    length: int
    shared: int = 0
    family: int = 0
    tokens: int = 1


def tables_of(sequences: list[Sequence], size: int) -> list[list[int]]:
    free, tables = iter(range(100, BLOCKS)), []
    for sequence in sequences:
        needed = -(-sequence.length // size)
        common = min(sequence.shared, needed)
        tables.append(
            [*range(sequence.family, sequence.family + common), *(next(free) for _ in range(needed - common))]
        )
    return tables


def attend(
    sequences: list[Sequence],
    tables: list[list[int]],
    query: list[Tensor],
    cache: LayerCache,
    heads: Heads,
    *,
    plain: bool,
) -> list[Tensor]:
    """What each sequence's tokens find, computed in one batch."""
    size = cache.key.shape[2]
    decodes = [i for i, sequence in enumerate(sequences) if sequence.tokens == 1]
    chunked = [i for i in range(len(sequences)) if i not in decodes]
    widest = max((len(tables[i]) for i in decodes), default=0)
    ids = [tables[i] + [0] * (widest - len(tables[i])) for i in decodes]
    spans, begin = [], len(decodes)
    for i in chunked:
        start = sequences[i].length - sequences[i].tokens
        spans.append(ChunkSpan(begin, start, sequences[i].tokens, torch.tensor(tables[i])))
        begin += sequences[i].tokens
    lengths = np.array([sequences[i].length for i in decodes], dtype=np.int64)
    batch = AttentionBatch(
        lengths, torch.tensor(ids, dtype=torch.int64).view(len(decodes), widest), tuple(spans), size, cache
    )
    placement = Placement(cache.key.dtype, CPU)
    backend = ReferenceAttention() if plain else make_backend("native", heads, torch.float32, placement)
    order = decodes + chunked
    where = [
        (tables[i], p) for i in order for p in range(sequences[i].length - sequences[i].tokens, sequences[i].length)
    ]
    key = torch.stack([cache.key[table[p // size], :, p % size] for table, p in where])
    value = torch.stack([cache.value[table[p // size], :, p % size] for table, p in where])
    rows = torch.cat([query[i] for i in order])
    out = backend.attend(rows, key, value, cache, backend.prepare(batch), AttentionRule(heads.dim**-0.5))
    parts = dict(zip(order, out.split([sequences[i].tokens for i in order]), strict=True))
    return [parts[i] for i in range(len(sequences))]


ALIKE = [Sequence(100 + i, shared=6) for i in range(24)]
TREE = [
    Sequence(300 + 40 * i, shared=shared, family=family)
    for family, shared in ((0, 2), (0, 9), (0, 17), (40, 12))
    for i in range(3)
]
MIXED = [
    Sequence(90, shared=4), Sequence(71, shared=4, tokens=9), Sequence(300), Sequence(64, shared=4), Sequence(1),
    Sequence(130, shared=4, tokens=40), Sequence(20, shared=4, tokens=20), Sequence(280, shared=16),
    Sequence(280, shared=16),
]  # fmt: skip
BESIDE = [Sequence(40 + i) for i in range(20)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "heads",
    [Heads(9, 3, 64), Heads(4, 4, 16), Heads(8, 1, 80), Heads(40, 1, 8), Heads(16, 1, 96, 64), Heads(6, 1, 28, 20)],
)
@pytest.mark.parametrize("sequences", [ALIKE, TREE, MIXED, BESIDE], ids=["alike", "tree", "mixed", "beside"])
@pytest.mark.parametrize("size", [4, 16])
def test_a_sequence_gets_the_same_result_alone_and_beside_sequences_that_share_its_blocks(
    size: int, sequences: list[Sequence], heads: Heads, dtype: torch.dtype
) -> None:
    if size == 4:
        sequences = [Sequence(-(-s.length // 4), s.shared, s.family, -(-s.tokens // 4)) for s in sequences]
    generator = torch.Generator().manual_seed(size)
    shape = (BLOCKS, heads.num_kv, size, heads.dim)
    numbers = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    cache = layer_cache(torch.stack(numbers), heads, 0)
    query = [torch.randn(s.tokens, heads.num_query, heads.dim, generator=generator).to(dtype) for s in sequences]
    tables = tables_of(sequences, size)
    together = attend(sequences, tables, query, cache, heads, plain=False)
    expected = attend(sequences, tables, query, cache, heads, plain=True)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for i, sequence in enumerate(sequences):
        torch.testing.assert_close(together[i], expected[i], rtol=tolerance, atol=tolerance)
        (alone,) = attend([sequence], [tables[i]], [query[i]], cache, heads, plain=False)
        assert torch.equal(alone, together[i])
