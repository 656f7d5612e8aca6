"""The engine's loop over a real socket: what edges ask for happens, and what one of them does never harms another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine_thread import PATIENCE, EngineThread, PlainEdge
from fake_executor import continuation
from quire.config.engine import SchedulerConfig
from quire.engine import messages, transport
from quire.engine.command_messages import CommandAnswer, message_of
from quire.engine.messages import (
    AdapterAnswer,
    Ask,
    BlockMapAnswer,
    CacheReset,
    Goodbye,
    Lost,
    StatsAnswer,
    decode_from_engine,
)
from quire.engine.process import _split_large
from quire.engine.progress import ProgressReader
from quire.engine.submission import MAX_ANSWER, check_answer_size
from quire.types.errors import InvalidRequest, QuireError
from quire.types.output import Finished, SampleEnd, TokensOut
from quire.types.request import Abort, Submit
from quire.types.sampling import SamplingParams
from quire.types.standby import Command, PauseMode
from quire.types.step import TokenLogprobs

Start = Callable[..., EngineThread]
Connect = Callable[..., PlainEdge]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[EngineThread] = []

    def begin(**settings: object) -> EngineThread:
        engines.append(EngineThread(tmp_path, **settings))  # type: ignore[arg-type]
        return engines[-1]

    yield begin
    for engine in engines:
        engine.stop()


@pytest.fixture
def connect() -> Iterator[Connect]:
    edges: list[PlainEdge] = []

    def begin(engine: EngineThread, number: int = 1) -> PlainEdge:
        edges.append(PlainEdge(engine.address, number))
        return edges[-1]

    yield begin
    for edge in edges:
        edge.close()


def blocks_used(edge: PlainEdge) -> int:
    """What the engine says it holds now."""
    edge.heard.clear()
    edge.say(Ask(1, "stats"))
    edge.wait(lambda: any(isinstance(said, StatsAnswer) for said in edge.heard))
    (answer,) = [said for said in edge.heard if isinstance(said, StatsAnswer)]
    return answer.stats.blocks.used


def test_garbage_can_be_collected_between_steps(start: Start, connect: Connect) -> None:
    engine, calls = start(), list[int]()
    engine.loop.between_steps = lambda: calls.append(1)
    edge = connect(engine)
    edge.submit("a", [1, 2, 3], max_tokens=5)
    edge.wait(lambda: edge.has_ended("a") and len(calls) >= 5)
    assert len(calls) >= 5  # one for each step; the last may come after the answer


def test_idle_time_is_used_until_a_request_comes(start: Start, connect: Connect) -> None:
    engine, calls = start(), list[int]()

    def prepare_more() -> float:
        calls.append(1)
        return 0.001 * (len(calls) % 2)  # at once again, and after a while

    engine.loop.when_idle = prepare_more
    edge = connect(engine)
    edge.submit("a", [1, 2, 3], max_tokens=5)
    edge.wait(lambda: edge.has_ended("a"))
    seen = len(calls)
    edge.wait(lambda: len(calls) > seen + 10)
    assert len(calls) > seen + 10
    edge.submit("b", [1, 2, 3], max_tokens=5)
    edge.wait(lambda: edge.has_ended("b"))
    assert edge.has_ended("b")


def test_a_request_is_accepted_streamed_and_ended(start: Start, connect: Connect) -> None:
    edge = connect(start())
    edge.submit("a", [1, 2, 3], n=2)
    edge.wait(lambda: edge.has_ended("a"))
    handle = edge.handles()["a"]
    for index in (0, 1):
        expected = continuation([1, 2, 3], 8, index=index)
        assert edge.stream(handle + index) == expected
        assert list(edge.ends()["a"].samples[index].token_ids) == expected
    assert edge.ends()["a"].ledger[-1].kind == "finished"


def test_acceptance_comes_before_the_first_token(start: Start, connect: Connect) -> None:
    edge = connect(start())
    edge.submit("a", [1])
    edge.wait(lambda: edge.has_ended("a"))
    assert type(edge.heard[0]).__name__ == "Accepted"


def test_a_step_is_one_batch_however_many_requests_run(start: Start, connect: Connect) -> None:
    engine = start()
    edge = connect(engine)
    engine.gate.clear()
    for number in range(6):
        edge.submit(f"r{number}", [number + 1], max_tokens=5)
    engine.gate.set()
    edge.wait(lambda: len(edge.ends()) == 6)
    batches = [said for said in edge.heard if isinstance(said, TokensOut)]
    assert len(batches) == len({said.step for said in batches})


def test_a_request_that_is_wrong_is_refused_with_its_reason(start: Start, connect: Connect) -> None:
    edge = connect(start())
    edge.submit("empty", [])
    edge.submit("long", [1] * 300)
    edge.submit("foreign", [1_000])
    edge.wait(lambda: len(edge.refusals()) == 3)
    assert {name: refused.field for name, refused in edge.refusals().items()} == {
        "empty": "prompt",
        "long": "prompt",
        "foreign": "prompt",
    }


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"n": 1.5}, "n"),
        ({"beam_width": 2}, "beam_width"),
        ({"stop": [5]}, "stop[0]"),
        (7, "sampling"),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_by_its_field_and_harms_no_other(
    start: Start, connect: Connect, sampling: object, field: str
) -> None:
    edge = connect(start())
    edge.submit("good", [1])
    frame = {"type": "submit", "request_id": "bad", "prompt_token_ids": b"\1\0\0\0", "sampling": sampling}
    assert edge.socket.send([msgspec.msgpack.encode(frame)])
    edge.wait(lambda: "bad" in edge.refusals() and edge.has_ended("good"))
    assert edge.refusals()["bad"].field == field
    assert "bad" not in edge.handles()


def test_a_message_that_cannot_be_sent_ends_its_request_and_no_other(
    start: Start, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    edge, submit = connect(engine), engine.core.submit

    def refuse(request: Submit) -> int:
        if request.request_id == "bad":
            raise InvalidRequest("stop", "half a character: \ud800")
        return submit(request)

    engine.core.submit = refuse  # type: ignore[method-assign]
    edge.submit("bad", [1])
    edge.submit("good", [1])
    edge.wait(lambda: "bad" in edge.refusals() and edge.has_ended("good"))
    assert "was refused" in edge.refusals()["bad"].reason
    assert "surrogates not allowed" in caplog.text


@pytest.fixture
def engine_socket(tmp_path: Path) -> Iterator[transport.EngineSocket]:
    made = transport.EngineSocket(f"ipc://{tmp_path}/engine")
    yield made
    made.close()


def test_of_a_batch_only_what_cannot_be_sent_is_replaced(engine_socket: transport.EngineSocket, tmp_path: Path) -> None:
    edge = PlainEdge(f"ipc://{tmp_path}/engine")
    edge.say(Goodbye())
    edge.wait(lambda: any(True for _ in engine_socket.receive()))  # from now on the socket knows the edge
    ends = (Finished("b", (SampleEnd(0, (1,), "stop", "\ud800"),)), Finished("c", (SampleEnd(0, (2,), "stop"),)))
    tokens = TokensOut(3, np.array([7], np.int64), np.array([5], np.int32), finished=ends)
    sent = [tokens, AdapterAnswer(4, None, reason="\ud800"), Lost("\ud800"), CacheReset(2**70, 1), CacheReset(5, 1)]
    assert engine_socket.send(1, sent)
    edge.wait(lambda: len(edge.heard) == 6)
    edge.close()
    *parts, adapter, lost, last = edge.heard
    out = [part for part in parts if isinstance(part, TokensOut)]
    assert [part.token_ids.tolist() for part in out] == [[5], [], []]
    assert [[end.request_id for end in part.finished] for part in out] == [[], ["b"], ["c"]]
    assert out[1].finished[0].error is not None
    assert out[2].finished[0] == ends[1]
    assert isinstance(adapter, AdapterAnswer)
    assert isinstance(adapter.result(), InvalidRequest)
    assert isinstance(lost, Lost)
    assert last == CacheReset(5, 1)


def test_tokens_that_are_too_many_for_one_message_are_sent_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE", 3_000)
    entry = TokenLogprobs(np.arange(150, dtype=np.int32), np.zeros(150, dtype=np.float32), 1)
    handles = [3, 9, 9, 12, 700]
    tokens = TokensOut(
        4, np.array(handles, np.int64), np.arange(5, dtype=np.int32), tuple((handle, entry) for handle in handles),
        (Finished("a", (SampleEnd(0, (1,), "stop"),)),), ((800, np.array([1, 2], np.int32)),),
    )  # fmt: skip
    frames = transport._frames(tokens)
    assert len(frames) > 2
    parts = [decode_from_engine(frame) for frame in frames]
    out = [part for part in parts if isinstance(part, TokensOut)]
    assert [int(handle) for part in out for handle in part.samples] == handles
    assert [int(token) for part in out for token in part.token_ids] == [0, 1, 2, 3, 4]
    assert [handle for part in out for handle, _ in part.logprobs] == handles
    assert [handle for part in out for handle, _ in part.best] == [800]
    assert [end.request_id for part in out for end in part.finished] == ["a"]  # after its tokens
    assert out[-1].finished


def test_a_request_id_in_use_is_refused_also_to_another_edge(start: Start, connect: Connect) -> None:
    engine = start(seconds=0.05)
    one, two = connect(engine, 1), connect(engine, 2)
    one.submit("a", [1], max_tokens=200)
    one.wait(lambda: "a" in one.handles())
    two.submit("a", [2])
    two.wait(lambda: "a" in two.refusals())
    assert two.refusals()["a"].field == "request_id"
    one.say(Abort("a"))
    one.wait(lambda: one.has_ended("a"))


def test_an_abort_frees_the_blocks_within_a_step(start: Start, connect: Connect) -> None:
    engine = start()
    edge = connect(engine)
    engine.executor.before_launch = engine.wait_for_message
    edge.submit("a", [1], max_tokens=200)
    edge.say(Abort("a"))
    edge.wait(lambda: edge.has_ended("a"))
    (sample,) = edge.ends()["a"].samples
    assert sample.finish_reason == "abort"
    assert len(sample.token_ids) <= 1
    assert blocks_used(edge) == 0


def test_an_edge_cannot_abort_what_belongs_to_another(start: Start, connect: Connect) -> None:
    engine = start(seconds=0.005)
    one, two = connect(engine, 1), connect(engine, 2)
    one.submit("a", [1], max_tokens=20)
    one.wait(lambda: "a" in one.handles())
    two.say(Abort("a"), Abort("unknown"))
    one.wait(lambda: one.has_ended("a"))
    assert one.ends()["a"].samples[0].finish_reason == "length"


def test_edges_hear_only_of_their_own_requests(start: Start, connect: Connect) -> None:
    engine = start()
    edges = [connect(engine, number) for number in (1, 2, 3)]
    for number, edge in enumerate(edges):
        edge.submit(f"r{number}", [number + 1, 5], max_tokens=20)
    for number, edge in enumerate(edges):
        edge.wait(lambda: bool(edge.ends()))  # noqa: B023 - waits at once
        assert list(edge.ends()) == [f"r{number}"]
        assert edge.stream(edge.handles()[f"r{number}"]) == continuation([number + 1, 5], 20)


def test_questions_are_answered_with_their_number(start: Start, connect: Connect) -> None:
    engine = start(seconds=0.05)
    edge = connect(engine)
    edge.submit("a", [1] * 9, max_tokens=200)
    edge.wait(lambda: bool(edge.stream(edge.handles().get("a", -1))))
    edge.say(Ask(7, "stats"), Ask(8, "block_map"), Ask(9, "reset_cache"))
    edge.wait(lambda: any(isinstance(said, CacheReset) for said in edge.heard))
    stats = next(said for said in edge.heard if isinstance(said, StatsAnswer))
    blocks = next(said for said in edge.heard if isinstance(said, BlockMapAnswer))
    reset = next(said for said in edge.heard if isinstance(said, CacheReset))
    assert (stats.number, blocks.number, reset.number, reset.num_freed) == (7, 8, 9, 0)
    assert stats.stats.running == 1
    (held,) = blocks.block_map.requests
    assert (held.request_id, held.state) == ("a", "running")
    assert sum(blocks.block_map.holders) == len(held.block_ids)
    edge.say(Goodbye())


def test_an_edge_that_says_goodbye_leaves_nothing_behind(start: Start, connect: Connect) -> None:
    engine = start(seconds=0.005)
    one, two = connect(engine, 1), connect(engine, 2)
    one.submit("a", [1], max_tokens=200)
    one.wait(lambda: bool(one.stream(0)))
    one.say(Goodbye())
    two.wait(lambda: blocks_used(two) == 0)
    assert not engine.core.has_work
    assert engine.stuck == []


def test_an_edge_that_died_leaves_nothing_behind(start: Start, connect: Connect) -> None:
    engine = start(seconds=0.005)
    one, two = connect(engine, 1), connect(engine, 2)
    one.submit("a", [1], max_tokens=200)
    one.wait(lambda: bool(one.stream(0)))
    engine.loop.forget_edge(1)
    two.submit("b", [2], max_tokens=3)
    two.wait(lambda: two.has_ended("b"))
    two.wait(lambda: blocks_used(two) == 0)
    assert engine.stuck == []


def test_an_edge_that_vanished_without_a_word_is_reported(start: Start, connect: Connect) -> None:
    engine = start(seconds=0.05)
    gone, watcher = PlainEdge(engine.address, 1), connect(engine, 2)
    gone.submit("a", [1], max_tokens=200)
    gone.wait(lambda: bool(gone.stream(0)))
    gone.close()
    watcher.wait(lambda: blocks_used(watcher) == 0)
    assert engine.stuck == [1]


def test_an_edge_that_reads_nothing_is_cut_off_and_reported(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_MAX_UNREAD", 4)
    engine = start()
    slow, watcher = connect(engine, 1), connect(engine, 2)
    slow.submit("a", [1], max_tokens=200)
    for _ in range(1_000):
        slow.say(*[Ask(number, "block_map") for number in range(500)])  # answers fill the socket, then the queue
        blocks_used(watcher)  # an engine that is slow, as others have its core, takes them before more are sent
        if engine.stuck:
            break
    assert set(engine.stuck) == {1}
    watcher.wait(lambda: blocks_used(watcher) == 0)


def test_noise_on_the_socket_is_logged_and_dropped(
    start: Start, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    edge = connect(start())
    with caplog.at_level(logging.WARNING):
        assert edge.socket.send([b"", b"\xff\x00noise", b"\x93\x01\x02"])
        edge.submit("a", [1])
        edge.wait(lambda: edge.has_ended("a"))
    assert sum("dropped a message of edge 1" in record.message for record in caplog.records) == 3


def test_an_engine_that_loses_its_executor_tells_every_edge_once_and_ends(start: Start, connect: Connect) -> None:
    engine = start(seconds=0.05)
    edges = [connect(engine), connect(engine, 2)]
    for number, edge in enumerate(edges):
        edge.submit(f"a{number}", [1], max_tokens=200)
        edge.submit(f"b{number}", [2], max_tokens=200)
        edge.wait(lambda edge=edge: len(edge.handles()) == 2)  # type: ignore[misc]
    engine.executor.crash_at = 0
    for edge in edges:
        edge.wait(lambda edge=edge: any(isinstance(said, Lost) for said in edge.heard))  # type: ignore[misc]
        assert edge.ends() == {}
        assert edge.heard[-1] == Lost("the engine stopped: RuntimeError('device lost')")
    engine.join()
    assert engine.death == "the engine stopped: RuntimeError('device lost')"


def test_stopping_ends_what_is_left(start: Start, connect: Connect) -> None:
    engine = start(seconds=0.05)
    edge = connect(engine)
    edge.submit("a", [1], max_tokens=200)
    edge.wait(lambda: bool(edge.stream(0)))
    engine.loop.stop()
    edge.wait(lambda: edge.has_ended("a"))
    assert edge.ends()["a"].samples[0].finish_reason == "abort"
    engine.join()


def test_the_socket_is_for_this_user_alone(start: Start) -> None:
    assert Path(start().address.removeprefix("ipc://")).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logprobs": -1, "max_tokens": 10}, "logprobs"),
        ({"logprobs": 1_000, "max_tokens": 4_000}, "logprobs"),
        ({"prompt_logprobs": -1, "max_tokens": 1}, "prompt_logprobs"),
        ({"n": 64, "max_tokens": 100_000, "logprobs": 0}, "logprobs"),
    ],
)
def test_an_answer_too_large_for_a_message_is_refused_at_the_door(params: dict[str, int], field: str) -> None:
    config = SchedulerConfig(max_num_seqs=64, max_model_len=200_000)
    request = Submit("a", (1,) * 100, SamplingParams(**params))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=f"^{field}:"):
        check_answer_size(request, config, vocab_size=150_000)


def test_an_answer_of_usual_size_is_let_in() -> None:
    config = SchedulerConfig(max_num_seqs=64, max_model_len=32_768)
    for params in ({"logprobs": 20, "max_tokens": None}, {"max_tokens": 4_096, "n": 16, "prompt_logprobs": 20}):
        check_answer_size(Submit("a", (1,) * 4_000, SamplingParams(**params)), config, 150_000)  # type: ignore[arg-type]
    assert MAX_ANSWER < 64 * 2**20


def test_the_logprobs_of_a_prompt_count_once_for_each_answer() -> None:
    config = SchedulerConfig(max_num_seqs=128, max_model_len=32_768)
    check_answer_size(Submit("a", (1,) * 8_000, SamplingParams(prompt_logprobs=20, n=8)), config, 150_000)
    with pytest.raises(InvalidRequest, match="^prompt_logprobs: makes the answer up to 167 MiB large, limit 16 MiB"):
        check_answer_size(Submit("a", (1,) * 8_000, SamplingParams(prompt_logprobs=20, n=128)), config, 150_000)


def test_only_scored_prompt_tokens_count_in_the_size_of_an_answer() -> None:
    config = SchedulerConfig(max_num_seqs=64, max_model_len=200_000)
    prompt = (1,) * 100_000
    with pytest.raises(InvalidRequest, match=r"^prompt_logprobs: .*, or raise prompt_logprobs_start$"):
        check_answer_size(Submit("a", prompt, SamplingParams(prompt_logprobs=20)), config, 150_000)
    for start in (99_000, 100_000):
        sampling = SamplingParams(prompt_logprobs=20, prompt_logprobs_start=start)
        check_answer_size(Submit("a", prompt, sampling), config, 150_000)


def test_a_request_with_logprobs_ends_in_a_message_of_its_own(start: Start, connect: Connect) -> None:
    edge = connect(start())
    edge.submit("a", [1, 2], prompt_logprobs=1, max_tokens=1)
    edge.wait(lambda: edge.has_ended("a"))
    last = [said for said in edge.heard if isinstance(said, TokensOut)][-1]
    assert [end.request_id for end in last.finished] == ["a"]
    assert len(last.samples) == 0


def test_pooled_rows_of_a_step_go_in_messages_of_bounded_size() -> None:
    ends = tuple(
        Finished(str(place), (SampleEnd(0, (), "stop"),), pooled=bytes(size))
        for place, size in enumerate([0, 9 * 2**20, 7 * 2**20, 1, 20 * 2**20, 0, 1])
    )
    out = TokensOut(3, np.arange(2), np.arange(2).reshape(2, 1), finished=ends)
    messages = _split_large(out)
    assert [[end.request_id for end in one.finished] for one in messages] == [["0", "1", "2"], ["3"], ["4"], ["5", "6"]]
    assert [len(one.samples) for one in messages] == [2, 0, 0, 0]
    assert {one.step for one in messages} == {3}


class Naps:
    """Gives an engine an executor that can sleep, and notes what it was asked for."""

    def __init__(self, engine: EngineThread) -> None:
        self.calls: list[object] = []
        self.fails = False
        executor: Any = engine.executor
        executor.sleep, executor.wake_up = self._sleep, self.calls.append
        executor.check_weights, executor.apply_weights = self.calls.append, lambda: False
        engine.loop.nap_seconds = 0.02

    def _sleep(self, level: int, tags: object) -> None:
        self.calls.append(level)
        if self.fails:
            raise QuireError("no room")


def level_of(edge: PlainEdge, number: int) -> int:
    """The engine's sleep level, by its statistics."""
    edge.say(Ask(number, "stats"))
    edge.wait(lambda: any(isinstance(said, StatsAnswer) and said.number == number for said in edge.heard))
    return next(s.stats.sleep_level for s in edge.heard if isinstance(s, StatsAnswer) and s.number == number)


