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
    """One client: whether it streams, when its answer ended, and how."""

    name: str
    streams: bool
    num_events: int = 0
    ended_at: float = 0.0
    ending: Ending = "broken"
    said: str = ""


@dataclass
class Drill:
    """One kill. Times are seconds after it."""

    inside: list[Asked]  # clients whose requests were in the engine
    queued: list[Asked]  # clients whose requests waited in the edge
    killed_at: float
    unready_after: float
    ready_after: float

    @property
    def told_after(self) -> list[float]:
        return [asked.ended_at - self.killed_at for asked in self.inside]


@dataclass
class Drills:
    """Kill after kill of one server. `max_tokens` must last longer than it takes to kill."""

    server: RealServer
    max_tokens: int
    num_clients: int = 12
    prompt: str = "Once upon a time"
    done: list[Drill] = field(default_factory=list)

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
            outside = [name for name, state in states.items() if state == "queued"]
            inside = [asked for asked in clients if not any(f"-{asked.name}~" in name for name in outside)]
            killed_at = time.monotonic()
            server.kill_engine()
            unready = await asyncio.to_thread(server.wait, lambda: not server.is_ready())
            await asyncio.to_thread(server.wait, server.is_ready)
            ready = time.monotonic() - killed_at
        queued = [asked for asked in clients if asked not in inside]
        return Drill(inside, queued, killed_at, unready, ready)

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
        body = {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": asked.streams,
            "request_id": asked.name,
        }
        try:
            async with session.post("/v1/completions", json=body) as answer:
                if asked.streams and answer.status == 200:
                    await _read_stream(answer, asked)
                else:
                    asked.ending, asked.said = _ending(answer.status, await answer.json())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            asked.said = repr(error)
        asked.ended_at = time.monotonic()


async def _read_stream(answer: aiohttp.ClientResponse, asked: Asked) -> None:
    """A stream ends with [DONE], after an error event or without one; anything else is broken."""
    failed: Any = None
    async for line in answer.content:
        if line.startswith(b"data: {"):
            asked.num_events += 1
            failed = json.loads(line[6:]).get("error") or failed
        elif line.startswith(b"data: [DONE]"):
            asked.ending, asked.said = ("error", str(failed)) if failed else ("answer", "")


def _ending(status: int, body: dict[str, Any]) -> tuple[Ending, str]:
    if status == 200:
        return "answer", ""
    is_said = set(body.get("error", ())) == {"message", "type", "param", "code"}
    return ("error" if is_said else "broken"), f"{status} {body}"
