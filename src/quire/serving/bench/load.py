"""Sends requests to a server and records when bytes arrive. Needs the `bench` extra (aiohttp)."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from quire.serving.bench.timeline import Recording
from quire.serving.bench.workload import Job
from quire.types.errors import ConfigError, QuireError

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LAG_SECONDS = 0.01  # how often the client measures its own lag
MAX_LAGS = 1_000_000
MAX_ANSWER = 64 * 2**20  # bytes kept of one answer
MAX_REASON = 2**16  # bytes read of an error response


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the settings of the requests that are sent to it."""

    url: str
    model: str
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    ignore_eos: bool = True  # answers have exactly max_tokens tokens; not in OpenAI's API
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of every request
    timeout: float = 600.0  # seconds for one request

    def body(self, job: Job) -> bytes:
        """Return the encoded body of a request. Called before the measurement starts."""
        prompt: dict[str, Any] = {"prompt": list(job.prompt) if isinstance(job.prompt, tuple) else job.prompt}
        if self.endpoint == "chat":
            if not isinstance(job.prompt, str):
                raise ConfigError("endpoint", "chat takes text, but the prompts are token ids", "use completions")
            prompt = {"messages": [{"role": "user", "content": job.prompt}]}
        fields = {
            "model": self.model,
            **prompt,
            "max_tokens": job.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra,
        }
        return json.dumps(fields).encode()

    @property
    def headers(self) -> dict[str, str]:
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", **key}


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one run: a recording for each job, and how late the client's event loop was, in seconds."""

    recordings: list[Recording]
    lags: list[float]


async def run_open(target: Target, jobs: Sequence[Job], *, on_end: Callable[[], None]) -> Run:
    """Open loop: send every job at its arrival time, regardless of earlier ones."""
    bodies = [target.body(job) for job in jobs]

    async def send_all(session: ClientSession, start: float) -> list[Recording]:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for job, body in zip(jobs, bodies, strict=True):
                await asyncio.sleep(start + job.arrival - time.perf_counter())
                recording = Recording(planned_at=start + job.arrival)
                tasks.append(group.create_task(_send(session, target, body, recording, on_end)))
        return [task.result() for task in tasks]

    return await _measured(target, send_all)


async def run_closed(target: Target, jobs: Sequence[Job], concurrency: int, *, on_end: Callable[[], None]) -> Run:
    """Closed loop: keep `concurrency` requests running; send the next one when one ends."""
    bodies = iter([target.body(job) for job in jobs])

    async def send_all(session: ClientSession, start: float) -> list[Recording]:  # noqa: ARG001
        done: list[Recording] = []

        async def worker() -> None:
            for body in bodies:
                recording = Recording(planned_at=time.perf_counter())
                done.append(await _send(session, target, body, recording, on_end))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(jobs))):
                group.create_task(worker())
        return done

    return await _measured(target, send_all)


async def first_model(url: str, api_key: str | None) -> str:
    """Return the first model that the server lists. Raises QuireError if there is no server or no model."""
    from aiohttp import ClientError

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        async with _session(30.0) as session, session.get(f"{url}/v1/models", headers=headers) as response:
            if response.status != 200:
                raise QuireError(f"{url}/v1/models answered {response.status} {response.reason}")
            listed = await response.json(content_type=None)
    except (TimeoutError, ClientError, OSError, ValueError) as error:
        raise QuireError(f"{url} cannot be reached: {str(error) or type(error).__name__}") from None
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise QuireError(f"{url}/v1/models lists no model") from None


async def _measured(target: Target, send_all: Callable[[ClientSession, float], Awaitable[list[Recording]]]) -> Run:
    lags: deque[float] = deque(maxlen=MAX_LAGS)
    async with _session(target.timeout) as session:
        watch = asyncio.create_task(_watch_lag(lags))
        try:
            recordings = await send_all(session, time.perf_counter())
        finally:
            watch.cancel()
    return Run(recordings, list(lags))


def _session(timeout: float) -> ClientSession:
    from aiohttp import ClientSession, ClientTimeout, TCPConnector

    return ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=timeout))


async def _send(
    session: ClientSession, target: Target, body: bytes, recording: Recording, on_end: Callable[[], None]
) -> Recording:
    from aiohttp import ClientError

    recording.sent_at = time.perf_counter()
    try:
        async with session.post(target.url + PATHS[target.endpoint], data=body, headers=target.headers) as response:
            if response.status == 200:
                await _record(response, recording)
            else:
                recording.error = f"status {response.status}{_reason(await response.content.read(MAX_REASON))}"
    except (TimeoutError, ClientError, OSError) as error:
        recording.error = type(error).__name__
    recording.ended_at = time.perf_counter()
    on_end()
    return recording


def _reason(body: bytes) -> str:
    """Return the message of an error response in OpenAI's format, or ""."""
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    return f": {' '.join(str(said).split())[:200]}"


async def _record(response: ClientResponse, recording: Recording) -> None:
    kept = 0
    async for data in response.content.iter_any():
        recording.chunks.append((time.perf_counter(), data))
        kept += len(data)
        if kept > MAX_ANSWER:
            recording.error = f"the answer is above {MAX_ANSWER} bytes"
            return


async def _watch_lag(lags: deque[float]) -> None:
    """Record how late the event loop wakes up: all recorded times may be late by as much."""
    while True:
        due = time.perf_counter() + LAG_SECONDS
        await asyncio.sleep(LAG_SECONDS)
        lags.append(max(time.perf_counter() - due, 0.0))
