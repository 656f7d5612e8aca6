"""Kills the engine of a real server under load and tells how its clients and the server took it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from real_server import PATIENCE, RealServer

Ending = Literal["answer", "error", "broken"]


@dataclass
class Asked:
    """One client: whether it streams, what it got, when its answer ended, and how."""

    name: str
    streams: bool
    num_events: int = 0  # that carry some of the answer
    text: str = ""
    ended_at: float = 0.0
    ending: Ending = "broken"
    said: str = ""


@dataclass
class Drill:
    """One kill. Times are seconds after it."""

    clients: list[Asked]
    num_in_engine: int  # requests that the engine had
    killed_at: float
    unready_after: float
    ready_after: float

    @property
    def unanswered(self) -> list[Asked]:
        """Clients that got an error although nothing of their answer had been delivered."""
        return [asked for asked in self.clients if asked.ending != "answer" and not asked.num_events]

    @property
    def broken_off(self) -> list[Asked]:
        """Clients whose stream had begun and ended with an error."""
        return [asked for asked in self.clients if asked.ending == "error" and asked.num_events]

    @property
    def told_after(self) -> list[float]:
        return [asked.ended_at - self.killed_at for asked in self.broken_off]


@dataclass
class Drills:
    """Kill after kill of one server. `max_tokens` must last longer than it takes to kill."""

    server: RealServer
    max_tokens: int
    num_clients: int = 12
    prompt: str = "Once upon a time"
    done: list[Drill] = field(default_factory=list)

    def body(self, name: str) -> dict[str, Any]:
        """What the client of this name asks for: no two ask for the same."""
        return {"prompt": f"{self.prompt}, {name}", "max_tokens": self.max_tokens, "ignore_eos": True, "temperature": 0}

    def run(self) -> Drill:
        self.done.append(asyncio.run(self._run(len(self.done))))
        return self.done[-1]

    async def _run(self, number: int) -> Drill:
        server = self.server
        clients = [Asked(f"drill-{number}-{i:02}", streams=i % 2 == 0) for i in range(self.num_clients)]
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        async with aiohttp.ClientSession(server.url, timeout=timeout) as session, asyncio.TaskGroup() as group:
            for asked in clients:
                group.create_task(self._ask(session, asked))
            await self._until_busy(clients)
            states = await asyncio.to_thread(server.requests)
            killed_at = time.monotonic()
            server.kill_engine()
            unready = await asyncio.to_thread(server.wait, lambda: not server.is_ready())
            await asyncio.to_thread(server.wait, server.is_ready)
            ready = time.monotonic() - killed_at
        inside = [name for name, state in states.items() if state != "queued"]
        return Drill(clients, len(inside), killed_at, unready, ready)

    async def _until_busy(self, clients: list[Asked]) -> None:
        """Every request is live and some stream has begun."""
        deadline = time.monotonic() + PATIENCE
        while True:
            states = await asyncio.to_thread(self.server.requests)
            if len(states) == len(clients) and any(asked.num_events > 2 for asked in clients):
                return
            assert time.monotonic() < deadline, states
            await asyncio.sleep(0.01)

    async def _ask(self, session: aiohttp.ClientSession, asked: Asked) -> None:
        body = {**self.body(asked.name), "stream": asked.streams, "request_id": asked.name}
        try:
            async with session.post("/v1/completions", json=body) as answer:
                if asked.streams and answer.status == 200:
                    await _read_stream(answer, asked)
                else:
                    _read_whole(answer.status, await answer.json(), asked)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            asked.said = repr(error)
        asked.ended_at = time.monotonic()


async def _read_stream(answer: aiohttp.ClientResponse, asked: Asked) -> None:
    """A stream ends with [DONE], after an error event or without one; anything else is broken."""
    failed: Any = None
    async for line in answer.content:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            failed = event.get("error") or failed
            if "error" not in event:
                asked.num_events += 1
                asked.text += "".join(choice["text"] for choice in event["choices"])
        elif line.startswith(b"data: [DONE]"):
            asked.ending, asked.said = ("error", str(failed)) if failed else ("answer", "")


def _read_whole(status: int, body: dict[str, Any], asked: Asked) -> None:
    if status == 200:
        asked.ending, asked.text = "answer", body["choices"][0]["text"]
        return
    is_said = set(body.get("error", ())) == {"message", "type", "param", "code"}
    asked.ending, asked.said = ("error" if is_said else "broken"), f"{status} {body}"
