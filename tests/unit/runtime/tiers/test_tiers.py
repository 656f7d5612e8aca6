"""A worker with tiers: rows continue from blocks that were moved off the device and back."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal
from unittest.mock import Mock, call

import numpy as np
import pytest

from disk_bench import PATIENCE
from quire.config.engine import CacheConfig, EngineConfig
from quire.config.model import Heads
from quire.config.tiers import TierConfig
from quire.runtime.executor import single as single_executor
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.resolve import ModelFiles
from quire.runtime.speculation.coverage import OwnCoverage
from quire.runtime.tiers import make
from quire.runtime.tiers.disk_store import DiskStore
from quire.runtime.tiers.host_store import HostStore
from quire.runtime.tiers.make import make_tiers
from quire.runtime.tiers.tiers import NO_TIERS, CacheTiers
from quire.runtime.worker.worker import Worker
from quire.types.errors import ConfigError
from quire.types.step import Chunk, StepPlan
from quire.types.transfer import NOTHING_MOVED, FileMove, SlotMove, TransferReport, Transfers
from tiny_models import DEVICE, Bench, engine_config, random_checkpoint, tiny_config

MODEL = tiny_config(
    "qwen3", num_layers=1, hidden_size=32, intermediate_size=32, heads=Heads(2, 1, 16), tie_word_embeddings=True
)
PROMPT = [5, 3, 8, 1, 9, 2]
KEYS = [bytes([number]) * 32 for number in range(8)]


def with_tiers(config: EngineConfig, host_blocks: int = 8, disk: Path | None = None) -> EngineConfig:
    tiers = TierConfig(host_blocks, "" if disk is None else str(disk), 0 if disk is None else 64)
    return replace(config, cache=replace(config.cache, tiers=tiers))


class TieredBench(Bench):
    """A worker driven by hand that has tiers."""

    def __init__(self, attention: str, disk: Path | None = None) -> None:
        config = with_tiers(engine_config(block_size=4, num_blocks=32, rows=3, max_len=64), disk=disk)
        config = replace(config, device=replace(config.device, enforce_eager=True))
        super().__init__(random_checkpoint(MODEL), config, attention=attention)
        self.worker.tiers = make_tiers(self.worker.cache, config.cache, triton=attention == "triton")

    def transfer(self, **orders: tuple[object, ...]) -> None:
        """A plan of nothing else."""
        self.worker.execute(StepPlan(self.step, transfers=Transfers(**orders)))  # type: ignore[arg-type]
        self.step += 1

    def report(self) -> TransferReport:
        """What has become of all orders on files."""
        tiers = self.worker.tiers
        assert isinstance(tiers, CacheTiers)
        assert isinstance(tiers._disk, DiskStore)
        assert tiers._disk.flush(PATIENCE)
        return tiers.report()


def continued(bench: Bench, row: int, count: int) -> list[int]:
    return [bench.run(decode=[row])[row] for _ in range(count)]


def answered(bench: Bench, count: int = 3) -> tuple[list[int], list[int], list[int]]:
    """Row 0 computes the prompt: its tokens then, the blocks that hold them, and what it says next."""
    bench.add(0, PROMPT)
    bench.run(chunks=[Chunk(0, 0, len(PROMPT), (0,))])
    tokens, blocks = list(bench.tokens[0]), list(bench.tables[0])
    return tokens, blocks, continued(bench, 0, count)


def fresh_row(bench: Bench, row: int, length: int = 8) -> None:
    """Another prompt, in whatever blocks are free."""
    bench.add(row, list(range(20, 20 + length)))
    bench.run(chunks=[Chunk(row, 0, length, (row,))])


@pytest.mark.parametrize("attention", ["reference", "auto"])
def test_a_row_continues_from_blocks_that_were_in_host_memory(attention: str) -> None:
    bench = TieredBench(attention)
    tokens, blocks, wanted = answered(bench)
    bench.transfer(saves=tuple(SlotMove(block, 2 + place) for place, block in enumerate(blocks)))
    bench.release(0)
    bench.free.sort(key=lambda block: block in blocks)  # the next row takes them
    fresh_row(bench, 1)
    assert set(bench.tables[1]) >= set(blocks)
    places = [bench.free.pop() for _ in blocks]
    bench.transfer(loads=tuple(SlotMove(block, 2 + place) for place, block in enumerate(places)))
    bench.tables[99] = places
    bench.add(2, tokens, parent=99, num_prompt=len(PROMPT))
    assert continued(bench, 2, 3) == wanted
    moved = bench.worker.tiers.report()
    if DEVICE == "cpu":
        assert (moved.num_saved, moved.num_loaded) == (2, 2)
        assert min(moved.save_seconds, moved.load_seconds) > 0
    bench.worker.check()


@pytest.mark.parametrize("attention", ["reference", "triton"])
def test_a_block_may_be_reused_in_the_plan_that_saves_it(attention: str) -> None:
    if attention == "triton":
        pytest.importorskip("triton")
    bench = TieredBench(attention)
    tokens, blocks, wanted = answered(bench, count=1)
    saves = tuple(SlotMove(block, place) for place, block in enumerate(blocks))
    other = np.arange(20, 28, dtype=np.int32)
    bench.tables[99] = list(blocks)
    bench.add(1, other.tolist(), parent=99)
    (new,) = bench._new
    bench._new = []
    plan = StepPlan(
        bench.step, new_rows=(new,), chunks=(Chunk(1, 0, 8, (1,)),), released=(0,), transfers=Transfers(saves=saves)
    )
    bench.worker.execute(plan)
    bench.step += 1
    places = [bench.free.pop() for _ in blocks]
    bench.transfer(loads=tuple(SlotMove(block, place) for place, block in enumerate(places)))
    bench.tables[98] = places
    bench.add(2, tokens, parent=98, num_prompt=len(PROMPT))
    assert continued(bench, 2, 1) == wanted


def test_a_row_continues_from_blocks_that_were_files(tmp_path: Path) -> None:
    first = TieredBench("reference", tmp_path / "cache")
    tokens, blocks, wanted = answered(first)
    count = len(blocks)
    saves = tuple(SlotMove(block, place) for place, block in enumerate(blocks))
    stores = tuple(FileMove(KEYS[place], place) for place in range(count))
    first.transfer(saves=saves, stores=stores)
    assert set(first.report().stored) == set(KEYS[:count])
    first.worker.tiers.close()

    second = TieredBench("reference", tmp_path / "cache")
    second.transfer(fetches=tuple(FileMove(KEYS[place], 7 - place) for place in range(count)))
    assert set(second.report().fetched) == set(KEYS[:count])
    places = [second.free.pop() for _ in range(count)]
    second.transfer(loads=tuple(SlotMove(block, 7 - place) for place, block in enumerate(places)))
    second.tables[99] = places
    second.add(2, tokens, parent=99, num_prompt=len(PROMPT))
    assert continued(second, 2, 3) == wanted
    second.transfer(drops=(KEYS[0],), fetches=(FileMove(KEYS[1], 0),))
    assert second.report().fetched == (KEYS[1],)
    second.worker.check()
    second.worker.tiers.close()
    assert not (tmp_path / "cache" / KEYS[0].hex()).exists()


def test_without_tiers_transfers_are_refused_and_nothing_is_reported() -> None:
    bench = Bench(random_checkpoint(tiny_config()), engine_config())
    with pytest.raises(ValueError, match="no tiers"):
        bench.worker.execute(StepPlan(0, transfers=Transfers(saves=(SlotMove(0, 0),))))
    bench.worker.execute(StepPlan(1))
    assert bench.worker.tiers.report() is NOTHING_MOVED


def test_without_a_disk_files_are_refused() -> None:
    bench = TieredBench("reference")
    for orders in ({"stores": (FileMove(KEYS[0], 0),)}, {"fetches": (FileMove(KEYS[0], 0),)}, {"drops": (KEYS[0],)}):
        with pytest.raises(ValueError, match="no disk tier"):
            bench.transfer(**orders)


def test_without_host_memory_there_are_no_tiers() -> None:
    cache = TieredBench("reference").worker.cache
    assert make_tiers(cache, CacheConfig(4, 32), triton=False) is NO_TIERS


class Mishap(Exception):
    """What a device says when it has failed."""


def mishap(*_: object) -> None:
    raise Mishap


def watch_closing(monkeypatch: pytest.MonkeyPatch) -> list[HostStore]:
    """The host stores that are closed from now on."""
    closed, close = list[HostStore](), HostStore.close
    monkeypatch.setattr(HostStore, "close", lambda host: (closed.append(host), close(host)))
    return closed


def disk_threads() -> set[threading.Thread]:
    """Those of tests before this one may still wait for their disk."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("quire-disk")}


