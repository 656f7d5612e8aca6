"""The edge's line to an engine process: what is sent arrives, and with an engine ends all that was in it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine_thread import PATIENCE, EngineThread
from fake_executor import continuation
from quire.engine.transport import EdgeSocket
from quire.serving.process import remote_link
from quire.serving.process.control import ControlChannel, ControlMessage, Drain, EngineDown, EngineUp, pack
from quire.serving.process.link import EngineReady
from quire.serving.process.remote_link import RemoteLink
from quire.types.errors import EngineDead, InvalidRequest
from quire.types.output import Finished, TokensOut
from quire.types.prefix import PinnedPrefix
from quire.types.request import Abort, Submit, pack_tokens
from quire.types.sampling import SamplingParams


class Listener:
    """Keeps all it is told, and on which thread."""

    def __init__(self) -> None:
        self.ups: list[int] = []
        self.downs: list[str] = []
        self.handles: dict[str, int] = {}
        self.refusals: dict[str, InvalidRequest] = {}
        self.ends: dict[str, Finished] = {}
        self.tokens_heard: dict[int, list[int]] = {}
        self.threads: set[str] = set()

    def engine_up(self, ready: EngineReady) -> None:
        self.threads.add(threading.current_thread().name)
        self.ups.append(ready.generation)

    def engine_down(self, reason: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.downs.append(reason)

    def accepted(self, request_id: str, handle: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.handles[request_id] = handle

    def refused(self, request_id: str, error: InvalidRequest) -> None:
        self.refusals[request_id] = error

    def tokens(self, batch: TokensOut) -> None:
        for handle, token in zip(batch.samples.tolist(), batch.token_ids.tolist(), strict=True):
            self.tokens_heard.setdefault(handle, []).append(token)
        self.ends.update({end.request_id: end for end in batch.finished})


class Edge:
    """A link, its listener, and the supervisor's end of the control socket."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.supervisor, theirs = socket.socketpair()
        self.listener = Listener()
        self.control: list[ControlMessage] = []
        self.lost = threading.Event()
        self.channel = ControlChannel(theirs)
        self.link = RemoteLink(self.channel, 1, on_control=self.control.append, on_lost=self.lost.set)
        self.engines: list[EngineThread] = []

    def start_engine(self, **settings: float) -> EngineThread:
        number = len(self.engines) + 1
        self.engines.append(EngineThread(self.directory, number=number, **settings))  # type: ignore[arg-type]
        ready = EngineReady(number, 240, 97, 8, 4, 64, "float32", "cpu", "fcfs", ())
        self.tell(EngineUp(ready, self.engines[-1].address))
        return self.engines[-1]

    def tell(self, *messages: ControlMessage) -> None:
        self.supervisor.sendall(b"".join(map(pack, messages)))

    def submit(self, request_id: str, prompt: list[int], **params: object) -> None:
        sampling = SamplingParams(**{"max_tokens": 8, "seed": 0, **params})  # type: ignore[arg-type]
        self.link.submit(Submit(request_id, tuple(prompt), sampling))

    def wait(self, found: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not found():
            assert time.monotonic() < deadline, "it never came"
            time.sleep(0.002)

    def close(self) -> None:
        self.link.close()
        for engine in self.engines:
            engine.stop()
        self.supervisor.close()
        self.channel.close()


@pytest.fixture
def edge(tmp_path: Path) -> Iterator[Edge]:
    made = Edge(tmp_path)
    made.link.start(made.listener)
    yield made
    made.close()


def test_an_engine_that_says_it_is_lost_is_down_at_once_and_another_may_follow(edge: Edge) -> None:
    edge.start_engine(crash_at=3)
    edge.wait(lambda: edge.listener.ups == [1])
    edge.submit("a", [1], max_tokens=100)
    edge.wait(lambda: edge.listener.downs)
    assert "device lost" in edge.listener.downs[0]
    assert edge.listener.ends == {}
    edge.tell(EngineDown("the engine process exited"))
    edge.start_engine()
    edge.wait(lambda: edge.listener.ups == [1, 2])
    edge.submit("b", [1])
    edge.wait(lambda: "b" in edge.listener.ends)


def test_a_request_goes_down_and_its_tokens_come_up(edge: Edge) -> None:
    edge.start_engine()
    edge.wait(lambda: edge.listener.ups == [1])
    edge.submit("a", [1, 2, 3])
    edge.wait(lambda: "a" in edge.listener.ends)
    expected = continuation([1, 2, 3], 8)
    assert edge.listener.tokens_heard[edge.listener.handles["a"]] == expected
    assert list(edge.listener.ends["a"].samples[0].token_ids) == expected


def test_the_listener_is_called_on_one_thread_only(edge: Edge) -> None:
    edge.start_engine()
    edge.wait(lambda: edge.listener.ups)
    edge.submit("a", [1])
    edge.wait(lambda: "a" in edge.listener.ends)
    edge.tell(EngineDown("x"))
    edge.wait(lambda: edge.listener.downs)
    assert edge.listener.threads == {"engine link"}


def test_many_threads_may_submit_at_once(edge: Edge) -> None:
    edge.start_engine()
    edge.wait(lambda: edge.listener.ups)
    names = [f"{thread}-{number}" for thread in range(4) for number in range(10)]
    threads = [
        threading.Thread(target=lambda mine: [edge.submit(name, [5], max_tokens=3) for name in mine], args=(part,))
        for part in (names[0::4], names[1::4], names[2::4], names[3::4])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    edge.wait(lambda: set(edge.listener.ends) == set(names))
    heard = {name: edge.listener.tokens_heard[edge.listener.handles[name]] for name in names}
    assert heard == dict.fromkeys(names, continuation([5], 3))


def test_a_refusal_carries_the_engines_reason(edge: Edge) -> None:
    edge.start_engine()
    edge.wait(lambda: edge.listener.ups)
    edge.submit("a", [])
    edge.wait(lambda: "a" in edge.listener.refusals)
    assert edge.listener.refusals["a"].field == "prompt"


def test_a_request_that_cannot_travel_is_refused(edge: Edge) -> None:
    edge.start_engine()
    edge.wait(lambda: edge.listener.ups)
    edge.link.submit(Submit("a", pack_tokens((1,)), SamplingParams(), priority=2**70))
    edge.wait(lambda: "a" in edge.listener.refusals)
    assert edge.listener.refusals["a"].field == "request"
    assert edge.listener.handles == {}


def test_an_abort_ends_a_request(edge: Edge) -> None:
    edge.start_engine(seconds=0.05)
    edge.wait(lambda: edge.listener.ups)
    edge.submit("a", [1], max_tokens=200)
    edge.wait(lambda: edge.listener.tokens_heard)
    edge.link.abort(Abort("a"))
    edge.wait(lambda: "a" in edge.listener.ends)
    assert edge.listener.ends["a"].samples[0].finish_reason == "abort"


def test_questions_are_answered(edge: Edge) -> None:
    edge.start_engine(seconds=0.05)
    edge.wait(lambda: edge.listener.ups)
    edge.submit("a", [1], max_tokens=200)
    edge.wait(lambda: edge.listener.tokens_heard)

    async def ask() -> None:
        stats, blocks, freed = await asyncio.gather(edge.link.stats(), edge.link.block_map(), edge.link.reset_cache())
        assert stats.running == 1
        assert [each.request_id for each in blocks.requests] == ["a"]
        assert freed == 0

    asyncio.run(ask())


def test_a_prompt_is_pinned_listed_and_let_go_over_the_line(edge: Edge) -> None:
    edge.start_engine()
    edge.wait(lambda: edge.listener.ups == [1])
    edge.link.submit(Submit("a", tuple(range(10)), SamplingParams(max_tokens=1), cache_salt="s", pin="system"))
    edge.wait(lambda: "a" in edge.listener.ends)

    async def ask() -> None:
        assert await edge.link.pins() == (PinnedPrefix("system", "s", 10, 3),)
        assert await edge.link.unpin("s", "system")
        assert not await edge.link.unpin("s", "system")
        assert await edge.link.pins() == ()

    asyncio.run(ask())


def test_a_question_without_an_engine_fails_at_once(edge: Edge) -> None:
    with pytest.raises(EngineDead, match="the engine is loading"):
        asyncio.run(edge.link.stats())
    edge.tell(EngineDown("it was killed"))
    edge.wait(lambda: edge.listener.downs)
    with pytest.raises(EngineDead, match="it was killed"):
        asyncio.run(edge.link.block_map())


def test_a_question_that_is_not_answered_in_time_fails(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_link, "ANSWER_SECONDS", 0.05)
    engine = edge.start_engine()
    edge.wait(lambda: edge.listener.ups)
    engine.gate.clear()
    edge.submit("a", [1])
    edge.wait(engine.held.is_set)
    with pytest.raises(EngineDead, match="did not answer within 0.05 s"):
        asyncio.run(edge.link.stats())
    engine.gate.set()


def test_a_question_fails_when_its_engine_ends(edge: Edge) -> None:
    engine = edge.start_engine()
    edge.wait(lambda: edge.listener.ups)
    engine.gate.clear()
    edge.submit("a", [1])
    edge.wait(engine.held.is_set)

    async def ask() -> None:
        asking = asyncio.ensure_future(edge.link.stats())
        await asyncio.sleep(0)
        edge.tell(EngineDown("it was killed"))
        with pytest.raises(EngineDead, match="it was killed"):
            await asking

    asyncio.run(ask())
    engine.gate.set()


def test_a_second_engine_serves_after_the_first_and_nothing_of_the_first_is_heard(edge: Edge) -> None:
    first = edge.start_engine()
    edge.wait(lambda: edge.listener.ups)
    first.gate.clear()
    edge.submit("old", [1], max_tokens=200)
    edge.tell(EngineDown("it was killed"))
    edge.wait(lambda: edge.listener.downs == ["it was killed"])
    first.gate.set()
    edge.start_engine()
    edge.wait(lambda: edge.listener.ups == [1, 2])
    edge.submit("new", [2])
    edge.wait(lambda: "new" in edge.listener.ends)
    assert "old" not in edge.listener.ends


def test_a_submit_that_finds_no_engine_is_told_so_and_never_reaches_the_next(edge: Edge) -> None:
    edge.tell(EngineDown("it was killed"))
    edge.wait(lambda: len(edge.listener.downs) == 1)
    edge.submit("lost", [1])
    edge.wait(lambda: len(edge.listener.downs) == 2)
    edge.start_engine()
    edge.wait(lambda: edge.listener.ups)
    edge.submit("new", [2])
    edge.wait(lambda: "new" in edge.listener.ends)
    assert "lost" not in edge.listener.handles


class SlowSocket(EdgeSocket):
    """A socket whose engine reads nothing at first."""

    num_refusals = 3

    def send(self, frames: Sequence[bytes]) -> bool:
        if self.num_refusals:
            self.num_refusals -= 1
            return False
        return super().send(frames)


class StuckSocket(EdgeSocket):
    """A socket whose engine never reads."""

    def send(self, frames: Sequence[bytes]) -> bool:
        return False


def test_what_an_engine_does_not_read_at_once_goes_when_it_reads_again(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_link, "EdgeSocket", SlowSocket)
    edge.start_engine()
    edge.wait(lambda: edge.listener.ups == [1])
    for name in "abc":
        edge.submit(name, [1, 2])
    edge.wait(lambda: len(edge.listener.ends) == 3)
    assert edge.listener.downs == []
    assert list(edge.listener.handles) == ["a", "b", "c"]


def test_what_an_engine_never_read_is_lost_with_it_and_the_next_one_serves(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(remote_link, "EdgeSocket", StuckSocket)
        edge.start_engine()
        edge.wait(lambda: edge.listener.ups == [1])
        edge.submit("a", [1])
        edge.tell(EngineDown("it hung"))
        edge.wait(lambda: edge.listener.downs)
    edge.start_engine()
    edge.wait(lambda: edge.listener.ups == [1, 2])
    edge.submit("b", [1])
    edge.wait(lambda: "b" in edge.listener.ends)
    assert list(edge.listener.handles) == ["b"]


def test_an_abort_and_the_goodbye_are_taken_when_too_much_is_unsent(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_link, "EdgeSocket", StuckSocket)
    monkeypatch.setattr(remote_link, "_MAX_OUTBOX", 2)
    edge.start_engine()
    edge.wait(lambda: edge.listener.ups == [1])
    edge.submit("a", [1])
    edge.submit("b", [1])
    with pytest.raises(EngineDead, match="does not read them"):
        while True:  # the thread may have the first ones in its hands
            edge.submit("c", [1])
    edge.link.abort(Abort("a"))
    edge.link.close()


def test_news_read_together_with_the_start_order_are_not_missed(tmp_path: Path) -> None:
    edge = Edge(tmp_path)
    edge.tell(Drain(1.0))
    edge.start_engine()
    edge.tell(Drain(2.0))
    assert edge.channel.receive() == Drain(1.0)
    edge.link.start(edge.listener)
    edge.wait(lambda: edge.listener.ups == [1] and edge.control == [Drain(2.0)])
    edge.close()


def test_other_control_messages_are_passed_on(edge: Edge) -> None:
    edge.tell(Drain(3.0))
    edge.wait(lambda: edge.control)
    assert edge.control == [Drain(3.0)]
    assert (edge.listener.ups, edge.listener.downs) == ([], [])


def test_the_end_of_the_supervisor_is_noticed(edge: Edge) -> None:
    edge.supervisor.close()
    assert edge.lost.wait(PATIENCE)


def test_a_listener_that_raises_ends_the_edge_instead_of_hanging_it(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(ready: EngineReady) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(edge.listener, "engine_up", fail)
    edge.start_engine()
    assert edge.lost.wait(PATIENCE)
    assert "the link to the engine failed" in caplog.text


def test_closing_frees_what_the_edge_had_in_the_engine(edge: Edge) -> None:
    engine = edge.start_engine(seconds=0.05)
    edge.wait(lambda: edge.listener.ups)
    edge.submit("a", [1], max_tokens=200)
    edge.wait(lambda: edge.listener.tokens_heard)
    edge.link.close()
    edge.link.close()
    edge.link.abort(Abort("a"))
    edge.wait(lambda: not engine.core.has_work)
    assert not edge.lost.is_set()
