"""An EngineLink without processes: a thread that steps an EngineCore. It can be held, killed and started again."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

from quire.engine.core import EngineCore
from quire.engine.encoder_core import EncoderCore
from quire.engine.progress import Backlog
from quire.serving.client import InProcessClient, run_command
from quire.serving.process.link import EngineListener, EngineReady
from quire.types.adapters import AdapterInfo
from quire.types.errors import EngineDead, InvalidRequest, QuireError
from quire.types.prefix import PinnedPrefix
from quire.types.request import Abort, Submit
from quire.types.standby import Command, StandbyState
from quire.types.stats import BlockMap, EngineStats

Core = EngineCore | EncoderCore
MakeCore = Callable[[], tuple[Core, EngineReady]]


class LocalLink:
    """`make_core` builds each generation's engine. Everything is told from one thread, as the contract has it."""

    def __init__(self, make_core: MakeCore) -> None:
        self._make_core = make_core
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listener: EngineListener | None = None
        self._core: Core | None = None
        self._generation = 0
        self._backlog: Backlog | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="local-link")
        self.gate = threading.Event()  # clear it to hold the engine before its next step
        self.gate.set()
        self.submitted: list[Submit] = []
        self.aborts: list[Abort] = []
        self.num_steps = 0

    # ------------------------------------------------------------------------------------------------- EngineLink
    def start(self, listener: EngineListener) -> None:
        self._listener = listener
        self._orders.put(self._bring_up)
        self._thread.start()

    def submit(self, request: Submit) -> None:
        self._orders.put(lambda: self._submit(request))

    def abort(self, abort: Abort) -> None:
        self._orders.put(lambda: self._abort(abort))

    def backlog(self) -> Backlog | None:
        return self._backlog

    def refuses(self) -> bool:
        core = self._core
        return core is not None and hasattr(core, "standby") and core.standby.refuses

    async def stats(self) -> EngineStats:
        return await self._ask(lambda core: core.stats())

    async def block_map(self) -> BlockMap:
        return await self._ask(lambda core: core.block_map())

    async def pins(self) -> tuple[PinnedPrefix, ...]:
        return cast("tuple[PinnedPrefix, ...]", await self._ask(lambda core: core.pins.listing()))

    async def unpin(self, salt: str, name: str) -> bool:
        return cast("bool", await self._ask(lambda core: core.unpin(salt, name)))

    async def reset_cache(self) -> int:
        return await self._ask(lambda core: core.reset_cache())

    async def adapters(self) -> tuple[AdapterInfo, ...]:
        return cast("tuple[AdapterInfo, ...]", await self._ask(lambda core: core.adapters.listing()))

    async def load_adapter(self, name: str, folder: str, *, in_place: bool) -> AdapterInfo:
        found = await self._ask(lambda core: core.adapters.load(name, folder, in_place=in_place))
        return cast("AdapterInfo", found)

    async def unload_adapter(self, name: str) -> AdapterInfo:
        return cast("AdapterInfo", await self._ask(lambda core: core.adapters.unload(name)))

    async def command(self, command: Command) -> StandbyState:
        return await self._ask(lambda core: run_command(InProcessClient(core), command))

    def close(self) -> None:
        self._orders.put(None)
        self.gate.set()
        if self._thread.is_alive():
            self._thread.join()

    # -------------------------------------------------------------------------------------------------- for tests
    def kill(self) -> None:
        """The engine dies; what was in it is lost."""
        self.do(self._bring_down)

    def revive(self) -> None:
        self.do(self._bring_up)

    @property
    def core(self) -> Core | None:
        return self._core

    def settle(self) -> None:
        """Return when every order given so far was carried out."""
        self.do(lambda: None)

    def step(self) -> None:
        """Run one step, also while the gate is clear."""
        self.do(self._step)

    def do(self, order: Callable[[], None]) -> None:
        """Carry out an order between two steps, and return then."""
        done = threading.Event()
        self._orders.put(lambda: (order(), done.set())[0])  # type: ignore[func-returns-value]
        assert done.wait(120)

    # ------------------------------------------------------------------------------------------------- its thread
    def _run(self) -> None:
        while True:
            working = self._core is not None and self._core.has_work and self.gate.is_set()
            try:
                order = self._orders.get(block=not working, timeout=None if not working else 0)
            except queue.Empty:
                self._step()
                continue
            if order is None:
                return
            order()

    def _step(self) -> None:
        assert self._core is not None
        assert self._listener is not None
        out = self._core.step()
        self.num_steps += 1
        self._backlog = Backlog(self.num_steps, self._core.num_ready)
        if self._core.dead is not None:
            reason, self._core, self._backlog = self._core.dead, None, None
            self._listener.engine_down(reason)
            return
        if len(out.samples) or out.finished or out.best:
            self._listener.tokens(out)

    def _submit(self, request: Submit) -> None:
        assert self._listener is not None
        self.submitted.append(request)
        if self._core is None:
            self._listener.engine_down("there is no engine")
            return
        try:
            handle = self._core.submit(request)
        except InvalidRequest as error:
            self._listener.refused(request.request_id, error)
        except EngineDead as error:
            self._core = None
            self._listener.engine_down(str(error))
        else:
            self._listener.accepted(request.request_id, handle)

    def _abort(self, abort: Abort) -> None:
        self.aborts.append(abort)
        if self._core is not None:
            self._core.abort(abort)

    def _bring_up(self) -> None:
        assert self._listener is not None
        self._core, ready = self._make_core()
        self._generation += 1
        self._listener.engine_up(ready)

    def _bring_down(self) -> None:
        assert self._listener is not None
        self._core = self._backlog = None
        self._listener.engine_down("killed by a test")

    async def _ask(self, question: Callable[[EngineCore], Any]) -> Any:
        answer: Future[Any] = Future()

        def order() -> None:
            if self._core is None:
                answer.set_exception(EngineDead("there is no engine"))
            else:
                try:
                    answer.set_result(question(self._core))
                except QuireError as error:
                    answer.set_exception(error)

        self._orders.put(order)
        return await asyncio.wait_for(asyncio.wrap_future(answer), 120)