def test_if_making_the_tiers_fails_their_resources_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, before = watch_closing(monkeypatch), disk_threads()
    monkeypatch.setattr(make, "_make_link", mishap)
    with pytest.raises(Mishap):
        TieredBench("reference", tmp_path / "cache")
    assert len(closed) == 1
    assert disk_threads() <= before


def test_all_tiers_are_closed_even_if_the_device_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = disk_threads()
    tiers, closed = TieredBench("reference", tmp_path / "cache").worker.tiers, watch_closing(monkeypatch)
    assert isinstance(tiers, CacheTiers)
    monkeypatch.setattr(tiers._link, "close", mishap)
    with pytest.raises(Mishap):
        tiers.close()
    assert len(closed) == 1
    assert disk_threads() <= before


def test_a_draft_model_recomputes_tokens_whose_blocks_were_loaded_only_for_the_target() -> None:
    coverage = OwnCoverage(CacheConfig(4, 16), num_rows=2, max_blocks=4)
    grants = {"grant_rows": [0, 0], "grant_slots": [0, 1], "grant_blocks": [7, 3]}
    coverage.observe(StepPlan(0, **{name: np.array(each, dtype=np.int32) for name, each in grants.items()}))
    coverage.fill(0, 8)
    assert coverage.start(0, 9, 0) == 8
    coverage.observe(StepPlan(1, transfers=Transfers(loads=(SlotMove(3, 0),))))
    assert coverage.start(0, 9, 0) == 4
    state = SlotMove(16, 1)  # of a recurrent layer: behind all blocks
    coverage.observe(StepPlan(2, transfers=Transfers(loads=(state,))))
    assert coverage.start(0, 9, 0) == 4


