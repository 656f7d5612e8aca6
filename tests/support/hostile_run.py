"""Sends hostile requests to a server and keeps a stream running beside them."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from hostile_bodies import HEADS, Hostile, hostile
from quire.serving.http.limits import Limits

EXPECTED = frozenset({200, 400, 401, 403, 404, 405, 408, 411, 413, 415, 421, 429, 431})
READ_SECONDS = 120.0
HEAD_SECONDS = 2.0


@dataclass
class Seen:
    """What the server said, and what it should not have said."""

    statuses: Counter[int] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def send_hostile(url: str, count: int, seed: int, *, workers: int = 4) -> Seen:
    """`count` hostile bodies around the limits the server names, `workers` at a time."""
    rng, seen, lock = random.Random(seed), Seen(), threading.Lock()
    with httpx.Client(base_url=url, timeout=READ_SECONDS, verify=False) as client:
        limits = Limits(client.get("/v1/capabilities").raise_for_status().json()["limits"])
        requests = [hostile(rng, limits) for _ in range(count)]

        def send(request: Hostile) -> None:
            status, fault = _send(client, request)
            with lock:
                seen.statuses[status] += 1
                seen.paths[request.path.partition("?")[0]] += 1
                if fault:
                    seen.faults.append(f"{fault} {request.path} {request.headers} {request.body[:300]!r}")

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(send, requests))
    return seen


def _send(client: httpx.Client, request: Hostile) -> tuple[int, str]:
    try:
        answer = client.post(request.path, content=request.body, headers=request.headers)
    except httpx.HTTPError as error:
        return 0, f"{type(error).__name__}: {error}"
    if answer.status_code not in EXPECTED:
        return answer.status_code, f"{answer.status_code}: {answer.text[:300]}"
    if answer.status_code != 200:
        is_error = _is_error(request.path.partition("?")[0], answer.json())
        return answer.status_code, "" if is_error else f"no error of its API: {answer.text[:300]}"
    is_broken = any(mark in answer.content for mark in (b'data: {"error"', b"event: error", b'"response.failed"'))
    return 200, f"a stream failed: {answer.text[-300:]}" if is_broken else ""


def _is_error(path: str, body: dict[str, Any]) -> bool:
    """Whether the body is an error in the form of the path's API. What is no HTTP has no path."""
    error = body.get("error")
    if isinstance(error, dict) and error.get("code") in ("bad_http", "head_too_large"):
        return True
    if path.startswith("/api/"):
        return set(body) == {"error"} and isinstance(error, str)
    if path in ("/", "/generate_stream"):
        return set(body) == {"error", "error_type"} and isinstance(error, str)
    names = {"type", "message"} if path == "/v1/messages" else {"message", "type", "param", "code"}
    return isinstance(error, dict) and set(error) == names


def send_heads(port: int) -> Seen:
    """Requests that are no HTTP, or only almost. A connection that is closed without a word is an answer too."""
    seen = Seen()
    for head in HEADS:
        with socket.create_connection(("127.0.0.1", port), timeout=HEAD_SECONDS) as connection:
            try:
                connection.sendall(head)
                answer = connection.recv(4_096)
            except (TimeoutError, ConnectionError):
                answer = b""
        status = int(answer.split()[1]) if answer.startswith(b"HTTP/1.") else 0
        seen.statuses[status] += 1
        if status >= 500:
            seen.faults.append(f"{status} {head[:100]!r}")
    return seen


class Canary:
    """A stream that is asked for again and again, beside whatever happens, and must always say the same."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self._url, self._body = url, {**body, "stream": True, "return_token_ids": True}
        self.expected = self.sing()
        self.heard: list[Any] = []
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def sing(self) -> tuple[str, list[int], str | None]:
        """One stream: its text, its tokens and how it ended, or the error it ended with."""
        text, tokens, reason = "", [], None
        with (
            httpx.Client(base_url=self._url, timeout=READ_SECONDS, verify=False) as client,
            client.stream("POST", "/v1/completions", json=self._body) as answer,
        ):
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return text, tokens, str(event["error"])
                for choice in event["choices"]:
                    text += choice["text"]
                    tokens += choice.get("token_ids") or []
                    reason = choice["finish_reason"] or reason
        return text, tokens, reason

    def beside(self, work: Callable[[], Any]) -> Any:
        """Do something while the canary sings; returns what it returned."""
        self._thread.start()
        try:
            return work()
        finally:
            self._stop.set()
            self._thread.join(READ_SECONDS)
            assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.heard.append(self.sing())
        except httpx.HTTPError as error:
            self.error = error
