"""Quantized caches: what is written and read back, by torch and by the compiled kernels, with NaN among it."""

from __future__ import annotations

import pytest
import torch

from quire.config.engine import CacheConfig
from quire.config.kv_cache import KVCacheSpec, lay_out, stored_specs
from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.native.loader import why_not_native
from quire.kernels.reference.attention import paged_attention
from quire.kernels.reference.cache_quantize import INT4, dequantize_heads, quantize_heads
from quire.runtime.attention.backend import AttentionBatch, ChunkSpan, LayerCache
from quire.runtime.attention.gather import GatherAttention
from quire.runtime.attention.reference import ReferenceAttention
from quire.runtime.layers.ops import TorchOps
from quire.runtime.worker.cache import KVCache

NAMES = {"float8": torch.float8_e4m3fn, "int8": torch.int8, "int4": INT4}
STEPS = {"float8": 1 / 16, "int8": 0.5 / 127, "int4": 0.5 / 15}  # the largest error, as a share of the range
CPU = torch.device("cpu")
BLOCK, BLOCKS = 4, 9
needs_native = pytest.mark.skipif(why_not_native(torch.float32, CPU) is not None, reason="no compiled kernels")


def layer(name: str, heads: Heads, num_layers: int = 2, size: int = BLOCK, blocks: int = BLOCKS) -> LayerCache:
    """The last layer of a cache."""
    spec = KVCacheSpec("full", 2 * heads.kv_size, unit=2 * heads.dim)
    layout = lay_out(stored_specs([spec] * num_layers, name), split=False)
    cache = KVCache(CacheConfig(size, blocks), heads, layout, NAMES[name], CPU)
    cache.check()
    return cache.layers[-1]


