"""An engine process over the fake executor, for tests of everything around it: `python -m fake_engine_main FD`.

What the "model" is called says how it behaves: see `behaviour`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fake_executor import VOCAB, FakeExecutor
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.serving.process.control import EngineStart
from quire.serving.process.engine_process import Report, run_engine
from quire.serving.process.link import EngineReady
from quire.types.errors import ModelLoadError
from quire.types.step import StepPlan

BLOCKS, BLOCK_SIZE = 8_192, 4
MAX_LENGTH = 30_000
ENDLESS = 20_000  # tokens, which take a slow engine longer than any test
HANG, CRASH, KILL, LATE = 90, 91, 92, 93  # a prompt that begins with one of these tokens is bad for the engine
LATE_STEPS = 6  # after which LATE crashes it


@dataclass
class SlowExecutor(FakeExecutor):
    """Takes its time for every step, hangs, crashes or kills its process where a prompt asks for it."""

    seconds: float = 0.0
    steps_left: int | None = None  # until a late crash

    def launch(self, plan: StepPlan) -> None:
        time.sleep(self.seconds)
        for new in plan.new_rows:
            if new.token_ids[0] == HANG:
                time.sleep(3_600)
            if new.token_ids[0] == CRASH:
                raise RuntimeError("device lost")
            if new.token_ids[0] == KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            if new.token_ids[0] == LATE:
                self.steps_left = LATE_STEPS
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        super().launch(plan)


def load(start: EngineStart, report: Report) -> tuple[EngineCore, EngineReady]:
    """`slow` in the model's name: 20 ms a step; `broken`: it never loads; `dies`: the process ends while loading;
    `stalls`: loading hangs."""
    name = Path(start.config.source.model).stem
    report("loading", 0, 2)
    if "broken" in name:
        raise ModelLoadError("weights.gguf", "is cut short", fix="download it again")
    if "dies" in name:
        sys.exit(3)
    if "stalls" in name:
        time.sleep(3_600)
    report("loading", 2, 2)
    executor = SlowExecutor(BLOCKS, BLOCK_SIZE, seconds=0.02 if "slow" in name else 0.0)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=MAX_LENGTH)
    core = EngineCore(executor, CacheConfig(BLOCK_SIZE, BLOCKS), scheduler, VOCAB)
    ready = EngineReady(start.generation, MAX_LENGTH, VOCAB, 8, BLOCK_SIZE, BLOCKS, "float32", "cpu", "fcfs", ())
    return core, ready


if __name__ == "__main__":
    sys.exit(run_engine(sys.argv[1:], load))
