"""A real edge on a loopback port, in this process: uvicorn in a thread over a LocalLink and a scripted model."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import uvloop

from local_link import LocalLink
from observers import NullObserver
from quire.config.arguments import EngineArguments
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.server import ModelSource, ServerConfig
from quire.engine.core import EngineCore
from quire.serving.dispatch.dispatcher import Dispatcher
from quire.serving.dispatch.observer import Observer
from quire.serving.edge import EdgeServer, http_config
from quire.serving.http.endpoints.app import build_app
from quire.serving.http.limits import Limits
from quire.serving.http.service import ModelText, Service
from quire.serving.process.control import ControlMessage
from quire.serving.process.edge_loads import EdgeLoadTable, OtherLoads
from quire.serving.process.link import EngineReady
from quire.serving.process.peers import Peers
from quire.types.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from tests.unit.serving.scripted import EOS_ID, TOKENIZER, VOCAB, Script, ScriptedExecutor, make_tools

MODEL = "scripted"
PATIENCE = 120.0  # seconds after which what a test waits for will not happen
PLAYGROUND = {"index.html": (b"<!doctype html><title>Quire</title>", "text/html; charset=utf-8")}


def digests(*keys: str) -> tuple[str, ...]:
    return tuple(hashlib.sha256(key.encode()).hexdigest() for key in keys)


class TestServer:
    """One server; `close` ends it. Reads like the real thing from outside, and can be looked into."""

    __test__ = False

    def __init__(
        self,
        script: Script,
        *,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        fails: frozenset[str] = frozenset(),
        observer: Observer | None = None,
        step_seconds: float = 0.0,
        starts_up: bool = True,
        sampling_defaults: SamplingDefaults = NO_DEFAULTS,
        **config: Any,
    ) -> None:
        self.cache = cache or CacheConfig(block_size=4, num_blocks=4_096)
        self.scheduler = scheduler or SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512)
        self._script, self._fails, self._step_seconds = script, fails, step_seconds
        self._generations = itertools.count(1)
        self.link = LocalLink(self._make_core)
        self._starts_up, self._sampling_defaults = starts_up, sampling_defaults
        self.config = ServerConfig(
            source=config.pop("source", ModelSource(model=MODEL, served_names=(MODEL, "other-name"))),
            engine=config.pop("engine", EngineArguments()),
            **config,
        )
        self._observer = observer or NullObserver()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.executor: ScriptedExecutor | None = None
        self.drains_asked = 0
        self.elsewhere = (0, 0)  # requests and tokens that wait at other edges
        self.told: list[ControlMessage] = []  # to the supervisor
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="test-server")
        self._thread.start()
        assert self._started.wait(PATIENCE)
        if starts_up:
            self.wait(lambda: self.dispatcher.engine is not None)

    # ------------------------------------------------------------------------------------------------------ engine
    def _make_core(self) -> tuple[EngineCore, EngineReady]:
        self.executor = executor = ScriptedExecutor(self._script, fails=self._fails)
        if self._step_seconds:
            executor.on_launch = lambda: time.sleep(self._step_seconds)
        core = EngineCore(executor, self.cache, self.scheduler, VOCAB, tools=make_tools())
        ready = EngineReady(
            generation=next(self._generations),
            max_model_len=self.scheduler.max_model_len,
            vocab_size=VOCAB,
            max_num_seqs=self.scheduler.max_num_seqs,
            block_size=self.cache.block_size,
            num_blocks=self.cache.num_blocks,
            dtype="float32",
            device="cpu",
            policy=self.scheduler.policy,
            eos_ids=(EOS_ID,),
            adapter_slots=self.scheduler.adapter_slots,
        )
        return core, ready

    # ------------------------------------------------------------------------------------------------------ server
    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        limits = Limits(self.config.limits)
        self.dispatcher = Dispatcher(
            self.link, TOKENIZER, limits, self._observer, self.config.api_workers, _SharedLoads(self)
        )
        self.peers = Peers(self.told.append, 1, self.config.api_workers - 1)
        self.service = Service(
            config=self.config,
            limits=limits,
            dispatcher=self.dispatcher,
            link=self.link,
            texts=ModelText(
                TOKENIZER,
                self.config.source.chat_template,
                template_kwargs=self.config.source.chat_template_kwargs,
                tool_call_parser=self.config.source.tool_call_parser,
                reasoning_parser=self.config.source.reasoning_parser,
                sampling_defaults=self._sampling_defaults,
            ),
            observer=self._observer,
            version="0.0.0",
            render_metrics=_no_metrics,
            ask_drain=self._ask_drain,
            peers=self.peers,
        )
        app = build_app(self.service, PLAYGROUND)
        self.server = EdgeServer(http_config(app, limits, self.service.watch.refused), self._started.set)
        if self._starts_up:
            self.dispatcher.start()
        await self.server.serve(sockets=[self._socket])
        self.service.close()
        if self._starts_up:  # no step may tell a loop that is gone of its tokens
            self.link.gate.clear()
            await asyncio.to_thread(self.link.settle)

    def _ask_drain(self) -> None:
        self.drains_asked += 1

    def fail_executor(self) -> None:
        """The device is lost: the next step fails for everybody."""
        assert self.executor is not None
        self.executor.on_launch = _fail

    def call(self, work: Callable[[], Any]) -> Any:
        """Run something on the server's event loop and return what it returns."""
        done, result = threading.Event(), []

        def run() -> None:
            result.append(work())
            done.set()

        self.loop.call_soon_threadsafe(run)
        assert done.wait(PATIENCE)
        return result[0]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Meanwhile each step waits until the edge has sent what came of the step before."""
        assert self.executor is not None
        before, self.executor.on_launch = self.executor.on_launch, self._let_edge_run
        yield
        self.executor.on_launch = before

    def _let_edge_run(self) -> None:
        for _ in range(4):  # a token is taken from the engine, wakes its stream, and is written
            self.call(lambda: None)

    def start_drain(self, seconds: float) -> None:
        self._drain = asyncio.run_coroutine_threadsafe(self.dispatcher.drain(seconds), self.loop)

    def join_drain(self) -> None:
        self._drain.result(PATIENCE)

    def close(self) -> None:
        self.link.gate.set()
        self.server.should_exit = True
        self._thread.join(PATIENCE)
        self.link.close()

    # ------------------------------------------------------------------------------------------------------ clients
    def wait(self, condition: Callable[[], bool]) -> None:
        """Until something holds; the bound is only there to end a broken test."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "it did not come to be"
            time.sleep(0.002)

    def is_idle(self) -> bool:
        """Nothing waits, nothing runs, no block is held."""
        used: list[int] = []  # asked for in the engine's thread: a step may be under way
        self.link.do(lambda: used.append(self.link.core.stats().blocks.used if self.link.core is not None else 0))
        return self.call(lambda: not self.dispatcher.requests() and self.dispatcher.num_in_engine == 0) and used == [0]

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False, **options)  # no certificates to load

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)

    def events(self, path: str, body: Mapping[str, Any], **options: Any) -> list[Any]:
        """The events of a stream; the last is "[DONE]"."""
        with self.client() as client, client.stream("POST", path, json={**body, "stream": True}, **options) as answer:
            assert answer.status_code == 200, answer.read()
            return list(read_events(answer))


def read_events(answer: httpx.Response) -> Iterator[Any]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


class _SharedLoads(EdgeLoadTable):
    """As if other edges had put `server.elsewhere` on it."""

    def __init__(self, server: TestServer) -> None:
        super().__init__()
        self._server = server

    def others(self) -> OtherLoads:
        return OtherLoads(*self._server.elsewhere)


def _fail() -> None:
    raise RuntimeError("device lost")


async def _no_metrics() -> tuple[bytes, str]:
    return b"", "text/plain"
