"""Measures the control message of a step, from the engine's process to all ranks: bytes, and time to deliver it.

    python -m benchmarks.control_message --rows 256 --ranks 1,2,4

The load is steady: every row decodes, and gets a block every `block size` steps. A rank is a process that waits for
messages like a real rank and records the time. All times start before the plan is encoded, and are measured with the
clock that all processes share. Every plan is sent twice. The first time, a rank only takes the message:

- encode: until the engine's thread has the message. In a loop: without the pauses between steps, in which caches become
  cold.
- handed over: until the message is in shared memory, ranks are woken, and the engine's thread continues. With
  `--sockets`: until it is in the sockets of all ranks, as between machines and without the compiled kernels.
- delivered: until the last rank has the bytes. Waking it quickly needs a core for each rank, and a machine without
  other work.

The second time, a rank decodes the message at once, as a real rank does:

- behind others: until the last rank has the bytes. With fewer cores than ranks, it gets them only after other ranks on
  its core have decoded the plan; otherwise this is the same as "delivered".
- decoded: until the last rank has decoded the plan.
- engine's CPU, rank's CPU: processor time of the engine's thread until the message is handed over, including waking
  ranks, and of the slowest rank from waiting for the message to having decoded it. Other work on the machine hardly
  changes these.

`--together`: all rows get their blocks in the same step, and that step is measured.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from quire.runtime.executor.channel import Channel, Kind, channel_pair, frame
from quire.runtime.executor.codec import Buffer
from quire.runtime.executor.plan_codec import PlanDecoder, PlanEncoder
from quire.runtime.executor.rings import EngineRings, RankRings, rings_bytes
from quire.types.step import StepPlan

BLOCK_SIZE = 16
COLUMNS = ("encode", "handed over", "delivered", "behind others", "decoded", "engine's CPU", "rank's CPU")
TIMES = struct.Struct("<QQQ")  # nanoseconds: received, decoded, and of CPU


def make_plans(num_rows: int, num_steps: int, *, together: bool) -> list[StepPlan]:
    """Return plans in which all rows decode."""
    rng, rows = np.random.default_rng(0), np.arange(num_rows, dtype=np.int32)
    first = np.zeros(num_rows, dtype=np.int32) if together else rng.integers(0, BLOCK_SIZE, num_rows).astype(np.int32)
    plans = []
    for step in range(num_steps):
        lucky = rows[(first + step) % BLOCK_SIZE == 0]
        slots = ((first[lucky] + step) // BLOCK_SIZE + 12).astype(np.int32)
        blocks = rng.integers(0, 60_000, len(lucky)).astype(np.int32)
        plans.append(StepPlan(step, decode_rows=rows, grant_rows=lucky, grant_slots=slots, grant_blocks=blocks))
    return [plan for plan in plans if not together or len(plan.grant_rows)]


def serve_rank(rank: int, num_ranks: int, descriptor: int, rings: int) -> None:
    """Act as a rank: answer each message with the times at which its bytes had arrived and, if it is a plan, it was
    decoded. `rings`: file descriptor of the message rings; below 0: messages come through the socket."""
    channel, decoder = Channel(socket.socket(fileno=descriptor)), PlanDecoder()
    line = channel if rings < 0 else RankRings(channel, mmap.mmap(rings, 0), num_ranks, rank)
    assert line.receive() is not None  # the start
    channel.send(Kind.READY)
    used = time.thread_time_ns()
    while (message := line.receive()) is not None and message.kind is not Kind.STOP:
        received = time.monotonic_ns()
        if message.kind is Kind.PLAN:
            decoder.decode(message.data)
        line.send(Kind.RESULT, TIMES.pack(received, time.monotonic_ns(), time.thread_time_ns() - used))
        used = time.thread_time_ns()


class Ranks:
    """Processes that serve plans."""

    def __init__(self, count: int, *, sockets: bool) -> None:
        pairs = [channel_pair() for _ in range(count)]
        memory = os.memfd_create("benchmark-rings", os.MFD_CLOEXEC)
        os.ftruncate(memory, rings_bytes(count))
        self.channels, self._map = [ours for ours, _ in pairs], mmap.mmap(memory, 0)
        self.rings = None if sockets else EngineRings(self._map, count, range(count))
        command = [sys.executable, "-m", "benchmarks.control_message", "--serve"]
        self._processes = []
        for rank, (_, theirs) in enumerate(pairs):
            numbers = (rank, count, theirs.fileno(), -1 if sockets else memory)
            descriptors = (theirs.fileno(), memory)
            self._processes.append(subprocess.Popen([*command, *map(str, numbers)], pass_fds=descriptors))
            theirs.close()
        os.close(memory)
        for channel in self.channels:
            channel.send(Kind.START)
        for channel in self.channels:
            channel.receive()

    def send(self, kind: Kind, payload: Buffer = b"") -> None:
        if self.rings is not None:
            assert self.rings.post(kind, payload)
            return
        data = frame(kind, payload)
        for channel in self.channels:
            rest = channel.try_send(data)
            assert not rest

    def receive(self) -> list[Buffer]:
        if self.rings is None:
            return [message.data for channel in self.channels if (message := channel.receive()) is not None]
        found = self.rings.receive_results(60_000_000)  # a rank imports torch before its first result
        assert found is not None, "a rank gave no result within 60 s"
        return [data for _, data in found if data is not None]

    def close(self) -> None:
        self.send(Kind.STOP)
        for channel, process in zip(self.channels, self._processes, strict=True):
            process.wait()
            channel.close()


def measure(
    ranks: Ranks, kind: Kind, plans: list[StepPlan], pause: Callable[[], None]
) -> list[tuple[int, float, float, float, float, float, float]]:
    """Send plans as messages of a kind: ranks decode a PLAN, and only take a REPORT. Returns, for every plan, its bytes
    and the microseconds until it was encoded, handed over, received by all and answered by all, of the engine's CPU
    and of the slowest rank's CPU."""
    encoder, found = PlanEncoder(), []
    for plan in plans:
        pause()  # so that ranks wait, as between two steps
        used, begin = time.thread_time_ns(), time.monotonic_ns()
        payload = encoder.encode(plan)
        encoded = time.monotonic_ns()
        ranks.send(kind, payload)
        handed, used = time.monotonic_ns(), time.thread_time_ns() - used
        times = [TIMES.unpack(data) for data in ranks.receive()]
        received, known, theirs_used = (max(column) for column in zip(*times, strict=True))
        walls = (at - begin for at in (encoded, handed, received, known))
        found.append((len(payload), *(each / 1e3 for each in (*walls, used, theirs_used))))
    return found[len(found) // 5 :]  # without the first ones


def encode_in_a_loop(plans: list[StepPlan]) -> float:
    """Return the microseconds to encode a plan, in the best of several rounds."""
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
    parser.add_argument("--sockets", action="store_true", help="send messages through sockets, not in shared memory")
    parser.add_argument("--serve", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve_rank(*options.serve)
        return
    plans = make_plans(options.rows, options.steps, together=options.together)
    print(f"{options.rows} rows decode; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians and p10")
    print(f"encode in a loop: {encode_in_a_loop(plans):.1f} us")
    print(f"{'ranks':>5} {'bytes':>6} {'most':>6}" + "".join(f"{name + ' us':>18}" for name in COLUMNS))
    for num_ranks in map(int, options.ranks.split(",")):
        ranks = Ranks(num_ranks, sockets=options.sockets)
        taken, decoded = (
            list(zip(*measure(ranks, kind, plans, lambda: time.sleep(options.pause)), strict=True))
            for kind in (Kind.REPORT, Kind.PLAN)
        )
        ranks.close()
        sizes, *columns = *taken[:4], *decoded[3:]
        texts = [f"{statistics.median(column):.1f} {np.percentile(column, 10):.1f}" for column in columns]
        head = f"{num_ranks:>5} {statistics.median(sizes):>6.0f} {max(sizes):>6}"
        print(head + "".join(f"{text:>18}" for text in texts))


if __name__ == "__main__":
    main()