def test_an_idle_engine_sleeps_and_the_next_request_wakes_it_up(start: Start, connect: Connect) -> None:
    engine, deadline = start(), time.monotonic() + PATIENCE
    naps, edge = Naps(engine), connect(engine)
    for round_ in range(3):
        edge.submit(f"r{round_}", [5, 6])
        edge.wait(lambda name=f"r{round_}": edge.has_ended(name))  # type: ignore[misc]
        assert edge.stream(edge.handles()[f"r{round_}"])
        number = 100 * round_
        while not level_of(edge, number := number + 1):  # these questions do not keep it awake
            assert time.monotonic() < deadline
    assert naps.calls[:3] == [1, ("weights", "kv_cache"), 1]
    assert not edge.refusals()


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_an_update_between_two_steps_is_no_step_however_long_it_takes(
    start: Start, connect: Connect, tmp_path: Path, mode: PauseMode
) -> None:
    engine = start()
    naps, edge = Naps(engine), connect(engine)
    engine.loop.nap_seconds = None
    reader = ProgressReader(next(tmp_path.glob("**/progress-*")))
    stuck: list[float] = []

    def slow() -> bool:
        for _ in range(2):
            time.sleep(0.01)
            stuck.append(reader.stuck_for())
        return False

    executor: Any = engine.executor
    executor.apply_weights = slow
    engine.gate.clear()
    edge.submit("r", [5, 6], max_tokens=30)
    assert engine.held.wait(60)
    edge.say(message_of(1, Command("update_weights", mode=mode, version="next")))
    engine.gate.set()
    edge.wait(lambda: any(isinstance(said, CommandAnswer) for said in edge.heard))
    (state,) = [said.state for said in edge.heard if isinstance(said, CommandAnswer)]
    assert state is not None
    assert state.weight_version == "next"
    assert stuck == [0.0, 0.0]
    assert naps.calls


