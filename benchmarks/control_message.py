"""The control message of a step, from the engine's process to all ranks: bytes, and microseconds to encode and deliver.

    python -m benchmarks.control_message --rows 256 --ranks 1,2,4

Plans are those of a steady load: every row decodes, and gets a block every `block size` steps. A rank is a process that
waits at the other end of a socket pair, as a rank's does, decodes the plan and notes the time. Delivered: from before
the plan is encoded until the last rank has its bytes, on the clock that all processes share. `--together`: all rows get
their blocks in the same step, which is then measured.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import struct
import subprocess
import sys
import time

import numpy as np

from quire.runtime.executor.channel import Channel, Kind, channel_pair
from quire.runtime.executor.plan_codec import PlanDecoder, PlanEncoder
from quire.types.step import StepPlan

BLOCK_SIZE = 16
TIMES = struct.Struct("<QQ")  # nanoseconds: received, decoded


def make_plans(num_rows: int, num_steps: int, *, together: bool) -> list[StepPlan]:
    """Plans in which all rows decode."""
    rng, rows = np.random.default_rng(0), np.arange(num_rows, dtype=np.int32)
    first = np.zeros(num_rows, dtype=np.int32) if together else rng.integers(0, BLOCK_SIZE, num_rows).astype(np.int32)
    plans = []
    for step in range(num_steps):
        lucky = rows[(first + step) % BLOCK_SIZE == 0]
        slots = ((first[lucky] + step) // BLOCK_SIZE + 12).astype(np.int32)
        blocks = rng.integers(0, 60_000, len(lucky)).astype(np.int32)
        plans.append(StepPlan(step, decode_rows=rows, grant_rows=lucky, grant_slots=slots, grant_blocks=blocks))
    return [plan for plan in plans if not together or len(plan.grant_rows)]


def serve_rank(descriptor: int) -> None:
    """What a rank does with plans here: it answers with the times at which it had the bytes and the plan."""
    channel, decoder = Channel(socket.socket(fileno=descriptor)), PlanDecoder()
    while (message := channel.receive()) is not None and message.kind is Kind.PLAN:
        received = time.monotonic_ns()
        decoder.decode(message.data)
        channel.send(Kind.RESULT, TIMES.pack(received, time.monotonic_ns()))


def measure(num_ranks: int, plans: list[StepPlan], pause: float) -> list[tuple[int, float, float, float]]:
    """Of every plan: bytes, and microseconds to encode it, until all ranks have its bytes, and until all know it."""
    pairs = [channel_pair() for _ in range(num_ranks)]
    command = [sys.executable, "-m", "benchmarks.control_message", "--serve"]
    processes = [subprocess.Popen([*command, str(theirs.fileno())], pass_fds=(theirs.fileno(),)) for _, theirs in pairs]
    channels, encoder, found = [ours for ours, _ in pairs], PlanEncoder(), []
    for _, theirs in pairs:
        theirs.close()
    for plan in plans:
        time.sleep(pause)  # ranks wait, as between two steps
        begin = time.monotonic_ns()
        payload = encoder.encode(plan)
        encoded = time.monotonic_ns()
        for channel in channels:
            channel.send(Kind.PLAN, payload)
        times = [TIMES.unpack(message.data) for channel in channels if (message := channel.receive()) is not None]
        received, known = (max(column) for column in zip(*times, strict=True))
        found.append((len(payload), (encoded - begin) / 1e3, (received - begin) / 1e3, (known - begin) / 1e3))
    for channel, process in zip(channels, processes, strict=True):
        channel.send(Kind.STOP)
        process.wait()
        channel.close()
    return found[len(found) // 5 :]  # without the first ones


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks")
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--pause", type=float, default=0.002, help="seconds between two steps")
    parser.add_argument("--together", action="store_true", help="all rows get their blocks in the same steps")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve_rank(options.serve)
        return
    plans = make_plans(options.rows, options.steps, together=options.together)
    print(f"{options.rows} rows decode; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians and p10")
    print(f"{'ranks':>5} {'bytes':>6} {'most':>6} {'encode us':>12} {'deliver us':>14} {'decoded us':>14}")
    for num_ranks in map(int, options.ranks.split(",")):
        columns = list(zip(*measure(num_ranks, plans, options.pause), strict=True))
        texts = [f"{statistics.median(column):6.1f} {np.percentile(column, 10):5.1f}" for column in columns[1:]]
        sizes = columns[0]
        head = f"{num_ranks:>5} {statistics.median(sizes):>6.0f} {max(sizes):>6}"
        print(f"{head} {texts[0]:>12} {texts[1]:>14} {texts[2]:>14}")


if __name__ == "__main__":
    main()
