"""Kills or halts actors of an engine over Ray while it answers, and counts what is left afterwards.

    python tests/support/ray_drill.py --kills 10 [--address HOST:PORT]

Every round makes a new executor, checks its tokens against one process, lets it answer, kills an actor in the middle,
and checks that the error names the rank, that no process or placement group is left, and that the next one works.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from quire.config.parallel import ParallelConfig
from quire.runtime.executor.ranked import RankedExecutor, RankJob
from quire.runtime.executor.ray_ranks import RayLauncher, RayRank
from quire.types.errors import EngineDead
from ranked_engines import FILES, MODEL, decode_step, first_step, make_single, new_row, open_descriptors
from real_server import is_alive
from tiny_models import engine_config


def make_rayed(address: str | None = None) -> RankedExecutor:
    parallel = ParallelConfig(2, executor="ray", ray_address=address)
    config = replace(engine_config(block_size=16, rows=4), parallel=parallel)
    return RankedExecutor(RankJob(FILES, MODEL, config, "dummy"), RayLauncher(parallel, on_gpus=False))


def tokens_of(executor: RankedExecutor | None) -> list[int]:
    """The first tokens of a row."""
    used = executor or make_single()
    used.launch(first_step(0, new_row(0, 5)))
    found = used.collect().token_ids.tolist()
    for step in range(1, 8):
        used.launch(decode_step(step, 0))
        found += used.collect().token_ids.tolist()
    return found


def drill(executor: RankedExecutor, victim: int, number: signal.Signals) -> tuple[str, float]:
    """Run steps until the executor is dead. Returns what it said, and the seconds from the signal to the error."""
    ranks = [rank for rank in executor.ranks if isinstance(rank, RayRank)]
    try:
        for step in range(8, 200):
            if step == 20:
                sent = time.monotonic()
                os.kill(ranks[victim]._pid, number)
            executor.launch(decode_step(step, 0))
            executor.collect()
    except EngineDead as error:
        return str(error), time.monotonic() - sent
    raise AssertionError("the executor survived")


def main() -> None:
    import ray

    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--address")
    options = parser.parse_args()
    options_of_ray = {"log_to_driver": False, "logging_level": "ERROR"}
    if options.address is None:
        ray.init(address="local", num_cpus=2, include_dashboard=False, **options_of_ray)
    else:
        ray.init(address=options.address, **options_of_ray)
    expected, before = tokens_of(None), None
    for number in range(options.kills):
        executor = make_rayed(options.address)
        assert tokens_of(executor) == expected
        pids = [rank._pid for rank in executor.ranks if isinstance(rank, RayRank)]
        kind = signal.SIGSTOP if number % 5 == 4 else signal.SIGKILL
        said, seconds = drill(executor, number % 2, kind)
        victim = number % 2
        assert said.startswith(f"rank {victim} of 2 (stage 0, shard {victim}, actor with pid {pids[victim]} on ")
        executor.close()
        assert not [pid for pid in pids if is_alive(pid)]
        before = open_descriptors() if before is None else before
        print(f"{number + 1}: {kind.name}: named after {seconds:.2f} s: {said}", flush=True)
    assert before is not None
    assert open_descriptors() - before < max(2, options.kills)  # an engine has six; Ray keeps some of its own
    groups = left_over_groups()
    assert not groups, groups
    print("nothing is left")
    ray.shutdown()


def left_over_groups() -> list[str]:
    from ray.util import placement_group_table

    return [key for key, group in placement_group_table().items() if group["state"] != "REMOVED"]


if __name__ == "__main__":
    main()