def test_an_engine_that_cannot_sleep_or_wake_up_says_so_and_tries_again_later(
    start: Start, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    naps, edge = Naps(engine), connect(engine)
    naps.fails = True
    edge.submit("a", [5, 6])
    edge.wait(lambda: bool(naps.calls))
    edge.submit("b", [5, 6])
    edge.wait(lambda: edge.has_ended("b"))
    assert "the idle engine cannot sleep: no room" in caplog.text
    naps.fails = False
    edge.submit("c", [5, 6])
    edge.wait(lambda: edge.has_ended("c") and engine.core.standby.state.is_sleeping)
    executor: Any = engine.executor

    def full(tags: object) -> None:
        raise QuireError("the device is full")

    executor.wake_up = full
    edge.submit("d", [5, 6])
    edge.wait(lambda: "d" in edge.refusals())
    assert "could not wake up: the device is full" in edge.refusals()["d"].reason
    executor.wake_up = naps.calls.append
    edge.submit("e", [5, 6])
    edge.wait(lambda: edge.has_ended("e"))


def test_a_sleep_that_an_operator_orders_during_a_nap_lasts_until_the_operator_ends_it(
    start: Start, connect: Connect
) -> None:
    engine = start()
    naps, edge = Naps(engine), connect(engine)
    edge.submit("a", [5, 6])
    edge.wait(lambda: engine.core.standby.state.is_sleeping)
    edge.say(message_of(1, Command("sleep", mode="wait")))
    edge.wait(lambda: any(isinstance(said, CommandAnswer) for said in edge.heard))
    edge.submit("b", [5, 6])
    edge.wait(lambda: "b" in edge.refusals())
    assert "is asleep" in edge.refusals()["b"].reason
    assert naps.calls[-1] == 1


def test_an_engine_with_pinned_prefixes_stays_awake(start: Start, connect: Connect) -> None:
    engine = start()
    naps, edge = Naps(engine), connect(engine)
    edge.say(Submit("p", tuple(range(3, 11)), SamplingParams(max_tokens=1), pin="rules"))
    edge.wait(lambda: edge.has_ended("p"))
    assert len(engine.core.pins) == 1
    assert not engine.core.standby.may_nap
    assert not naps.calls
