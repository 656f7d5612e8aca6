"""The engine's loop over the fake executor in a thread of this process, and a plain edge to talk to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from fake_executor import VOCAB, FakeExecutor
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.messages import Accepted, FromEngine, Refused, ToEngine, encode
from quire.engine.process import EngineLoop
from quire.engine.progress import ProgressRecord
from quire.engine.transport import EdgeSocket, EngineSocket
from quire.types.errors import EngineDead
from quire.types.output import Finished, TokensOut
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

PATIENCE = 120.0  # seconds a test waits for what must come


class EngineThread:
    """A running engine. `gate` holds its steps back while it is clear; `held` is set when one has been."""

    def __init__(self, directory: Path, *, number: int = 1, seconds: float = 0.0, crash_at: int | None = None) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.executor = _Gated(64, 4, crash_at=crash_at)
        self.executor.gate, self.executor.seconds = self.gate, seconds
        self.held = self.executor.held = threading.Event()
        scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=240, adapter_slots=2)
        self.core = EngineCore(self.executor, CacheConfig(4, 64), scheduler, VOCAB)
        self.address = f"ipc://{directory}/engine-{number}"
        self.stuck: list[int] = []
        self.death: str | None = None
        record = ProgressRecord(directory / f"progress-{number}")
        self.loop = EngineLoop(self.core, EngineSocket(self.address), record, on_stuck=self.stuck.append)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except EngineDead as error:
            self.death = str(error)
        self.loop.close()

    def wait_for_message(self) -> None:
        """In the engine's thread: until an edge has said something that the engine has not read."""
        self.loop._edges._poller.poll(PATIENCE * 1e3)

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self.gate.set()
        self.loop.stop()
        self.join()


class _Gated(FakeExecutor):
    gate: threading.Event
    held: threading.Event
    seconds: float
    before_launch: Callable[[], object] = bool

    def launch(self, plan: object) -> None:
        if not self.gate.is_set():
            self.held.set()
        self.gate.wait()
        self.before_launch()
        time.sleep(self.seconds)
        super().launch(plan)  # type: ignore[arg-type]


class PlainEdge:
    """Sends messages to an engine and keeps what comes back."""

    def __init__(self, address: str, edge: int = 1) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = EdgeSocket(self._context, edge, address)
        self.heard: list[FromEngine] = []

    def say(self, *messages: ToEngine) -> None:
        assert self.socket.send([encode(message) for message in messages])

    def submit(self, request_id: str, prompt: list[int], adapter: str = "", **params: object) -> None:
        sampling = SamplingParams(**{"max_tokens": 8, "seed": 0, **params})  # type: ignore[arg-type]
        self.say(Submit(request_id, tuple(prompt), sampling, adapter=adapter))

    def wait(self, found: Callable[[], bool]) -> None:
        """Listen until something is so."""
        deadline = time.monotonic() + PATIENCE
        while not found():
            self.socket.pollable.poll(50)
            self.heard.extend(self.socket.receive())
            assert time.monotonic() < deadline, f"it never came; heard {self.heard}"

    def has_ended(self, request_id: str) -> bool:
        return request_id in self.ends()

    def ends(self) -> dict[str, Finished]:
        return {end.request_id: end for said in self.heard if isinstance(said, TokensOut) for end in said.finished}

    def handles(self) -> dict[str, int]:
        return {said.request_id: said.handle for said in self.heard if isinstance(said, Accepted)}

    def refusals(self) -> dict[str, Refused]:
        return {said.request_id: said for said in self.heard if isinstance(said, Refused)}

    def stream(self, handle: int) -> list[int]:
        """The tokens of a sample as they came."""
        batches = [said for said in self.heard if isinstance(said, TokensOut)]
        return [
            token
            for out in batches
            for sample, token in zip(out.samples.tolist(), out.token_ids.tolist(), strict=True)
            if sample == handle
        ]

    def close(self) -> None:
        self.socket.close(flush=False)
        self._context.term()