def slots_of(cache: LayerCache, block_ids: list[int], num_tokens: int) -> torch.Tensor:
    size, heads = cache.key.shape[2], cache.key.shape[1]
    return torch.tensor(
        [
            (block_ids[p // size] * cache.block_heads + head) * size + p % size
            for p in range(num_tokens)
            for head in range(heads)
        ]
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [8, 40, 64])
def test_the_quantization_error_is_bounded_by_the_range_of_the_head_or_group(name: str, dim: int) -> None:
    x = torch.randn(50, dim, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 50)[:, None]
    found = dequantize_heads(*quantize_heads(x, NAMES[name]))
    span = x.abs().amax(dim=-1, keepdim=True) if name != "int4" else x.amax(-1, True) - x.amin(-1, True)
    bound = x.abs() * STEPS[name] + span / 448 / 512 if name == "float8" else span * STEPS[name]
    assert ((found - x).abs() <= 1.01 * bound + x.abs() * 2**-10 * (name == "int4") + 1e-7).all()


@pytest.mark.parametrize("name", NAMES)
def test_keys_beyond_the_range_of_the_dtype_are_scaled_and_not_clamped(name: str) -> None:
    x = torch.linspace(-30_000.0, 30_000.0, 64)[None]
    found = dequantize_heads(*quantize_heads(x, NAMES[name]))
    assert float(found.max()) == pytest.approx(30_000.0, rel=0.04)
    assert float(found.min()) == pytest.approx(-30_000.0, rel=0.04)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_stays_nan_and_does_not_affect_other_heads(name: str, bad: float) -> None:
    x = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(1))
    x[1, 0, 5] = bad
    found = dequantize_heads(*quantize_heads(x, NAMES[name]))
    assert found[1, 0, 5].isnan()
    found[1, 0], x[1, 0] = 0.0, 0.0
    torch.testing.assert_close(found, x, atol=0.3, rtol=0.1)


@pytest.mark.parametrize("number", [-70_000.0, 2e6])
def test_an_int4_group_whose_scale_or_offset_overflows_float16_becomes_nan(number: float) -> None:
    x = torch.ones(1, 64)
    x[0, 3] = number
    found = dequantize_heads(*quantize_heads(x, INT4))
    assert found[0, :32].isnan().all()
    assert torch.equal(found[0, 32:], x[0, 32:])


@pytest.mark.parametrize("name", NAMES)
def test_heads_of_zeros_and_unwritten_slots_read_as_zeros(name: str) -> None:
    numbers, scales = quantize_heads(torch.zeros(2, 16), NAMES[name])
    assert torch.equal(dequantize_heads(numbers, scales), torch.zeros(2, 16))
    empty = dequantize_heads(torch.zeros_like(numbers.view(torch.uint8)).view(numbers.dtype), torch.zeros_like(scales))
    assert torch.equal(empty, torch.zeros(2, 16))


@pytest.mark.parametrize("name", NAMES)
def test_a_block_has_the_bytes_that_the_memory_plan_counts_and_layers_do_not_overlap(name: str) -> None:
    heads = Heads(4, 2, 64)
    caches = KVCache(
        CacheConfig(BLOCK, BLOCKS), heads,
        lay_out(stored_specs([KVCacheSpec("full", 256, unit=128)] * 3, name), split=False), NAMES[name], CPU,
    )  # fmt: skip
    per_head = {"float8": 68, "int8": 68, "int4": 32 + 8}[name]
    assert caches.blocks.numel() == 3 * 2 * BLOCKS * BLOCK * 2 * per_head
    key = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(2))
    for number, one in enumerate(caches.layers):
        TorchOps().write(key + number, key - number, one, slots_of(one, [7, 3], 5))
    for number, one in enumerate(caches.layers):
        assert one.key_scales is not None
        found = dequantize_heads(one.key, one.key_scales)[7, :, 0]
        torch.testing.assert_close(found, key[0] + number, atol=0.4, rtol=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_layers_with_other_heads_share_planes(name: str) -> None:
    wide, narrow = Heads(4, 1, 64), Heads(4, 4, 16)
    specs = [KVCacheSpec("full", 128, unit=128), *[KVCacheSpec("window", 128, 8, unit=32)] * 2]
    layout = lay_out(stored_specs(specs, name), split=False)
    cache = KVCache(CacheConfig(BLOCK, BLOCKS), wide, layout, NAMES[name], CPU, narrow)
    cache.check()
    for number, (one, heads) in enumerate(zip(cache.layers, (wide, narrow, narrow), strict=True)):
        TorchOps().write(*[torch.full((3, heads.num_kv, heads.dim), 1.0 + number)] * 2, one, slots_of(one, [5], 3))
    for number, one in enumerate(cache.layers):
        assert one.value_scales is not None
        found = dequantize_heads(one.value, one.value_scales)[5, :, :3]
        torch.testing.assert_close(found, torch.full_like(found, 1.0 + number), rtol=0.01, atol=0.0)


def filled(name: str, heads: Heads) -> tuple[LayerCache, AttentionBatch, tuple[torch.Tensor, ...]]:
    """Two decode rows that share their first block, and a chunk of 6 tokens behind 5."""
    generator = torch.Generator().manual_seed(3)
    cache = layer(name, heads)
    for block_ids, count in (([8, 1, 4], 11), ([8, 6], 7), ([2, 5, 7], 11)):
        key, value = torch.randn(2, count, heads.num_kv, heads.dim, generator=generator)
        TorchOps().write(key, value, cache, slots_of(cache, block_ids, count))
    chunk = ChunkSpan(begin=2, start=5, num_tokens=6, block_ids=torch.tensor([2, 5, 7]))
    lengths, tables = torch.tensor([11, 7]).numpy(), torch.tensor([[8, 1, 4], [8, 6, 8]])
    batch = AttentionBatch(lengths, tables, (chunk,), BLOCK, cache)
    query = torch.randn(8, heads.num_query, heads.dim, generator=generator)
    own = torch.zeros(8, heads.num_kv, heads.dim)
    return cache, batch, (query, own, own)


RULES = (AttentionRule(0.2), AttentionRule(0.2, window=5), AttentionRule(0.2, softcap=3.0, sinks=torch.ones(4)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", RULES, ids=["plain", "window", "capped"])
@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(4, 1, 40)], ids=["16", "40"])
def test_backends_attend_to_what_was_dequantized(name: str, rule: AttentionRule, heads: Heads) -> None:
    cache, batch, tensors = filled(name, heads)
    wanted = ReferenceAttention().attend(*tensors, cache, ReferenceAttention().prepare(batch), rule)
    assert cache.key_scales is not None
    assert cache.value_scales is not None
    plain = (dequantize_heads(cache.key, cache.key_scales), dequantize_heads(cache.value, cache.value_scales))
    by_hand = paged_attention(
        tensors[0][1:2], *plain, batch.block_ids[1], 6, rule.scale, window=rule.window, softcap=rule.softcap,
        sinks=rule.sinks,
    )  # fmt: skip
    torch.testing.assert_close(wanted[1:2], by_hand.flatten(1))
    backends = [GatherAttention(torch.float32)]
    if why_not_native(torch.float32, CPU) is None:
        from quire.runtime.attention.native import NativeAttention

        backends.append(NativeAttention())  # type: ignore[arg-type]
    for backend in backends:
        found = backend.attend(*tensors, cache, backend.prepare(batch), rule)
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", [0, 1], ids=["key", "value"])
def test_only_the_row_with_a_nan_fails_in_every_backend(name: str, side: int) -> None:
    heads = Heads(4, 2, 16)
    cache, batch, tensors = filled(name, heads)
    bad = torch.randn(2, 1, heads.num_kv, heads.dim, generator=torch.Generator().manual_seed(4))
    bad[side, 0, 0, 3] = float("nan")
    TorchOps().write(*bad, cache, slots_of(cache, [6], 1))  # of the second decode row
    backends: list[object] = [ReferenceAttention(), GatherAttention(torch.float32)]
    if why_not_native(torch.float32, CPU) is None:
        from quire.runtime.attention.native import NativeAttention

        backends.append(NativeAttention())
    for backend in backends:
        found = backend.attend(*tensors, cache, backend.prepare(batch), RULES[0])  # type: ignore[attr-defined]
        assert found[1].isnan().any()
        assert found[[0, 2, 3, 4, 5, 6, 7]].isfinite().all()


@needs_native
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 40])
def test_the_compiled_kernels_write_the_bytes_that_torch_writes(name: str, dtype: torch.dtype, dim: int) -> None:
    from quire.runtime.layers.native import NativeOps

    heads, generator = Heads(4, 2, dim), torch.Generator().manual_seed(5)
    key, value = torch.randn(2, 9, 2, dim, generator=generator).to(dtype) * torch.logspace(-6, 4, 9)[:, None, None]
    key, value = key.to(dtype), value.to(dtype)
    key[3], value[5, 0, 7] = 0.0, float("nan")
    wanted, found = layer(name, heads), layer(name, heads)
    slots = slots_of(wanted, [3, 0, 6], 9)
    TorchOps().write(key, value, wanted, slots)
    NativeOps().write(key, value, found, slots)
    for one, other in ((wanted.key_blocks, found.key_blocks), (wanted.value_blocks, found.value_blocks)):
        same = one == other
        assert same.float().mean() > 0.999  # a NaN has many forms
    assert found.value_scales is not None
    assert found.value_scales[0, 0, 1].isnan().any()  # the sixth token


