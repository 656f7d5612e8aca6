"""Messages of an engine and its ranks in shared memory, and those that go through the channels."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.config.parallel import ParallelConfig
from quire.kernels.native.ring_layout import MOST_BYTES, SLOTS
from quire.runtime.executor import links
from quire.runtime.executor.channel import Channel, Kind, channel_pair
from quire.runtime.executor.fault_finder import Fault
from quire.runtime.executor.rank_messages import RankMessages
from quire.runtime.executor.rings import EngineRings, RankRings, can_ring, rings_bytes
from quire.types.errors import EngineDead
from quire.types.step import StepPlan
from ranked_engines import config_of, decode_step, first_step, leaving_nothing, make_ranked, make_single, new_row, pids

SMALL, LARGE = b"a small one", bytes(range(256)) * (MOST_BYTES // 256 + 1)

pytestmark = pytest.mark.skipif(not can_ring(), reason="the compiled kernels are not here")


class Ranks:
    """Ranks of one stage and what the engine has of them; a test is all of them at once, or lets threads be some."""

    def __init__(self, count: int) -> None:
        memory, pairs = mmap.mmap(-1, rings_bytes(count)), [channel_pair() for _ in range(count)]
        places = [ParallelConfig(count).place(number) for number in range(count)]
        ranks: Any = [
            SimpleNamespace(place=place, control=ours) for place, (ours, _) in zip(places, pairs, strict=True)
        ]
        self.watch: Any = SimpleNamespace(fault=None, dead_engine_error=lambda: EngineDead("a rank is gone"))
        self.messages = RankMessages(ranks, self.watch, EngineRings(memory, count, range(count)))
        self.channels, self._theirs = [ours for ours, _ in pairs], [Channel(theirs) for _, theirs in pairs]
        self.ranks = [RankRings(channel, memory, count, number) for number, channel in enumerate(self._theirs)]
        for channel, rank in zip(self.channels, self.ranks, strict=True):
            channel.send(Kind.START, b"job")
            assert rank.receive() == (Kind.START, b"job")

    def close(self) -> None:
        for channel in (*self.channels, *self._theirs):
            channel.close()


@pytest.fixture
def pair() -> Iterator[Ranks]:
    with contextlib.closing(Ranks(2)) as made:
        yield made


def test_all_ranks_get_small_and_large_messages_in_order(pair: Ranks) -> None:
    sent = [(Kind.PLAN, SMALL), (Kind.PLAN, LARGE), (Kind.MASKS, b""), (Kind.MASKS, LARGE), (Kind.CHECK, b"")]
    for kind, payload in sent:
        pair.messages.send(kind, payload)
    for rank in pair.ranks:
        found = [rank.receive() for _ in sent]
        assert [(each.kind, bytes(each.data)) for each in found if each is not None] == sent


def test_results_of_all_ranks_arrive_together_small_and_large(pair: Ranks) -> None:
    first, second = pair.ranks
    first.send(Kind.RESULT, SMALL)
    second.send(Kind.RESULT, LARGE)
    second.send(Kind.TRANSFERS, b"moved")
    second.send(Kind.RESULT, b"next")
    first.send(Kind.RESULT, LARGE)
    assert [bytes(data) for data in pair.messages.receive_results()] == [SMALL, LARGE]
    assert [bytes(data) for data in pair.messages.receive_results()] == [LARGE, b"next"]
    assert [bytes(message.data) for message in pair.messages.take_all(1, Kind.TRANSFERS)] == [b"moved"]
    assert pair.messages.take_all(1, Kind.TRANSFERS) == []


@pytest.mark.parametrize("payload", [SMALL, LARGE])
def test_plans_and_results_that_nobody_reads_for_long_do_not_block_each_other(pair: Ranks, payload: bytes) -> None:
    """The engine sends more plans than fit before it takes a result, and ranks wait for that."""
    count = 100

    def serve(rank: RankRings) -> None:
        while (message := rank.receive()) is not None and message.kind is Kind.PLAN:
            rank.send(Kind.RESULT, bytes(message.data))

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in pair.ranks]
    for thread in threads:
        thread.start()
    for number in range(count):
        pair.messages.send(Kind.PLAN, b"%d" % number + payload)
    for number in range(count):
        assert [bytes(data) for data in pair.messages.receive_results()] == [b"%d" % number + payload] * 2
    pair.messages.send_stop()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_an_engine_that_waits_for_a_result_notices_a_failed_rank(pair: Ranks) -> None:
    pair.ranks[0].send(Kind.RESULT, SMALL)
    threading.Timer(0.1, setattr, (pair.watch, "fault", Fault("rank 1 was killed"))).start()
    with pytest.raises(EngineDead, match="rank 1 was killed"):
        pair.messages.receive_results()
    with pytest.raises(EngineDead, match="rank 1 was killed"):
        pair.messages.send(Kind.PLAN, SMALL)


def test_an_engine_that_waits_for_a_slow_rank_notices_its_end(pair: Ranks) -> None:
    threading.Timer(0.1, pair._theirs[1].close).start()
    with pytest.raises(EngineDead, match="a rank is gone"):
        for _ in range(1_000):
            pair.messages.send(Kind.PLAN, SMALL)


def test_a_rank_that_waits_notices_that_the_engine_is_gone(pair: Ranks) -> None:
    pair.channels[0].close()
    with pytest.raises(EOFError):
        pair.ranks[0].receive()
    with pytest.raises((EOFError, OSError)):
        for _ in range(1_000):
            pair.ranks[0].send(Kind.RESULT, SMALL)


def test_ranks_get_stop_even_if_a_slow_one_has_filled_the_ring(pair: Ranks) -> None:
    for _ in range(SLOTS - 1):
        pair.messages.send(Kind.PLAN, SMALL)
    pair.messages.send(Kind.PLAN, LARGE)
    pair.messages.send_stop()
    for rank in pair.ranks:
        found = [rank.receive() for _ in range(SLOTS + 1)]
        assert [message.kind for message in found if message is not None] == [Kind.PLAN] * SLOTS + [Kind.STOP]


def test_the_memory_of_rings_that_a_thread_reads_stays_until_it_is_done() -> None:
    memory, launcher = mmap.mmap(-1, rings_bytes(2)), links.ProcessLauncher(ParallelConfig(2), None)
    launcher._memory, launcher.rings = [memory], EngineRings(memory, 2, range(2))
    receive = launcher.rings.receive_results
    launcher.close()
    assert receive(0) is None
    assert not memory.closed
    del receive
    memory.close()


def failure(program: str, **environment: str) -> str:
    """What a process that runs the program says of its failure; nothing if all its assertions hold."""
    command, variables = [sys.executable, "-c", program], {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=variables)
    return done.stderr if done.returncode else ""


def test_a_rank_opens_the_kernels_of_the_path_that_the_environment_names() -> None:
    program = """
