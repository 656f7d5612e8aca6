"""An edge without HTTP, for tests of the supervisor: `python -m stub_edge FD`. One JSON object per line and answer.

{"prompt": [...], "max_tokens": n} answers with the tokens or an error, once there is an engine; {"ask": "state" |
"stats" | "drain" | "abort" | "peers"} with facts; {"ask": "block"} hangs the edge.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import sys
import time
from dataclasses import asdict

from quire.serving.process import peers
from quire.serving.process.child import enter_child
from quire.serving.process.control import (
    AskAbort,
    AskDrain,
    AskEdges,
    ControlChannel,
    ControlMessage,
    Drain,
    Drained,
    EdgeAnswer,
    EdgeReady,
    EdgeStart,
    Fatal,
    Ping,
    Pong,
    RequestRow,
)
from quire.serving.process.link import EngineReady
from quire.serving.process.peers import Peers
from quire.serving.process.remote_link import RemoteLink
from quire.types.errors import EngineDead, InvalidRequest
from quire.types.output import TokensOut
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

Answer = dict[str, object]
peers.ANSWER_SECONDS = 60.0  # however busy the machine is


class StubEdge:
    def __init__(self, loop: asyncio.AbstractEventLoop, channel: ControlChannel, start: EdgeStart) -> None:
        self.loop, self.channel, self.edge = loop, channel, start.edge
        self.peers = Peers(channel.send, start.edge, start.config.api_workers - 1)
        self.ready: EngineReady | None = None
        self.is_up = asyncio.Event()  # an edge may hear of the engine after the server has said that it serves
        self.num_accepted = 0
        self.live: dict[str, asyncio.Future[Answer]] = {}
        self.drained = asyncio.Event()
        self.draining = False
        self.aborts: list[tuple[str, ...] | None] = []  # asked for by other edges

    # what the link says, on its thread
    def engine_up(self, ready: EngineReady) -> None:
        self.loop.call_soon_threadsafe(self._greet, ready)

    def engine_down(self, reason: str) -> None:
        self.loop.call_soon_threadsafe(self._lose, reason)

    def accepted(self, request_id: str, handle: int) -> None:
        self.num_accepted += 1

    def refused(self, request_id: str, error: InvalidRequest) -> None:
        self.loop.call_soon_threadsafe(self._finish, request_id, {"refused": str(error)})

    def tokens(self, batch: TokensOut) -> None:
        for end in batch.finished:
            answer: Answer = {"error": end.error, "tokens": [list(sample.token_ids) for sample in end.samples]}
            self.loop.call_soon_threadsafe(self._finish, end.request_id, answer)

    def control(self, message: ControlMessage) -> None:
        if isinstance(message, Ping):
            self.loop.call_soon_threadsafe(self.channel.send, Pong())
        elif isinstance(message, Drain):
            self.loop.call_soon_threadsafe(self._drain)
        elif isinstance(message, AskAbort):
            self.aborts.append(message.request_ids)
        elif isinstance(message, AskEdges):
            row = RequestRow(f"{self.edge}-0", "", "", self.edge, "chat", "queued", 0.0, 1, 1, False)
            self.channel.send(EdgeAnswer(message.asker, message.number, (row,)))
        elif isinstance(message, EdgeAnswer):
            self.loop.call_soon_threadsafe(self.peers.take, message)

    # on the loop
    def _finish(self, request_id: str, answer: Answer) -> None:
        future = self.live.pop(request_id, None)
        if future is not None and not future.done():
            future.set_result(answer)
        self._drain_if_idle()

    def _greet(self, ready: EngineReady) -> None:
        self.ready = ready
        self.is_up.set()

    def _lose(self, reason: str) -> None:
        self.ready = None
        self.is_up.clear()
        for request_id in list(self.live):
            self._finish(request_id, {"lost": reason})

    def _drain(self) -> None:
        self.draining = True
        self._drain_if_idle()

    def _drain_if_idle(self) -> None:
        if self.draining and not self.live:
            self.drained.set()


def block_event_loop() -> None:
    time.sleep(3_600)


async def serve(channel: ControlChannel, start: EdgeStart) -> None:
    edge = StubEdge(asyncio.get_running_loop(), channel, start)
    link = RemoteLink(channel, start.edge, on_control=edge.control)
    link.start(edge)
    numbers = itertools.count()

    async def answer(line: bytes) -> Answer:
        asked = json.loads(line)
        if asked.get("ask") == "state":
            ready = asdict(edge.ready) if edge.ready else None
            state = {"edge": start.edge, "pid": os.getpid(), "ready": ready, "aborts": edge.aborts}
            return {**state, "accepted": edge.num_accepted}
        if asked.get("ask") == "stats":
            try:
                return {"stats": asdict(await link.stats())}
            except EngineDead as error:
                return {"dead": str(error)}
        if asked.get("ask") == "drain":
            channel.send(AskDrain())
            return {"asked": True}
        if asked.get("ask") == "block":
            block_event_loop()
        if asked.get("ask") == "peers":
            rows, missing = await edge.peers.requests()
            return {"edge": start.edge, "others": sorted(row.edge for row in rows), "missing": missing}
        if asked.get("ask") == "abort":
            channel.send(AskAbort(asked["ids"]))
            return {"asked": start.edge}
        await edge.is_up.wait()
        request_id = f"{start.edge}-{next(numbers)}"
        edge.live[request_id] = asyncio.get_running_loop().create_future()
        future = edge.live[request_id]
        link.submit(Submit(request_id, tuple(asked["prompt"]), SamplingParams(max_tokens=asked["max_tokens"], seed=0)))
        return await future

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(json.dumps(await answer(line)).encode() + b"\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, sock=socket.socket(fileno=start.listen_fd))
    channel.send(EdgeReady())
    await edge.drained.wait()
    await asyncio.sleep(0.05)  # the last answers leave
    server.close()
    link.close()
    channel.send(Drained())


def main(arguments: list[str]) -> int:
    channel = enter_child(arguments)
    start = channel.receive()
    assert isinstance(start, EdgeStart)
    if "edgeless" in start.config.source.model:
        channel.send(Fatal("the edge cannot be", retry=False))
        return 1
    asyncio.run(serve(channel, start))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