@needs_native
@pytest.mark.parametrize("name", ["float8", "int8"])
def test_the_compiled_kernels_round_ties_of_bfloat16_as_torch_does(name: str) -> None:
    """128 heads, one for each mantissa that the largest number can have."""
    from quire.runtime.layers.native import NativeOps

    highest = torch.arange(128, 256).view(2, 32, 2, 1)
    key, value = torch.minimum(torch.arange(256), highest).bfloat16()  # whole numbers up to 256 are exact
    wanted, found = layer(name, Heads(4, 2, 256)), layer(name, Heads(4, 2, 256))
    slots = slots_of(wanted, list(range(8)), 32)
    TorchOps().write(key, value, wanted, slots)
    NativeOps().write(key, value, found, slots)
    assert torch.equal(wanted.key_blocks, found.key_blocks)
    assert torch.equal(wanted.value_blocks, found.value_blocks)


@needs_native
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_nan_key_is_not_lost_if_it_is_alone_in_its_piece(name: str, bad: float) -> None:
    from quire.runtime.attention.native import NativeAttention

    heads, count = Heads(4, 2, 16), 257
    cache, generator = layer(name, heads, size=16, blocks=17), torch.Generator().manual_seed(6)
    key, value = torch.randn(2, count, heads.num_kv, heads.dim, generator=generator)
    key[256, 0, 3] = bad
    TorchOps().write(key, value, cache, slots_of(cache, list(range(17)), count))
    lengths, tables = torch.tensor([257, 256]).numpy(), torch.arange(17).expand(2, 17).contiguous()
    batch = AttentionBatch(lengths, tables, (), 16, cache)
    query = torch.randn(2, heads.num_query, heads.dim, generator=generator)
    found = NativeAttention().attend(query, key[:2], value[:2], cache, NativeAttention().prepare(batch), RULES[0])
    found = found.view(2, 4, 16)
    assert found[0, :2].isnan().all()
    assert found[0, 2:].isfinite().all()
    assert found[1].isfinite().all()


