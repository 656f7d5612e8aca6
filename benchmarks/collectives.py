"""Measures how long two or more CPU ranks take to all-reduce a tensor: in shared memory, and by Gloo over loopback.

python -m benchmarks.collectives --ranks 2
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.queues import Queue

import torch

from quire.runtime.parallel.group import RankGroup, TorchGroup
from quire.runtime.parallel.shared_group import SharedGroup, make_shared_memory

SHAPES = ((1, 576), (64, 576), (1, 4096), (512, 4096))
ROUNDS, REPEATS = 5, 100
Times = dict[tuple[str, tuple[int, int]], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    descriptor = make_shared_memory(ranks)
    context = multiprocessing.get_context("fork")
    found: Queue[Times] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank, args=(i, ranks, descriptor, folder, found)) for i in range(ranks)]
        for process in processes:
            process.start()
        times = found.get()
        for process in processes:
            process.join()
    os.close(descriptor)
    print(f"{ranks} ranks, median microseconds of a sum in float32")
    print(f"{'shape':>12} {'shared memory':>14} {'gloo':>8}")
    for shape in SHAPES:
        print(f"{shape[0]:>5} x {shape[1]:<5} {times['shared', shape]:>13.1f} {times['gloo', shape]:>8.1f}")


def _rank(index: int, size: int, descriptor: int, folder: str, found: Queue[Times]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=index, world_size=size)
    groups: dict[str, RankGroup] = {
        "shared": SharedGroup(descriptor, index, size, seconds=60.0),
        "gloo": TorchGroup(range(size), "gloo", seconds=60.0),
    }
    rounds: dict[tuple[str, tuple[int, int]], list[float]] = {}
    for _ in range(ROUNDS):  # interleaved
        for name, group in groups.items():
            for shape in SHAPES:
                rounds.setdefault((name, shape), []).append(_microseconds(group.all_reduce, torch.ones(shape)))
    if index == 0:
        found.put({key: statistics.median(values) for key, values in rounds.items()})


def _microseconds(work: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    begin = time.perf_counter()
    for _ in range(REPEATS):
        work(x)
        x.fill_(1.0)
    return (time.perf_counter() - begin) / REPEATS * 1e6


if __name__ == "__main__":
    main()
