"""A scripted stand-in for the server: serves the playground's files and plays the API's answers, as slowly as told."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from quire.serving.playground import INDEX, etag, files

BLOCK_SIZE = 16
ADMIN_KEY = "admin-of-the-stub"
CONTENT_SECURITY_POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
MODEL = "stub/SmolLM2-135M"


@dataclass
class Live:
    """A request that is being answered: its blocks grow with its tokens; its answers share the prompt's."""

    request_id: str
    prompt_tokens: int
    samples: int
    state: str = "running"
    written: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def num_blocks(self) -> tuple[int, int]:
        """(blocks of the prompt, blocks of each answer)."""
        return -(-self.prompt_tokens // BLOCK_SIZE), -(-self.written // BLOCK_SIZE)


@dataclass
class Script:
    """What the stub does next. Tests change it while it runs."""

    answer: str = "Paris is the capital of France."
    pause: float = 0.0  # seconds between the tokens of a stream
    refuse: tuple[int, str, dict[str, str]] | None = None  # status, message, headers of every chat request
    break_after: int | None = None  # a stream ends with an error event after so many tokens
    hang_up_after: int | None = None  # the connection is closed after so many tokens
    state: str = "ok"  # or what /ready says instead: loading, restarting, draining
    api_key: str | None = None
    tool_calls: tuple[tuple[str, str], ...] = ()  # name and arguments of the calls that a chat answer makes
    models: tuple[str, ...] = (MODEL,)
    is_forkable: bool = True  # whether /v1/fork knows the requests of before
    limit: int | None = None  # an answer is cut after so many tokens, whatever max_tokens says
    num_blocks: int = 256
    cached: tuple[int, ...] = ()
    swapped: int = 0


class Stub:
    """The server and what it saw. `url` ends without a slash."""

    def __init__(self) -> None:
        self.script = Script()
        self.chats: list[dict[str, Any]] = []
        self.completions: list[dict[str, Any]] = []
        self.forks: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.hung_up: list[str] = []
        self.live: dict[str, Live] = {}
        self.lock = threading.Lock()
        self.output_tokens = 0
        stub = self

        class Handler(StubHandler):
            owner = stub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def block_map(self) -> dict[str, Any]:
        with self.lock:
            live = list(self.live.values())
        holders, free, requests = [0] * self.script.num_blocks, 0, []
        for request in live:
            prompt, answer = request.num_blocks()
            needed = prompt + answer * request.samples
            blocks = [block for block in range(free, free + needed) if block < len(holders)]
            for i, block in enumerate(blocks):
                holders[block] = request.samples if i < prompt else 1
            free += needed
            requests.append(
                {
                    "request_id": request.request_id,
                    "state": request.state,
                    "num_tokens": request.prompt_tokens + request.written * request.samples,
                    "block_ids": blocks if request.state == "running" else [],
                }
            )
        running = sum(request.state == "running" for request in live)
        stats = {"running": running, "waiting": len(live) - running, "output_tokens": self.output_tokens}
        return {
            "step": self.output_tokens,
            "block_size": BLOCK_SIZE,
            "total": len(holders),
            "holders": holders,
            "requests": requests,
            "stats": stats,
            "cached": [block for block in self.script.cached if holders[block] == 0],
            "swapped": self.script.swapped,
        }

    @contextmanager
    def running(self) -> Iterator[Stub]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            for request in list(self.live.values()):
                request.ended.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join(timeout=5)


class StubHandler(BaseHTTPRequestHandler):
    owner: Stub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Tests have no use for access logs."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/" or path.startswith("/playground/"):
            self._static(INDEX if path == "/" else path.removeprefix("/playground/"))
        elif path in ("/health", "/ready"):
            state = self.owner.script.state
            if state == "ok":
                self._json(200, {"status": "ok"})
            else:
                self._json(503, _error("the engine is not up", "server_error", state))
        elif path == "/v1/models" and self._may_enter():
            known = {"object": "model", "max_model_len": 2048, "default_sampling_params": {"temperature": 0.25}}
            self._json(200, {"object": "list", "data": [{"id": name, **known} for name in self.owner.script.models]})
        elif path == "/v1/capabilities" and self._may_enter():
            sizes = {"num_blocks": self.owner.script.num_blocks, "block_size": BLOCK_SIZE}
            engine = {**sizes, "max_num_seqs": 16, "max_model_len": 2048}
            self._json(200, {"engine": engine, "limits": {"prompts": 256}})
        elif path == "/admin/blocks" and self._is_admin():
            self._blocks()
        elif not self.wfile.closed and path not in ("/v1/models", "/v1/capabilities", "/admin/blocks"):
            self._json(404, _error("there is no such path", "not_found_error"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/chat/completions" and self._may_enter():
            self.owner.chats.append(body)
            self._complete(body, [" ".join(message["content"] or "" for message in body["messages"])])
        elif self.path == "/v1/completions" and self._may_enter():
            self.owner.completions.append(body)
            self._complete(body, body["prompt"])
        elif self.path == "/v1/fork" and self._may_enter():
            self.owner.forks.append(body)
            if self.owner.script.is_forkable:
                self._complete(body, [""])
            else:
                self._json(404, _error("request_id: no request of yours has this id", "not_found_error"))
        elif self.path == "/tokenize" and self._may_enter():
            self._json(200, {"count": len(body["prompt"]) // 4, "max_model_len": 2048})
        elif self.path == "/admin/abort" and self._is_admin():
            self.owner.aborted.append(body["request_id"])
            if request := self.owner.live.get(body["request_id"]):
                request.ended.set()
            self._json(200, {"aborted": 1})

    def _static(self, name: str) -> None:
        if name not in files():
            self._json(404, _error("there is no such file", "not_found_error"))
            return
        content, media_type = files()[name]
        headers = {"etag": etag(name), "content-security-policy": CONTENT_SECURITY_POLICY}
        self._answer(200, content, media_type, headers)

    def _may_enter(self) -> bool:
        key = self.owner.script.api_key
        if key is None or self.headers["authorization"] == f"Bearer {key}":
            return True
        self._json(401, _error("the key is missing or wrong", "authentication_error"))
        return False

    def _is_admin(self) -> bool:
        if self.headers["authorization"] == f"Bearer {ADMIN_KEY}":
            return True
        self._json(401, _error("the admin key is missing or wrong", "authentication_error"))
        return False

    def _complete(self, body: dict[str, Any], prompts: list[str]) -> None:
        script = self.owner.script
        if script.refuse is not None:
            status, message, headers = script.refuse
            self._json(status, _error(message, "refused"), headers)
            return
        name, samples = self.headers["x-request-id"] or f"stub-{len(self.owner.chats)}", body.get("n", 1)
        names = [name] if len(prompts) == 1 else [f"{name}.{i}" for i in range(len(prompts))]
        lives = [Live(each, len(text.split()) * 2 + 10, samples) for each, text in zip(names, prompts, strict=True)]
        with self.owner.lock:
            self.owner.live |= {live.request_id: live for live in lives}
        try:
            if not body.get("stream"):
                self._json(200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": script.answer}}]})
                return
            self._start_events()
            self._stream(body, lives)
        except (BrokenPipeError, ConnectionResetError):
            self.owner.hung_up.append(name)
        finally:
            with self.owner.lock:
                for each in names:
                    del self.owner.live[each]

    def _stream(self, body: dict[str, Any], lives: list[Live]) -> None:
        script, tokens = self.owner.script, split(self.owner.script.answer)
        limit = min(body["max_tokens"], script.limit or body["max_tokens"])
        finish = "stop" if len(tokens) <= limit else "length"
        is_chat = "messages" in body
        if is_chat and script.tool_calls:
            tokens, finish = [], "tool_calls"
            self._tool_calls(script.tool_calls)
        choices = [(live, sample) for live in lives for sample in range(live.samples)]
        for position, token in enumerate(tokens[:limit]):
            if script.hang_up_after == position:
                return
            if script.break_after == position or any(live.ended.is_set() for live in lives):
                self._event(_error("the engine stopped while it wrote this answer", "server_error"))
                break
            for live in lives:
                live.written += 1
                self.owner.output_tokens += live.samples
            for index in range(len(choices)):
                piece = choice(body, index, token, position)
                self._event({"id": f"id-{lives[0].request_id}", "choices": [piece], "usage": usage(lives)})
            time.sleep(script.pause)
        else:
            for index in range(len(choices)):
                last = {"delta": {}} if is_chat else {"text": ""}
                self._event({"choices": [{"index": index, "finish_reason": finish, **last}]})
            self._event({"choices": [], "usage": usage(lives), "quire": {"ledger": ledger(lives)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _tool_calls(self, calls: tuple[tuple[str, str], ...]) -> None:
        """Streams each call in two pieces, as a server does that sends arguments as they come."""
        for i, (name, arguments) in enumerate(calls):
            first = {"index": i, "id": f"call-{i}", "type": "function", "function": {"name": name, "arguments": ""}}
            rest = {"index": i, "function": {"arguments": arguments}}
            for piece in (first, rest):
                self._event({"choices": [{"index": 0, "delta": {"tool_calls": [piece]}, "finish_reason": None}]})

    def _blocks(self) -> None:
        self._start_events()
        try:
            while True:
                self._event(self.owner.block_map())
                time.sleep(0.1)
        except (BrokenPipeError, ConnectionResetError):
            return

    def _start_events(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("cache-control", "no-store")
        self.send_header("connection", "close")
        self.end_headers()

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, status: int, data: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._answer(status, json.dumps(data).encode(), "application/json", headers or {})

    def _answer(self, status: int, content: bytes, media_type: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-type": media_type, "content-length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def split(text: str) -> list[str]:
    """Words with the space before them, and single marks: what a tokenizer's output looks like."""
    return re.findall(r" ?\w+|[^\w]", text)


def choice(body: dict[str, Any], index: int, token: str, position: int) -> dict[str, Any]:
    asked = body.get("logprobs")
    if "messages" not in body:
        entry = logprobs(token, position)
        top = {each["token"]: each["logprob"] for each in entry["top_logprobs"]}
        given = {"tokens": [token], "token_logprobs": [entry["logprob"]], "top_logprobs": [top]}
        return {"index": index, "text": token, "finish_reason": None, "logprobs": given if asked else None}
    entries = {"logprobs": {"content": [logprobs(token, position + 5 * index)]}} if asked else {}
    return {"index": index, "delta": {"content": token}, "finish_reason": None, **entries}


def logprobs(token: str, position: int) -> dict[str, Any]:
    share = (0.93, 0.42, 0.98, 0.71, 0.12, 0.997, 0.03)[position % 7]
    others = [(" the", (1 - share) * 0.5), (" a", (1 - share) * 0.3), (" perhaps", (1 - share) * 0.1)]
    ranked = sorted([(token, share), *others], key=lambda pair: -pair[1])
    entries = [{"token": text, "logprob": math.log(p), "bytes": list(text.encode())} for text, p in ranked]
    return {"token": token, "logprob": math.log(share), "bytes": list(token.encode()), "top_logprobs": entries}


def usage(lives: list[Live]) -> dict[str, Any]:
    prompt = sum(live.prompt_tokens for live in lives)
    written = sum(live.written * live.samples for live in lives)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def ledger(lives: list[Live]) -> list[dict[str, Any]]:
    rows = [
        ("received", 0.0, 0, ""),
        ("queued", 1.8, lives[0].prompt_tokens, ""),
        ("admitted", 42.0, 0, "waited: no free blocks"),
        ("cached", 42.0, 6, ""),
        ("missed", 42.1, 7, "from here on it differs from request chatcmpl-before"),
        ("chunk", 42.3, lives[0].prompt_tokens, ""),
        ("first_token", 131.0, 0, ""),
        ("preempted", 400.0, 48, "no free blocks"),
        ("admitted", 520.0, 0, ""),
        ("finished", 1900.0, lives[0].written, "stop"),
    ]
    miss = {"reason": "differs", "token_index": 6, "token_id": 5, "token": " so", "request_id": "chatcmpl-before"}
    return [
        {"kind": kind, "at_ms": at, "amount": amount, "note": note}
        | ({"miss": miss} if kind == "missed" else {})
        | ({"prompt": i} if len(lives) > 1 else {})
        for i in range(len(lives))
        for kind, at, amount, note in rows
    ]


def _error(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