def latents(dim: int, rank: int) -> LayerCache:
    return LayerCache.of_latents(torch.zeros(BLOCKS, 1, BLOCK, dim).to(torch.float8_e4m3fn), rank)


@pytest.mark.parametrize("by", ["torch", pytest.param("native", marks=needs_native)])
def test_a_latent_beyond_the_range_of_float8_becomes_nan(by: str) -> None:
    from quire.runtime.layers.native import NativeOps

    cache = latents(8, 6)
    latent = torch.full((2, 1, 8), 448.0)
    latent[1, 0, 2], latent[1, 0, 4] = 500.0, float("nan")
    (TorchOps() if by == "torch" else NativeOps()).write(latent, None, cache, torch.tensor([0, 1]))
    assert torch.equal(cache.key[0, 0, 0].float(), latent[0, 0])
    assert cache.key[0, 0, 1].float().isnan().tolist() == [place in (2, 4) for place in range(8)]


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "rank"), [(40, 32), (27, 13)])
def test_the_compiled_kernels_attend_to_float8_latents_as_the_reference_does(
    dtype: torch.dtype, dim: int, rank: int
) -> None:
    """Two decode rows that share their first block, and a chunk of 6 tokens behind 5. A row with NaN fails alone."""
    from quire.runtime.attention.native import HalfAttention, NativeAttention
    from quire.runtime.layers.native import NativeOps

    generator, found, wanted = torch.Generator().manual_seed(7), latents(dim, rank), latents(dim, rank)
    write = TorchOps().write if dtype == torch.float16 else NativeOps().write
    for block_ids, count in (([8, 1, 4], 11), ([8, 6], 7), ([2, 5, 7], 11)):
        key = (torch.randn(count, 1, dim, generator=generator) * torch.logspace(-4, 2, count)[:, None, None]).to(dtype)
        key[6, 0, 1] = float("nan") if 6 in block_ids else 1.0
        TorchOps().write(key, None, wanted, slots_of(wanted, block_ids, count))
        write(key, None, found, slots_of(found, block_ids, count))
    assert (found.key_blocks == wanted.key_blocks).float().mean() > 0.99  # a NaN has many forms
    chunk = ChunkSpan(begin=2, start=5, num_tokens=6, block_ids=torch.tensor([2, 5, 7]))
    lengths, tables = torch.tensor([11, 7]).numpy(), torch.tensor([[8, 1, 4], [8, 6, 8]])
    batch = AttentionBatch(lengths, tables, (chunk,), BLOCK, found)
    query = torch.randn(8, 4, dim, generator=generator).to(dtype) * 0.1
    own = torch.zeros(8, 1, dim)
    expected = ReferenceAttention().attend(query, own, own, wanted, ReferenceAttention().prepare(batch), RULES[0])
    backend = HalfAttention() if dtype == torch.float16 else NativeAttention()
    given = backend.attend(query, own, own, found, backend.prepare(batch), RULES[0])  # type: ignore[arg-type]
    assert given[1].isnan().any()
    others = [0, 2, 3, 4, 5, 6, 7]
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(given[others], expected[others], atol=tolerance, rtol=tolerance)
