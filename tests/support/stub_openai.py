"""A small OpenAI-compatible server that says what a script tells it to, in a thread of this process.

`python -m stub_openai PORT` is one in a process of its own, until it is told to end.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Stub:
    """How the server behaves, and what it was asked."""

    words: list[str] = field(default_factory=lambda: ["one ", "two ", "three"])
    pause: float = 0.0  # seconds before each word
    key: str | None = None
    refuse: tuple[int, dict[str, Any]] | None = None  # status and body of every POST
    fail_after: int | None = None  # words before an error event
    cut_after: int | None = None  # words before the connection is dropped
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)


class StubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, stub: Stub, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.stub = stub


class Handler(BaseHTTPRequestHandler):
    """Answers by the stub of its server."""

    server: StubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name the library gives it
        pass

    def do_GET(self) -> None:
        if not self._may_enter():
            return
        self._answer(200, {"object": "list", "data": [{"id": "stub-model", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.stub.asked.append({"path": self.path, **body})
        if not self._may_enter():
            return
        if self.server.stub.refuse is not None:
            self._answer(*self.server.stub.refuse)
        elif body.get("stream"):
            self._stream("chat" in self.path)
        else:
            text = "".join(self.server.stub.words)
            self._answer(200, {"choices": [{"index": i, "text": f"{text}{i}"} for i in range(body.get("n", 1))]})

    def _may_enter(self) -> bool:
        if self.server.stub.key is not None and self.headers.get("Authorization") != f"Bearer {self.server.stub.key}":
            self._answer(401, {"error": {"message": "a valid API key is needed"}})
            return False
        return True

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", "2")
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            self._words(is_chat)
        except (BrokenPipeError, ConnectionResetError):
            self.server.stub.hung_up.set()

    def _words(self, is_chat: bool) -> None:
        if is_chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for number, word in enumerate(self.server.stub.words):
            if number == self.server.stub.fail_after:
                self._event({"error": {"message": "the engine was restarted", "type": "server_error"}})
                break
            if number == self.server.stub.cut_after:
                return
            time.sleep(self.server.stub.pause)
            content = {"delta": {"content": word}} if is_chat else {"text": word}
            self._event({"choices": [{"index": 0, **content, "finish_reason": None}]})
        usage = {"prompt_tokens": 7, "completion_tokens": len(self.server.stub.words)}
        self._event({"choices": [], "usage": usage})
        self._raw(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self._raw(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _raw(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()


@contextmanager
def serve_stub(stub: Stub, port: int = 0) -> Iterator[Stub]:
    server = StubServer(stub, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with serve_stub(Stub(), int(sys.argv[1])):
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