def make_executor(config: EngineConfig, load_format: Literal["auto", "dummy"] = "dummy") -> SingleExecutor:
    return SingleExecutor(ModelFiles("tiny", Path("nowhere"), "hf"), tiny_config(), config, load_format=load_format)


def test_the_executor_runs_and_reports_plans_with_only_transfers() -> None:
    single = make_executor(with_tiers(engine_config(block_size=16, rows=4)))
    assert single.transfers() is NOTHING_MOVED
    single.launch(StepPlan(0, transfers=Transfers(saves=(SlotMove(1, 2), SlotMove(3, 0)), loads=(SlotMove(5, 2),))))
    assert len(single.collect().token_ids) == 0
    single.check()
    deadline, saved, loaded = time.monotonic() + PATIENCE, 0, 0
    while (saved, loaded) != (2, 1):
        assert time.monotonic() < deadline
        report = single.transfers()
        saved, loaded = saved + report.num_saved, loaded + report.num_loaded
    single.close()
    assert single.transfers() is NOTHING_MOVED


def test_a_folder_that_cannot_be_used_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="disk_cache_path"):
        make_executor(with_tiers(engine_config(block_size=16, rows=4), disk=tmp_path), "auto")  # there are no files


def test_an_executor_whose_device_has_failed_releases_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Mock()
    monkeypatch.setattr(single_executor, "gc", heap)
    single = make_executor(with_tiers(engine_config(block_size=16, rows=4)))
    assert heap.mock_calls == [call.collect(), call.freeze()]
    monkeypatch.setattr(CacheTiers, "close", mishap)
    with pytest.raises(Mishap):
        single.close()
    assert heap.mock_calls[2:] == [call.unfreeze()]
    assert single.transfers() is NOTHING_MOVED
    single.close()


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is compiled for a CPU")
def test_an_executor_that_cannot_be_made_ready_closes_its_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = disk_threads()
    monkeypatch.setattr(Worker, "prepare", mishap)
    with pytest.raises(Mishap):
        make_executor(with_tiers(engine_config(block_size=16, rows=4), disk=tmp_path / "cache"))
    assert disk_threads() <= before
