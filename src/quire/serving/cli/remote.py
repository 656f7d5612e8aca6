"""Implements Answerer with a running server, through the OpenAI API, using only the standard library."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from quire.config.environment import read_environment
from quire.config.server_url import split_server_url
from quire.serving.cli.answer import Message, Piece, Pieces
from quire.serving.cli.arguments import given_sampling
from quire.types.errors import ConfigError, InvalidRequest, QuireError

SILENCE_SECONDS = 300.0  # timeout of a server that sends nothing
MAX_BODY = 64 * 2**20
MAX_EVENT = 2**20


class RemoteError(QuireError):
    """The server could not be reached, failed, or closed the connection too early."""


class RemoteAnswerer:
    """Sends each prompt to the server at --url over its own connection, so that closing it aborts the request."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._server = Server(args.url, args.api_key)
        self._model: str = args.model or self._server.first_model()
        seed = args.seed if args.seed is None or args.seed >= 0 else None  # -1: a random seed
        self._options = {**given_sampling(args), "seed": seed, "stop": args.stop}
        self._n: int = getattr(args, "n", 1)

    def chat(self, messages: Sequence[Message]) -> Pieces:
        return self._stream("/v1/chat/completions", {"messages": list(messages)})

    def complete(self, prompt: str) -> Pieces:
        return self._stream("/v1/completions", {"prompt": prompt})

    def samples(self, prompt: str) -> list[str]:
        body = self._server.ask("/v1/completions", self._body({"prompt": prompt, "n": self._n}))
        return [str(choice["text"]) for choice in sorted(body["choices"], key=lambda choice: choice["index"])]

    def _body(self, fields: dict[str, object]) -> dict[str, object]:
        given = {name: value for name, value in self._options.items() if value is not None}
        return {"model": self._model, **fields, **given}

    def _stream(self, path: str, fields: dict[str, object]) -> Pieces:
        streamed: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}}
        for event in self._server.events(path, self._body({**fields, **streamed})):
            for choice in event.get("choices") or ():
                text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
                if text:
                    yield Piece(str(text), 0)
            usage = event.get("usage")
            if usage:
                yield Piece("", int(usage["completion_tokens"]))


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """The response of a server. `retry_after` is how many seconds to wait before another try."""

    status: int
    data: bytes
    request_id: str
    retry_after: float


class Server:
    """A server's address, and requests to it. Methods raise RemoteError, or InvalidRequest if the server refuses a
    request."""

    def __init__(self, url: str, api_key: str | None) -> None:
        try:
            parts = split_server_url(url if "//" in url else f"http://{url}")
        except ValueError:
            reason, fix = f"{url[:200]!r} is not the address of a server", "use one like http://127.0.0.1:8000"
            raise ConfigError("url", reason, fix) from None
        self._connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port = parts.hostname or "", parts.port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._shown = f"{parts.scheme}://{parts.netloc}{self._base}"
        key = read_environment().api_key if api_key is None else api_key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def first_model(self) -> str:
        models = self.ask("/v1/models").get("data")
        if not models:
            raise RemoteError(f"{self._shown} serves no model")
        return str(models[0]["id"])

    def ask(self, path: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        """Send a request and return the whole response."""
        connection = self._open()
        with closing(connection):
            return self._read_json(self._send(connection, path, body))

    def post(self, path: str, body: bytes) -> RawAnswer:
        """Send a JSON body and return the whole response, whatever its status."""
        connection = self._open()
        headers = {**self._headers, "Accept": "application/json", "Content-Type": "application/json"}
        with closing(connection):
            try:
                connection.request("POST", self._base + path, body, headers)
                response = connection.getresponse()
                data = response.read(MAX_BODY)
            except (OSError, HTTPException) as error:
                raise RemoteError(f"{self._shown} cannot be reached: {_why(error)}") from None
            later = response.getheader("Retry-After", "")
            request_id = response.getheader("X-Request-Id", "")
            return RawAnswer(response.status, data, request_id, float(later) if later.isdigit() else 1.0)

    def events(self, path: str, body: dict[str, object]) -> Iterator[dict[str, Any]]:
        """Send a request and yield the events of its response as they arrive. Closing the iterator closes the
        connection."""
        connection = self._open()
        with closing(connection):
            response = self._send(connection, path, body)
            while (data := self._next_data(response)) != b"[DONE]":
                event = _decoded(data, self._shown)
                if "error" in event:
                    raise RemoteError(f"{self._shown}: {_message(event)}")
                yield event

    def _open(self) -> HTTPConnection:
        return self._connect(self._host, self._port, timeout=SILENCE_SECONDS)

    def _send(self, connection: HTTPConnection, path: str, body: dict[str, object] | None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Accept": "application/json", "Content-Type": "application/json"}
        try:
            connection.request("GET" if data is None else "POST", self._base + path, data, headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            raise RemoteError(f"{self._shown} cannot be reached: {_why(error)}") from None
        if response.status >= 400:
            self._refuse(response)
        return response

    def _refuse(self, response: HTTPResponse) -> None:
        try:
            said = _message(self._read_json(response))
        except RemoteError:
            said = response.reason
        if response.status in (401, 403):
            raise RemoteError(f"{self._shown}: {said}; give the right --api-key, or set QUIRE_API_KEY")
        if response.status < 500 and response.status != 429:
            raise InvalidRequest(self._shown, said)
        later = response.getheader("Retry-After")
        wait = f"; try again in {later} s" if later else ""
        raise RemoteError(f"{self._shown}: {said} (status {response.status}){wait}")

    def _read_json(self, response: HTTPResponse) -> dict[str, Any]:
        try:
            data = response.read(MAX_BODY)
        except (OSError, HTTPException) as error:
            raise RemoteError(f"{self._shown} closed the connection during its response: {_why(error)}") from None
        return _decoded(data, self._shown)

    def _next_data(self, response: HTTPResponse) -> bytes:
        """Return the data of the next event. Raises RemoteError if the stream ends before its last event."""
        while True:
            try:
                line = response.readline(MAX_EVENT)
            except (OSError, HTTPException) as error:
                raise RemoteError(f"{self._shown} closed the connection during its response: {_why(error)}") from None
            if not line:
                raise RemoteError(f"{self._shown} ended its answer before it was complete")
            if line.startswith(b"data:"):
                return line[5:].strip()


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def _decoded(data: bytes, source: str) -> dict[str, Any]:
    try:
        decoded = json.loads(data)
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict):
        raise RemoteError(f"{source} sent something that is not a JSON object; is it an OpenAI-compatible server?")
    return decoded


def _message(body: dict[str, Any]) -> str:
    error = body.get("error")
    said = error.get("message") if isinstance(error, dict) else error or body.get("message") or body.get("detail")
    return " ".join(str(said or "no reason given").split())
