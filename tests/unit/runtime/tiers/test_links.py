"""Links compared with a dictionary of the expected blocks and slots, with random copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from deferred_streams import World
from interpreter import HAS_TRITON
from kv_layouts import one_group
from quire.config.engine import CacheConfig
from quire.config.model import Heads
from quire.runtime.tiers.host_store import HostStore
from quire.runtime.tiers.link import NOTHING_COPIED, Copied, Link, SynchronousLink
from quire.runtime.tiers.pinning import PageableMemory
from quire.runtime.tiers.routes import RouteName, contiguous_runs, padded_rows
from quire.runtime.tiers.staged_link import StagedLink
from quire.runtime.worker.cache import KVCache
from quire.types.transfer import SlotMove

NUM_BLOCKS, NUM_SLOTS = 12, 9
CPU = torch.device("cpu")


class Reachable(PageableMemory):
    """A kernel in the interpreter reaches all memory."""

    def pin(self, slots: Iterable[int]) -> bool:
        return True


def make_cache(kind: type[KVCache] = KVCache, dtype: torch.dtype = torch.float32) -> KVCache:
    numbers = 2 * (16 + 4) if dtype == torch.float8_e4m3fn else 32  # bytes with the scale of the head
    return kind(CacheConfig(2, NUM_BLOCKS), Heads(2, 1, 16), one_group(2, numbers), dtype, CPU)


def make_host(cache: KVCache) -> HostStore:
    shape = (cache.blocks.shape[0], cache.blocks.shape[2])
    return HostStore(NUM_SLOTS, shape, cache.blocks.dtype, Reachable())


class Drill:
    """Makes random plans, and keeps what blocks and slots must hold after each. Work on blocks goes by `run`."""

    def __init__(self, cache: KVCache, link: Link, seed: int, run: Callable[[Callable[[], None]], None]) -> None:
        self.rng, self.cache, self.link, self.run = random.Random(seed), cache, link, run
        self.blocks = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.slots = dict.fromkeys(range(NUM_SLOTS), 0)
        self.arriving: dict[int, int] = {}
        self.fresh = 0
        self.counts = [0, 0]
        self.reads_ordered = self.reads_done = 0

    def plan(self) -> None:
        self.link.begin_plan()
        self.blocks |= self.arriving
        saves = [self._move() for _ in range(self.rng.choice([0, 0, 1, 3, 8]))]
        loads = [self._move() for _ in range(self.rng.choice([0, 0, 1, 3, 8]))]
        self.link.save(saves)
        for block, slot in saves:
            self.slots[slot] = self.blocks[block]
        self.link.load(loads)
        self.arriving = {block: self.slots[slot] for block, slot in loads}
        self.counts[0] += len({slot for _, slot in saves})
        self.counts[1] += len({block for block, _ in loads})
        self._compute([block for block in range(NUM_BLOCKS) if block not in self.arriving])

    def _compute(self, blocks: list[int]) -> None:
        """Read all blocks but those that loads are on their way to; overwrite some."""
        self.reads_ordered += len(blocks)
        for block in blocks:
            self.run(partial(self._read, block, self.blocks[block]))
        for block in self.rng.sample(blocks, len(blocks) // 2):
            self.fresh += 1
            self.blocks[block] = self.fresh % 128
            self.run(partial(self._write, block, self.blocks[block]))

    def _move(self) -> SlotMove:
        return SlotMove(self.rng.randrange(NUM_BLOCKS), self.rng.randrange(NUM_SLOTS))

    def _read(self, block: int, wanted: int) -> None:
        assert (self.cache.blocks[:, block] == wanted).all()
        self.reads_done += 1

    def _write(self, block: int, value: int) -> None:
        self.cache.blocks[:, block] = value


def at_once(work: Callable[[], None]) -> None:
    work()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_cpu_executes_copies_in_submission_order(dtype: torch.dtype) -> None:
    cache = make_cache(dtype=dtype)
    host = make_host(cache)
    drill = Drill(cache, SynchronousLink(cache, host), seed=3, run=at_once)
    for _ in range(60):
        drill.plan()
        for slot, value in drill.slots.items():
            assert (host.slots[slot] == value).all()
        drill.link.check()
    assert drill.reads_done == drill.reads_ordered > 0
    assert min(drill.link.take_copied()) > 0


def staged(cache: KVCache, host: HostStore, world: World, route: RouteName, pieces: int, size: int) -> StagedLink:
    piece = size * host.slot_bytes
    return StagedLink(
        cache, host, world.streams, route=route, ring_bytes=(pieces * piece, pieces * piece), piece_bytes=piece
    )


def run_staged(cache: KVCache, route: RouteName, seed: int, num_plans: int) -> Copied:
    """What was carried, after all that blocks and slots hold was compared with what they must."""
    rng, world, host = random.Random(seed), World(seed), make_host(cache)
    link = staged(cache, host, world, route, pieces=rng.choice([1, 2, 3]), size=rng.choice([1, 2, 4]))
    drill = Drill(cache, link, seed, world.streams.compute.run)
    copied = NOTHING_COPIED
    for _ in range(num_plans):
        drill.plan()
        for _ in range(rng.choice([0, 5, 50])):
            world.advance()
        if rng.random() < 0.3:
            slot = rng.randrange(NUM_SLOTS)
            link.completion_of(slot)()
            assert (host.slots[slot] == drill.slots[slot]).all()
        copied = copied.plus(link.take_copied())
        link.check()
    world.finish()
    for slot, value in drill.slots.items():
        assert (host.slots[slot] == value).all()
    copied = copied.plus(link.take_copied())
    assert [copied.num_saved, copied.num_loaded] == drill.counts
    assert drill.reads_done == drill.reads_ordered >= num_plans
    assert world.num_choices > num_plans  # so the order was left to chance
    link.close()
    return copied


@pytest.mark.parametrize("seed", range(40))
def test_in_any_device_order_blocks_and_slots_end_as_after_sequential_copies(seed: int) -> None:
    assert min(run_staged(make_cache(), "copies", seed, num_plans=40)) > 0


@pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="for the interpreter")
@pytest.mark.parametrize("seed", range(4))
def test_kernels_over_host_memory_give_the_result_of_sequential_copies(seed: int) -> None:
    from quire.runtime.worker.device_cache import DeviceCache

    assert min(run_staged(make_cache(DeviceCache), "kernel", seed, num_plans=20)) > 0


def test_neighbouring_slots_are_copied_together_within_a_pinned_chunk() -> None:
    assert list(contiguous_runs(np.array([2, 3, 4, 7, 8, 11]), chunk=4)) == [
        (0, 2, 2), (2, 4, 1), (3, 7, 1), (4, 8, 1), (5, 11, 1),
    ]  # fmt: skip
    assert list(contiguous_runs(np.array([], dtype=np.int64), chunk=4)) == []


def test_rows_of_padded_pieces_are_aligned() -> None:
    lines = padded_rows([np.arange(17, dtype=np.int32), np.array([5], dtype=np.int32)], -1)
    assert lines.shape == (2, 32)
    assert lines[0, :17].tolist() == list(range(17))
    assert lines[1].tolist() == [5] + [-1] * 31


def test_untouched_slots_cost_no_memory() -> None:
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("no /proc")
    before = int(status.read_text().split()[1])
    host = HostStore(4_096, (16, 8_192), torch.bfloat16)  # 1 GiB
    host.slots[77].fill_(1)
    assert (int(status.read_text().split()[1]) - before) * 4_096 < 128 * 2**20
    assert bytes(host.bytes_of(77)[:2]) == bytes(host.bytes_of(77)[-2:]) != b"\0\0"
    assert not any(host.bytes_of(78))
