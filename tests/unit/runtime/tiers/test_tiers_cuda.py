"""Tiers on a real GPU: streams, pinned memory, captured steps."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from kv_layouts import one_group
from quire.config.engine import CacheConfig
from quire.config.model import Heads
from quire.config.tiers import TierConfig
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.resolve import ModelFiles
from quire.runtime.tiers.host_store import HostStore
from quire.runtime.tiers.link import NOTHING_COPIED
from quire.runtime.tiers.pinning import CudaPinning
from quire.runtime.tiers.routes import RouteName
from quire.runtime.tiers.staged_link import StagedLink
from quire.runtime.tiers.streams import cuda_streams
from quire.runtime.worker.device_cache import DeviceCache
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Chunk, NewRow, StepPlan
from quire.types.transfer import NO_TRANSFERS, SlotMove, Transfers
from tiny_models import engine_config, tiny_config

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = torch.device("cuda")
NUM_BLOCKS, NUM_SLOTS = 96, 200


def make_link(dtype: torch.dtype, route: RouteName, ring_bytes: int) -> tuple[DeviceCache, HostStore, StagedLink]:
    numbers = 2_048 if dtype.itemsize > 1 else 2 * 8 * (128 + 4)  # bytes with the scales of heads
    cache = DeviceCache(
        CacheConfig(16, NUM_BLOCKS), Heads(8, 8, 128), one_group(8, numbers), dtype, CUDA
    )  # 512 KiB blocks at 2 bytes
    shape = (cache.blocks.shape[0], cache.blocks.shape[2])
    host = HostStore(NUM_SLOTS, shape, cache.blocks.dtype, CudaPinning(CUDA))
    link = StagedLink(
        cache, host, cuda_streams(CUDA), route=route, ring_bytes=(ring_bytes, ring_bytes), piece_bytes=4 << 20
    )
    link.prepare()
    return cache, host, link


def wait(link: StagedLink, wanted: tuple[int, int]) -> None:
    saved = loaded = 0
    deadline = time.monotonic() + 30
    while (saved, loaded) != wanted:
        assert time.monotonic() < deadline
        copied = link.take_copied()
        saved, loaded = saved + copied.num_saved, loaded + copied.num_loaded


@pytest.mark.parametrize("route", ["copies", "kernel", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("ring_bytes", [4 << 20, 64 << 20])
def test_random_copies_end_as_after_sequential_copies(dtype: torch.dtype, route: RouteName, ring_bytes: int) -> None:
    cache, host, link = make_link(dtype, route, ring_bytes)
    rng, bad = random.Random(1), torch.zeros((), dtype=torch.int64, device=CUDA)
    blocks, slots = dict.fromkeys(range(NUM_BLOCKS), 0), dict.fromkeys(range(NUM_SLOTS), 0)
    arriving: dict[int, int] = {}
    counts, heavy = [0, 0], torch.randn(4096, 4096, device=CUDA)
    for plan in range(40):
        link.begin_plan()
        blocks |= arriving
        moves = [
            [SlotMove(rng.randrange(NUM_BLOCKS), rng.randrange(NUM_SLOTS)) for _ in range(rng.choice([0, 3, 40]))]
            for _ in range(2)
        ]
        link.save(moves[0])
        slots |= {slot: blocks[block] for block, slot in moves[0]}
        link.load(moves[1])
        arriving = {block: slots[slot] for block, slot in moves[1]}
        counts[0] += len({slot for _, slot in moves[0]})
        counts[1] += len(arriving)
        for _ in range(3):
            heavy = torch.nn.functional.normalize(heavy @ heavy)
        free = [block for block in range(NUM_BLOCKS) if block not in arriving]
        for block in free:
            bad += (cache.blocks[:, block] != blocks[block]).sum()
        for block in rng.sample(free, 20):
            blocks[block] = (plan * 7 + block) % 120
            cache.blocks[:, block] = blocks[block]
    wait(link, (counts[0], counts[1]))
    link.check()
    for slot, value in slots.items():
        assert (host.slots[slot] == value).all()
    assert int(bad) == 0
    link.close()
    host.close()


def test_nothing_makes_the_host_wait_for_the_device() -> None:
    _, host, link = make_link(torch.bfloat16, "auto", 16 << 20)
    moves = [SlotMove(block, block) for block in range(NUM_BLOCKS)]
    host.pin(range(NUM_SLOTS))
    torch.cuda._sleep(200_000_000)  # about 100 ms
    for orders in (link.save, link.load):
        link.begin_plan()
        orders(moves)
    assert link.take_copied() == NOTHING_COPIED  # the device has not even begun
    torch.cuda.synchronize()
    assert link.take_copied()[:2] == (NUM_BLOCKS, NUM_BLOCKS)
    link.close()
    host.close()


def row(number: int, length: int, blocks: tuple[int, ...]) -> NewRow:
    tokens = np.arange(1, length + 1, dtype=np.int32)
    greedy = SamplingParams(temperature=0.0)
    return NewRow(number, tokens, length, blocks, greedy, TokenRules(), sample_index=0, seed=7)


@pytest.mark.parametrize("eager", [False, True])
def test_a_swapped_row_gives_the_same_tokens_beside_captured_steps(eager: bool) -> None:
    config = engine_config(block_size=16, rows=4, device="cuda", dtype="bfloat16", num_blocks=32)
    config = replace(config, cache=replace(config.cache, tiers=TierConfig(host_blocks=64)))
    config = replace(config, device=replace(config.device, enforce_eager=eager))
    model = tiny_config(hidden_size=128, intermediate_size=256, heads=Heads(4, 2, 32), dtype="bfloat16")
    single = SingleExecutor(ModelFiles("tiny", Path("nowhere"), "hf"), model, config, load_format="dummy")
    step = iter(range(10_000))

    def run(**plan: object) -> list[int]:
        single.launch(StepPlan(next(step), **plan))  # type: ignore[arg-type]
        return single.collect().token_ids.tolist()

    def decode(*rows: int, transfers: Transfers = NO_TRANSFERS) -> list[int]:
        return run(decode_rows=np.array(rows, dtype=np.int32), transfers=transfers)

    busy = partial(decode, 1)
    run(new_rows=(row(1, 20, (5, 6, 7, 8, 9)),), chunks=(Chunk(1, 0, 20, (1,)),))
    run(new_rows=(row(0, 20, (3, 4)),), chunks=(Chunk(0, 0, 19),))
    wanted = run(chunks=(Chunk(0, 19, 1, (0,)),)) + [decode(0)[0] for _ in range(6)]

    run(released=(0,), new_rows=(row(2, 20, (3, 4)),), chunks=(Chunk(2, 0, 19),))
    busy(transfers=Transfers(saves=(SlotMove(3, 40), SlotMove(4, 11))))
    run(released=(2,), new_rows=(row(3, 30, (3, 4)),), chunks=(Chunk(3, 0, 30, (3,)),))  # overwrites them
    busy(transfers=Transfers(loads=(SlotMove(20, 40), SlotMove(21, 11))))
    first = run(new_rows=(row(0, 20, (20, 21)),), chunks=(Chunk(0, 19, 1, (0,)),))
    assert first + [decode(0)[0] for _ in range(6)] == wanted
    single.check()
    single.close()
