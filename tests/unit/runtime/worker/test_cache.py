"""KV memory: copies, clearing, and what untouched blocks cost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kv_layouts import one_group
from quire.config.engine import CacheConfig
from quire.config.kv_cache import KVCacheSpec, lay_out
from quire.config.model import Heads
from quire.runtime.worker.cache import KVCache
from quire.types.step import BlockCopy


def small_cache(num_blocks: int = 8, dtype: torch.dtype = torch.float32) -> KVCache:
    cache = KVCache(CacheConfig(4, num_blocks), Heads(4, 2, 8), one_group(3, 32), dtype, torch.device("cpu"))
    for number, layer in enumerate(cache.layers):
        for block in range(num_blocks):
            layer.key[block] = 100 * number + block
            layer.value[block] = -(100 * number + block)
    cache.check()
    return cache


FULL, WINDOW = KVCacheSpec("full", 64, unit=32), KVCacheSpec("window", 32, 9, unit=16)
SHARING = [WINDOW, WINDOW, FULL, WINDOW, FULL]  # of heads half as large two layers share a plane


def sharing_cache(*, split: bool, dtype: torch.dtype = torch.float32) -> KVCache:
    layout = lay_out(SHARING, split=split)
    heads = (Heads(4, 2, 16), Heads(4, 2, 8))
    return KVCache(CacheConfig(4, 8), heads[0], layout, dtype, torch.device("cpu"), heads[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_share_a_plane_keep_their_tokens_apart(dtype: torch.dtype) -> None:
    cache = sharing_cache(split=False, dtype=dtype)
    cache.check()
    assert cache.blocks.shape == (2 * 4, 8, 4 * 32)  # five layers in four planes
    assert [tuple(layer.key.shape) for layer in cache.layers[1:3]] == [(8, 2, 4, 8), (8, 2, 4, 16)]
    for number, layer in enumerate(cache.layers):
        slots = torch.arange(8)[:, None] * layer.block_heads + torch.arange(2)
        values = torch.full((1,), number + 1.0).to(dtype)
        for side in (layer.key_blocks, layer.value_blocks):
            side[slots.flatten()] = values.view(side.dtype)
    for number, layer in enumerate(cache.layers):
        assert (layer.key.float() == number + 1).all()
        assert (layer.value.float() == number + 1).all()


def test_copies_and_clears_reach_all_layers_of_a_plane() -> None:
    cache = sharing_cache(split=True)
    assert [layer.table for layer in cache.layers] == [1, 1, 0, 1, 0]
    for number, layer in enumerate(cache.layers):
        for block in range(8):
            layer.key[block], layer.value[block] = 100 * number + block, -(100 * number + block)
    full = [cache.layers[2], cache.layers[4]]  # others are in blocks of their own
    for layer, number in zip(full, (2, 4), strict=True):
        layer.key.fill_(number)
    cache.copy([BlockCopy(1, 6)])
    cache.clear(torch.tensor([3]))
    assert all((layer.key[[1, 6]] == number).all() for layer, number in zip(full, (2, 4), strict=True))
    assert all((layer.key[3] == 0).all() for layer in cache.layers)


def test_the_first_layers_have_the_first_planes() -> None:
    cache = sharing_cache(split=False)
    first = cache.first(2)
    assert (len(first.layers), len(first.blocks)) == (2, 2)
    assert (len(cache.first(3).layers), len(cache.first(3).blocks)) == (3, 4)
    assert first.of_tables == cache.of_tables


def held(cache: KVCache) -> list[int]:
    """Which block's content every block holds, proven equal in all layers, for keys and values."""
    found = cache.layers[0].key[:, 0, 0, 0].int().tolist()
    for number, layer in enumerate(cache.layers):
        for block, content in enumerate(found):
            assert (layer.key[block] == 100 * number + content).all()
            assert (layer.value[block] == -(100 * number + content)).all()
    return found


def test_copies_reach_every_layer_and_leave_the_source() -> None:
    cache = small_cache()
    cache.copy([BlockCopy(0, 5), BlockCopy(2, 7)])
    assert held(cache) == [0, 1, 2, 3, 4, 0, 6, 2]


def test_copies_that_build_on_each_other_run_in_order() -> None:
    cache = small_cache()
    cache.copy([BlockCopy(0, 1), BlockCopy(1, 2), BlockCopy(3, 2), BlockCopy(2, 3), BlockCopy(7, 0)])
    assert held(cache) == [7, 0, 3, 3, 4, 5, 6, 7]


def test_more_copies_than_one_batch_holds_are_all_carried_out() -> None:
    cache = small_cache(num_blocks=160)
    cache.copy([BlockCopy(block, block + 80) for block in range(80)])
    assert held(cache) == [*range(80), *range(80)]


def test_no_copies_change_nothing() -> None:
    cache = small_cache()
    cache.copy([])
    assert held(cache) == list(range(8))


def test_cleared_blocks_are_zero_in_every_layer() -> None:
    cache = small_cache()
    cache.clear(torch.tensor([3, 6]))
    for layer in cache.layers:
        for side in (layer.key, layer.value):
            assert (side[[3, 6]] == 0).all()
            assert (side[[1, 5]] != 0).all()


def test_untouched_blocks_cost_no_memory() -> None:
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("no /proc")
    before = int(status.read_text().split()[1])
    cache = KVCache(
        CacheConfig(16, 4_096), Heads(8, 8, 64), one_group(8, 1_024), torch.bfloat16, torch.device("cpu")
    )  # 1 GiB
    cache.layers[5].key[77].fill_(1)
    pages = int(status.read_text().split()[1]) - before
    assert cache.layers[5].key[77].sum() > 0
    assert pages * 4_096 < 128 * 2**20


def test_the_first_tokens_of_all_layers_take_no_huge_page_each() -> None:
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("no /proc")
    cache = KVCache(CacheConfig(16, 1_024), Heads(8, 8, 64), one_group(8, 1_024), torch.float32, torch.device("cpu"))
    before = int(status.read_text().split()[1])
    for layer in cache.layers:
        layer.key[0].fill_(1)
        layer.value[0].fill_(1)
    pages = int(status.read_text().split()[1]) - before
    assert pages * 4_096 < 16 * 2**20 / 2  # 16 sides; a huge page has 2 MiB
