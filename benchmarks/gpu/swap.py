"""Times copies of blocks to and from host memory: python -m benchmarks.gpu.swap [--block-sizes 1,16,64] [--json PATH]

First measures plain copies of pinned memory, then blocks of the 8B shape through the host tier: alone, by each route,
with contiguous and with scattered slots; then while the model decodes, with enough blocks to fill a share of the bus in
each direction, and how much slower the steps become. GB are 10^9 bytes. `link` results count only the time in which the
bus copied blocks; the others count all time.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.models import MODELS
from benchmarks.report import facts, publish, save, table
from quire.config.arguments import EngineArguments
from quire.config.engine import CacheConfig
from quire.config.model import Heads
from quire.config.tiers import TierConfig
from quire.engine.core import EngineCore
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.resolve import resolve_model
from quire.runtime.tiers.host_store import HostStore
from quire.runtime.tiers.link import NOTHING_COPIED, Copied, Link
from quire.runtime.tiers.pinning import CudaPinning
from quire.runtime.tiers.routes import RouteName
from quire.runtime.tiers.staged_link import StagedLink
from quire.runtime.tiers.streams import cuda_streams
from quire.runtime.worker.device_cache import DeviceCache
from quire.serving.assembly import plan_engine
from quire.types.adapters import AdapterInfo
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Masks, StepPlan, StepResult
from quire.types.transfer import NOTHING_MOVED, SlotMove, TransferReport, Transfers

MODEL, HEADS, LAYERS = "llama-3.1-8b", Heads(32, 8, 128), 32
TOKEN_BYTES = 2 * LAYERS * HEADS.kv_size * 2
PLAIN_BYTES = 1 << 30
REPEATS = 5
ROWS, CONTEXT, STEPS = 64, 512, 60
SHARE = 0.9  # of the bytes that the bus can copy in a step


@dataclass(frozen=True, slots=True)
class Bus:
    """Bytes per second of plain copies."""

    to_host: float
    to_device: float


@dataclass(frozen=True, slots=True)
class Alone:
    block_size: int
    route: RouteName
    slots: str
    save: float  # bytes per second, from the request to the end
    load: float


@dataclass(frozen=True, slots=True)
class Beside:
    """Steps that decode while blocks are copied."""

    block_size: int
    direction: str
    step_seconds: float
    slower: float  # relative to steps without copies
    carried: float  # bytes per second, over all time
    link: float  # bytes per second, while blocks were being copied


def best(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest run, including all work on the device."""
    taken = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def measure_bus() -> Bus:
    host = torch.empty(PLAIN_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(PLAIN_BYTES, dtype=torch.uint8, device="cuda")
    out = best(lambda: host.copy_(device, non_blocking=True))
    back = best(lambda: device.copy_(host, non_blocking=True))
    return Bus(PLAIN_BYTES / out, PLAIN_BYTES / back)


def measure_alone(block_size: int, num_bytes: int) -> list[Alone]:
    device, count = torch.device("cuda"), num_bytes // (TOKEN_BYTES * block_size)
    cache = DeviceCache(CacheConfig(block_size, count), HEADS, LAYERS, torch.bfloat16, device)
    shape = (cache.blocks.shape[0], cache.blocks.shape[2])
    host = HostStore(count, shape, cache.blocks.dtype, CudaPinning(device))
    begin = time.perf_counter()
    host.pin(range(count))
    print(f"pinned {num_bytes / 1e9:.1f} GB in {time.perf_counter() - begin:.2f} s", flush=True)
    scattered = list(range(count))
    random.Random(0).shuffle(scattered)
    found = []
    routes: tuple[RouteName, ...] = ("copies", "kernel", "auto")
    for route in routes:
        link = StagedLink(cache, host, cuda_streams(device), route=route)
        link.prepare()
        for name, slots in (("neighbours", range(count)), ("scattered", scattered)):
            moves = [SlotMove(block, slot) for block, slot in enumerate(slots)]
            out, back = best(partial(link.save, moves)), best(partial(_load, link, moves))
            found.append(Alone(block_size, route, name, num_bytes / out, num_bytes / back))
        link.close()
    host.close()
    return found


def _load(link: Link, moves: Sequence[SlotMove]) -> None:
    link.load(moves)
    link.begin_plan()


class Loaded:
    """An executor that adds the same transfers to every plan."""

    def __init__(self, inner: SingleExecutor) -> None:
        self._inner = inner
        self.orders: list[Transfers] = []  # used in turn
        self.moved = NOTHING_COPIED

    @property
    def depth(self) -> int:
        return self._inner.depth

    def launch(self, plan: StepPlan) -> None:
        if self.orders:
            plan = replace(plan, transfers=self.orders[plan.step % len(self.orders)])
        self._inner.launch(plan)
        report = self._inner.transfers()
        self.moved = self.moved.plus(
            Copied(report.num_saved, report.num_loaded, report.save_seconds, report.load_seconds)
        )

    def supply_masks(self, masks: Masks | None) -> None:
        self._inner.supply_masks(masks)

    def collect(self) -> StepResult:
        return self._inner.collect()

    def transfers(self) -> TransferReport:
        return NOTHING_MOVED

    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        return self._inner.read_adapter(name, folder)

    def forget_adapter(self, digest: str) -> None:
        self._inner.forget_adapter(digest)

    def close(self) -> None:
        self._inner.close()


def steady_engine(block_size: int, host_bytes: int) -> tuple[EngineCore, Loaded, int]:
    """Return an engine in which sequences decode and nothing else happens, and the number of blocks in its cache."""
    longest = CONTEXT + 100 + 6 * STEPS
    with tempfile.TemporaryDirectory() as folder:
        files = resolve_model(str(MODELS[MODEL].write(Path(folder))))
        arguments = EngineArguments(dtype="bfloat16", max_model_len=longest, max_num_seqs=ROWS, block_size=block_size)
        planned = plan_engine(files, arguments)
        tokens = ROWS * longest + host_bytes // TOKEN_BYTES + 4 * block_size
        cache = replace(planned.config.cache, num_blocks=tokens // block_size)
        tiers = TierConfig(host_blocks=host_bytes // (TOKEN_BYTES * block_size))
        config = replace(planned.config, cache=replace(cache, tiers=tiers))
        executor = Loaded(SingleExecutor(files, planned.model, config, load_format="dummy"))
    core = EngineCore(executor, cache, config.scheduler, planned.model.vocab_size)
    sampling = SamplingParams(temperature=0.0, max_tokens=longest - CONTEXT, ignore_eos=True)
    for number in range(ROWS):
        prompt = tuple((7 * number + i) % 9_000 + 10 for i in range(CONTEXT))
        core.submit(Submit(str(number), prompt, sampling, TokenRules()))
    while core.stats().output_tokens < ROWS * 20:
        core.step()
    return core, executor, cache.num_blocks


def measure_beside(block_size: int, bus: Bus, host_bytes: int) -> list[Beside]:
    core, executor, num_blocks = steady_engine(block_size, host_bytes)
    block_bytes, num_slots = TOKEN_BYTES * block_size, host_bytes // (TOKEN_BYTES * block_size)
    plain = _step_seconds(core)
    found = [Beside(block_size, "neither", plain, 0.0, 0.0, 0.0)]
    count = min(int(SHARE * plain * min(bus.to_host, bus.to_device)) // block_bytes, num_slots // 2)
    spare = num_blocks - num_slots  # no sequence uses these: the pool hands out low ids first
    for direction in ("save", "load", "both"):
        executor.orders = []
        for half in range(2):
            moves = tuple(SlotMove(spare + slot, slot) for slot in range(half * count, (half + 1) * count))
            others = tuple(SlotMove(spare + slot, slot) for slot in range((1 - half) * count, (2 - half) * count))
            saves, loads = (moves if direction != "load" else ()), (others if direction != "save" else ())
            executor.orders.append(Transfers(saves=saves, loads=loads))
        _step_seconds(core, 6)  # until the pipeline is full of copies
        executor.moved = NOTHING_COPIED
        begin = time.perf_counter()
        seconds = _step_seconds(core)
        moved, taken = executor.moved, time.perf_counter() - begin
        carried = (moved.num_saved + moved.num_loaded) * block_bytes
        busy = max(moved.save_seconds, moved.load_seconds, 1e-9)
        found.append(Beside(block_size, direction, seconds, seconds / plain - 1, carried / taken, carried / busy))
    executor.orders = []
    core.close()
    return found


def _step_seconds(core: EngineCore, steps: int = STEPS) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        core.step()
    return (time.perf_counter() - begin) / steps


def _rate(value: float, of: float) -> str:
    return f"{value / 1e9:.1f} ({100 * value / of:.0f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-sizes", default="1,16,64")
    parser.add_argument("--gib", type=float, default=2.0, help="of blocks that are moved alone")
    parser.add_argument("--skip-decoding", action="store_true", help="measure no steps")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    where, sizes, num_bytes = facts(), [int(size) for size in options.block_sizes.split(",")], int(options.gib * 2**30)
    where["gpu"] = torch.cuda.get_device_name()
    bus = measure_bus()
    print(f"{where['gpu']}: plain copies carry {bus.to_host / 1e9:.1f} GB/s out, {bus.to_device / 1e9:.1f} GB/s back")
    alone = [each for size in sizes for each in measure_alone(size, num_bytes)]
    header = ["block size, route, slots", "save GB/s (of plain)", "load GB/s (of plain)"]
    rows = [
        [
            f"{each.block_size}, {each.route}, {each.slots}",
            _rate(each.save, bus.to_host),
            _rate(each.load, bus.to_device),
        ]
        for each in alone
    ]
    publish("Blocks through the host tier, alone", header, rows, where)
    beside = []
    for size in [] if options.skip_decoding else sizes:
        beside += measure_beside(size, bus, 2 * num_bytes)
        torch.cuda.empty_cache()
    header = ["block size, direction", "step ms", "slower", "GB/s", "link GB/s"]
    lines = [
        [
            f"{each.block_size}, {each.direction}", f"{1e3 * each.step_seconds:.2f}", f"{100 * each.slower:.1f} %",
            f"{each.carried / 1e9:.1f}", f"{each.link / 1e9:.1f}",
        ]
        for each in beside
    ]  # fmt: skip
    if lines:
        print(f"\nBeside decoding: {MODEL}, {ROWS} rows, {SHARE:.0%} of the bus in each direction\n")
        print(table(header, lines))
    figures = {"bus": asdict(bus), "alone": list(map(asdict, alone)), "beside": list(map(asdict, beside))}
    save(options.json, "Blocks to host memory and back", where, figures)


if __name__ == "__main__":
    main()
