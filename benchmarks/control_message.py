"""The control message of a step, from the engine's process to all ranks: bytes, and microseconds to encode and deliver.

    python -m benchmarks.control_message --rows 256 --ranks 1,2,4

Plans are those of a steady load: every row decodes, and gets a block every `block size` steps. A rank is a process that
waits at the other end of a socket pair, as a rank's does, decodes the plan and notes the time. All times begin before
the plan is encoded, and the clock is the one that all processes share:

- encode: the engine's thread has the message. In a loop: without the pauses between steps, in which caches grow cold.
- handed over: the message is in the sockets of all ranks, and the engine's thread goes on.
- delivered: the last rank has its bytes. It had to be woken: that takes a core for each rank, and a machine without
  other work.
- decoded: the last rank knows the plan.
- engine's CPU, rank's CPU: the processor time of the engine's thread until the message is handed over, waking ranks
  included, and of the slowest rank from waiting for the message to knowing the plan. Other work on the machine hardly
  changes these.

`--together`: all rows get their blocks in the same step, which is then measured.
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

from quire.runtime.executor.channel import Channel, Kind, channel_pair, frame
from quire.runtime.executor.plan_codec import PlanDecoder, PlanEncoder
from quire.types.step import StepPlan

BLOCK_SIZE = 16
COLUMNS = ("encode", "handed over", "delivered", "decoded", "engine's CPU", "rank's CPU")
TIMES = struct.Struct("<QQQ")  # nanoseconds: received, decoded, and of CPU


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
    used = time.thread_time_ns()
    while (message := channel.receive()) is not None and message.kind is Kind.PLAN:
        received = time.monotonic_ns()
        decoder.decode(message.data)
        channel.send(Kind.RESULT, TIMES.pack(received, time.monotonic_ns(), time.thread_time_ns() - used))
        used = time.thread_time_ns()


def measure(num_ranks: int, plans: list[StepPlan], pause: float) -> list[tuple[float, ...]]:
    """Of every plan: bytes, and the microseconds of COLUMNS."""
    pairs = [channel_pair() for _ in range(num_ranks)]
    command = [sys.executable, "-m", "benchmarks.control_message", "--serve"]
    processes = [subprocess.Popen([*command, str(theirs.fileno())], pass_fds=(theirs.fileno(),)) for _, theirs in pairs]
    channels, encoder, found = [ours for ours, _ in pairs], PlanEncoder(), []
    for _, theirs in pairs:
        theirs.close()
    for plan in plans:
        time.sleep(pause)  # ranks wait, as between two steps
        used, begin = time.thread_time_ns(), time.monotonic_ns()
        payload = encoder.encode(plan)
        encoded = time.monotonic_ns()
        data = frame(Kind.PLAN, payload)
        for channel in channels:
            rest = channel.try_send(data)
            assert not rest
        handed, used = time.monotonic_ns(), time.thread_time_ns() - used
        times = [TIMES.unpack(message.data) for channel in channels if (message := channel.receive()) is not None]
        received, known, theirs_used = (max(column) for column in zip(*times, strict=True))
        walls = (at - begin for at in (encoded, handed, received, known))
        found.append((len(payload), *(each / 1e3 for each in (*walls, used, theirs_used))))
    for channel, process in zip(channels, processes, strict=True):
        channel.send(Kind.STOP)
        process.wait()
        channel.close()
    return found[len(found) // 5 :]  # without the first ones


def encode_in_a_loop(plans: list[StepPlan]) -> float:
    """Microseconds for a plan, in the best of some rounds."""
    encoder, best = PlanEncoder(), float("inf")
    for _ in range(20):
        begin = time.perf_counter_ns()
        for plan in plans:
            encoder.encode(plan)
        best = min(best, (time.perf_counter_ns() - begin) / 1e3 / len(plans))
    return best


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
    print(f"encode in a loop: {encode_in_a_loop(plans):.1f} us")
    print(f"{'ranks':>5} {'bytes':>6} {'most':>6}" + "".join(f"{name + ' us':>16}" for name in COLUMNS))
    for num_ranks in map(int, options.ranks.split(",")):
        columns = list(zip(*measure(num_ranks, plans, options.pause), strict=True))
        texts = [f"{statistics.median(column):.1f} {np.percentile(column, 10):.1f}" for column in columns[1:]]
        sizes = columns[0]
        head = f"{num_ranks:>5} {statistics.median(sizes):>6.0f} {max(sizes):>6}"
        print(head + "".join(f"{text:>16}" for text in texts))


if __name__ == "__main__":
    main()
