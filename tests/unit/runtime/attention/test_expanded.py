"""Which form of attention over latents prompt chunks take, and that both give the same results beside decodes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.config.attention_memory import EXPANDED_PAGE, EXPANDED_PASSES
from quire.config.model import Heads, Latent
from quire.kernels.attention_rule import AttentionRule
from quire.runtime.attention.backend import LayerCache
from tiny_models import DEVICE

pytest.importorskip("triton")

import triton_cases  # noqa: F401  float8 as hardware rounds it
from quire.kernels.triton.attention_config import PrefillConfig
from quire.kernels.triton.attention_expanded import PAGE
from quire.runtime.attention import expanded
from quire.runtime.attention.expanded import ExpandedScratch
from quire.runtime.attention.triton_latent import LatentTritonAttention
from quire.runtime.layers.head_linear import TritonHeads

TINY, HEADS = Latent(rank=16, nope_dim=8, rope_dim=4, value_dim=12), Heads(3, 1, 20, 16)
LITE = Latent(rank=512, nope_dim=128, rope_dim=64, value_dim=128)
SIZE, BLOCKS, RULE = 4, 60, AttentionRule(0.3)
ABSORBED = PrefillConfig(64, 64, 8, 2)
Chunk = tuple[int, int]  # first position, tokens


def spans_of(chunks: list[Chunk], begin: int = 0) -> np.ndarray:
    begins = begin + np.cumsum([0, *(count for _, count in chunks)])
    return np.array([(first, *chunk, i) for i, (first, chunk) in enumerate(zip(begins, chunks, strict=False))])


@pytest.fixture
def lite(monkeypatch: pytest.MonkeyPatch) -> ExpandedScratch:
    """Scratch memory of DeepSeek-V2-Lite on a large GPU, without its memory."""
    monkeypatch.setattr(expanded, "allocate_expanded", lambda *_: None)
    monkeypatch.setattr(expanded, "num_processors", lambda _: 132)
    return ExpandedScratch(16, LITE, 16_384, torch.bfloat16, torch.device(DEVICE))


@pytest.mark.parametrize(
    ("chunks", "passes"),
    [
        ([(0, 2_048)], 1),
        ([(0, 512)] * 4, 1),
        ([(0, 200)] * 10, 1),
        ([(6_144, 2_048)], 1),
        ([(0, 1_900), (8_192, 1)], 1),
        ([(8_192, 16)], 1),  # alone, its few tiles of the absorbed form would take longer
        ([(2_048, 128)] * 7, 1),
        ([(1_900, 16)] * 8, 0),
        ([(1_024, 16)] * 14, 0),
        ([], 0),
    ],
)
def test_chunks_are_expanded_if_enough_of_their_rows_read_an_average_key(
    chunks: list[Chunk], passes: int, lite: ExpandedScratch
) -> None:
    assert lite.passes(spans_of(chunks).reshape(-1, 4), ABSORBED) == passes


def test_long_contexts_take_several_passes_with_a_part_of_the_heads(lite: ExpandedScratch) -> None:
    found = [lite.passes(spans_of([(start, 4_096)]), ABSORBED) for start in (12_000, 20_000, 36_000, 60_000, 80_000)]
    assert found == [1, 2, 3, 4, 0]
    for passes in range(1, EXPANDED_PASSES + 1):
        heads, pages = lite._heads_in(passes), lite._pages_in(passes)
        assert heads * passes >= 16
        assert heads * pages <= 16 * 128


def test_the_memory_plan_counts_whole_pages() -> None:
    assert EXPANDED_PAGE == PAGE


def backend_of(dtype: torch.dtype, *, is_expanded: bool, tokens: int = 96, page: int = 8) -> LatentTritonAttention:
    made = LatentTritonAttention(HEADS, dtype, torch.device(DEVICE), dependent_rows=1 << 30)
    made.accept(RULE)
    made.reserve([cache_of(dtype)], 8, tokens)
    assert not made.has_scratch  # the sizes of its heads are not known
    if is_expanded:
        made._expanded = ExpandedScratch(3, TINY, tokens, torch.float32, torch.device(DEVICE), page)
        made._expanded.config = PrefillConfig(16, page, 4, 1)
    return made


def cache_of(dtype: torch.dtype) -> LayerCache:
    memory = torch.randn(BLOCKS, 1, SIZE, HEADS.dim, generator=torch.Generator().manual_seed(0))
    return LayerCache.of_latents(memory.to(DEVICE, dtype), TINY.rank)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def attend(
    backend: LatentTritonAttention, cache: LayerCache, decodes: list[int], chunks: list[Chunk], passes: int,
    room: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """What decode rows of these lengths and chunks get."""
    tables = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).int().view(5, 12).to(DEVICE)
    spans = spans_of(chunks, len(decodes))
    spans[:, 3] += len(decodes)
    rows = [*range(len(decodes)), *spans[:, 3].repeat(spans[:, 2])]
    positions = [length - 1 for length in decodes] + [start + i for start, count in chunks for i in range(count)]
    lengths = decodes + [0] * (2 if decodes else 0)  # decode slots behind decodes, as in a padded step
    plan = backend.plan(
        torch.tensor(rows, dtype=torch.int32, device=DEVICE), torch.tensor(positions, device=DEVICE),
        torch.tensor(lengths, dtype=torch.int64, device=DEVICE), tables,
        backend.tiles(spans, room, scratch=passes).to(DEVICE), scratch=passes,
    )  # fmt: skip
    keys = TritonHeads(random(3, TINY.rank, TINY.nope_dim, seed=3), TINY.rope_dim, dependent_rows=1 << 30)
    values = TritonHeads(random(3, TINY.value_dim, TINY.rank, seed=4), 0, dependent_rows=1 << 30)
    query = random(len(rows), 3 * TINY.query_dim, seed=2)
    if passes:
        products = SimpleNamespace(to_latents=keys, to_values=values)
        return backend.attend_expanded(query, cache, plan, RULE, products)  # type: ignore[arg-type]
    compared = keys(query).view(len(rows), 3, HEADS.dim)
    return values(backend.attend(compared, compared, compared, cache, plan, RULE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("decodes", "chunks", "passes"),
    [([], [(7, 9), (0, 8), (0, 1)], 1), ([40, 2], [(0, 6), (31, 9)], 1), ([11], [(24, 8), (5, 21)], 2)],
)
def test_both_forms_give_the_same_results_beside_decodes(
    dtype: torch.dtype, decodes: list[int], chunks: list[Chunk], passes: int
) -> None:
    cache = cache_of(dtype)
    absorbed, expands = (backend_of(dtype, is_expanded=each) for each in (False, True))
    wanted = attend(absorbed, cache, decodes, chunks, 0)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2  # the absorbed form multiplies float8 latents in float16
    for room in (None, 9):
        found = attend(expands, cache, decodes, chunks, passes, room)
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