import mmap
from quire.runtime.executor.channel import Channel, Kind, channel_pair
from quire.runtime.executor.rings import RankRings, rings_bytes
from quire.types.errors import ConfigError
ours, theirs = channel_pair()
rank = RankRings(Channel(theirs), mmap.mmap(-1, rings_bytes(1)), 1, 0)
ours.send(Kind.START)
rank.receive()
try:
    rank.send(Kind.RESULT)
except ConfigError as error:
    assert "no-such-path" in str(error), error
else:
    raise AssertionError("it opened others")
"""
    assert failure(program, QUIRE_CPU_PATH="no-such-path") == ""


def test_a_rank_is_tied_to_its_engine_and_waits_for_its_job_before_it_imports_torch() -> None:
    program = """
import mmap, sys
import quire.runtime.executor.rank_main
from quire.runtime.executor.channel import Channel, Kind, channel_pair
from quire.runtime.executor.rings import RankRings, rings_bytes
ours, theirs = channel_pair()
rank = RankRings(Channel(theirs), mmap.mmap(-1, rings_bytes(1)), 1, 0)
ours.send(Kind.START)
rank.receive()
assert "torch" not in sys.modules
"""
    assert failure(program) == ""


def test_closed_messages_refuse_to_send_and_receive(pair: Ranks) -> None:
    pair.messages.close()
    with pytest.raises(EngineDead, match="closed"):
        pair.messages.send(Kind.PLAN, SMALL)
    with pytest.raises(EngineDead, match="closed"):
        pair.messages.receive_results()


@pytest.mark.parametrize("rings", [True, False], ids=["shared memory", "sockets"])
def test_real_ranks_run_many_steps_and_release_everything(monkeypatch: pytest.MonkeyPatch, *, rings: bool) -> None:
    monkeypatch.setattr(links, "can_ring", lambda: rings)
    single = make_single()
    plans = [first_step(0, new_row(0, 5)), *(decode_step(step, 0) for step in range(1, 9))]
    plans.append(StepPlan(9, released=(0,)))
    expected = []
    for plan in plans:
        single.launch(plan)
        expected.append(single.collect().token_ids.tolist())
    single.close()
    with leaving_nothing() as started:
        executor = make_ranked(config_of())
        started += pids(executor)
        for _ in range(3):
            for plan in plans:  # more than there are slots, before one is collected
                executor.launch(plan)
            found = [executor.collect().token_ids.tolist() for _ in plans]
            assert found == expected
        executor.check()
        executor.close()
    assert np.concatenate([np.array(tokens) for tokens in expected]).size == 9
