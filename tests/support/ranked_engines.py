"""Executors over rank processes with a tiny random model, and what is left of them afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.config.engine import EngineConfig
from quire.config.parallel import ParallelConfig
from quire.runtime.executor.links import ProcessLauncher, ProcessRank
from quire.runtime.executor.ranked import RankedExecutor, RankJob
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.files import ModelFiles
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Chunk, NewRow, StepPlan
from real_server import is_alive
from tiny_models import engine_config, tiny_config

FILES = ModelFiles("tiny", Path("nowhere"), "hf")
MODEL = tiny_config()


def config_of(config: EngineConfig | None = None, *, tensor: int = 2, timeout: float = 60.0) -> EngineConfig:
    config = config or engine_config(block_size=16, rows=4)
    return replace(config, parallel=ParallelConfig(tensor, executor="processes", rank_timeout=timeout))


def make_single(config: EngineConfig | None = None) -> SingleExecutor:
    return SingleExecutor(FILES, MODEL, config or engine_config(block_size=16, rows=4), load_format="dummy")


def make_ranked(config: EngineConfig, *, module: str = "quire.runtime.executor.rank_main") -> RankedExecutor:
    launcher = ProcessLauncher(config.parallel, None, module)
    return RankedExecutor(RankJob(FILES, MODEL, config, "dummy"), launcher)


def pids(executor: RankedExecutor) -> list[int]:
    return [rank.process.pid for rank in executor.ranks if isinstance(rank, ProcessRank)]


@contextmanager
def leaving_nothing() -> Iterator[list[int]]:
    """Demand that no process, descriptor or file is left. Processes are named by whoever adds them to the list."""
    before, files, started = open_descriptors(), shared_files(), []
    yield started
    assert started
    assert not [pid for pid in started if is_alive(pid)]
    assert open_descriptors() == before
    assert shared_files() == files


def open_descriptors() -> int:
    """Sockets, and memory that is shared with ranks."""
    targets = [_target(number) for number in os.listdir("/proc/self/fd")]  # noqa: PTH208 - names only
    return sum(target.startswith(("socket:", "/memfd:quire")) for target in targets)


def _target(number: str) -> str:
    try:
        return str(Path(f"/proc/self/fd/{number}").readlink())
    except OSError:
        return ""


def shared_files() -> set[str]:
    return {path.name for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob("*quire-rank*")}


def new_row(number: int, length: int, **sampling: Any) -> NewRow:
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    tokens = np.arange(1, length + 1, dtype=np.int32)
    return NewRow(number, tokens, length, (number,), params, TokenRules(), sample_index=0, seed=7)


def first_step(step: int, *rows: NewRow) -> StepPlan:
    chunks = tuple(Chunk(new.row, 0, len(new.token_ids), (new.row,)) for new in rows)
    return StepPlan(step, new_rows=rows, chunks=chunks)


def decode_step(step: int, *rows: int) -> StepPlan:
    return StepPlan(step, decode_rows=np.array(rows, dtype=np.int32))
