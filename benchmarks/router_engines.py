"""Hit rates of real engines behind the router, from their own metrics: `quire serve --replicas N` with a tiny model.

The prompts have the structure of a trace: equal pieces become equal token ids. Lengths are divided, so that a model
with random weights computes them in minutes; divide the cache sizes likewise.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from benchmarks.prefix_trace_data import Turn
from benchmarks.report import ROOT
from benchmarks.serving.server import Contestant, running
from tests.support.tiny_served import FLAGS, write_tiny_model

BLOCK_TOKENS = 16
BOOT_SECONDS = 900.0  # enough for four engines on two busy cores
_ADMIN = "benchmark"
_TOKENS = 256  # of the tiny model: one for each byte
_COUNTS = re.compile(r"^quire:prefix_cache_(hits|queries)_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


def measure_engines(turns: Sequence[Turn], count: int, cache_tokens: int, clients: int) -> dict[str, float]:
    """Replay requests over `count` engines with a cache of `cache_tokens` each: by round robin, by the router, and over
    one engine with a cache as large as all of them. Returns the share of prompt tokens that each found."""
    with TemporaryDirectory(prefix="quire-bench-") as folder:
        longest = max(turn.prompt + turn.output for turn in turns) + 1
        model = write_tiny_model(Path(folder), max_length=longest)
        found: dict[str, float] = {}
        with _server(model, 1, count * cache_tokens, longest) as url:
            found["big"] = _hit_rate(url, turns, clients)
        with _server(model, count, cache_tokens, longest) as url:
            found["round_robin"] = _hit_rate(url, turns, clients, [f"replica-{place}" for place in range(count)])
            _ask(url, "POST", "/admin/reset_cache")
            found["router"] = _hit_rate(url, turns, clients)
    return found


@contextmanager
def _server(model: Path, count: int, cache_tokens: int, longest: int) -> Iterator[str]:
    """Run `quire serve` until all its engines are ready."""
    flags = (*FLAGS, "--replicas", str(count), "--num-kv-blocks", str(cache_tokens // BLOCK_TOKENS), "--block-size",
             str(BLOCK_TOKENS), "--max-model-len", str(longest), "--admin-key", _ADMIN)  # fmt: skip
    command = shlex.join([sys.executable, "-m", "quire", "serve", str(model), "--port", "{port}", *flags])
    with running(Contestant("quire", command, {"PYTHONPATH": str(ROOT / "src")}), BOOT_SECONDS) as server:
        until = time.monotonic() + BOOT_SECONDS
        while count > 1 and json.loads(_ask(server.url, "GET", "/health"))["replicas_up"] < count:
            if time.monotonic() > until:
                raise SystemExit(f"not all of {count} replicas came up within {BOOT_SECONDS:.0f} s")
            time.sleep(0.1)
        yield server.url


def _hit_rate(url: str, turns: Sequence[Turn], clients: int, names: Sequence[str] = ()) -> float:
    """Send all requests in order, `clients` at a time; if `names` are given, to these replicas in turn. Returns the
    share of prompt tokens found."""
    before = _counts(url)
    waiting, lock, failures = iter(enumerate(turns)), Lock(), list[str]()

    def work() -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=BOOT_SECONDS)
        while not failures:
            with lock:
                number, turn = next(waiting, (0, None))
            if turn is None:
                break
            body = {"prompt": _tokens(turn), "max_tokens": turn.output, "ignore_eos": True, "temperature": 0}
            headers = {"Content-Type": "application/json"}
            if names:
                headers["X-Replica"] = names[number % len(names)]
            connection.request("POST", "/v1/completions", json.dumps(body, separators=(",", ":")), headers)
            reply = connection.getresponse()
            text = reply.read()
            if reply.status != 200:
                failures.append(f"request {number} was answered {reply.status}: {text[:200]!r}")
        connection.close()

    threads = [Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit(failures[0])
    after = _counts(url)
    return (after["hits"] - before["hits"]) / (after["queries"] - before["queries"])


def _tokens(turn: Turn) -> list[int]:
    return [token for name in turn.hashes for token in _piece(name, turn.piece)][: turn.prompt]


@cache
def _piece(name: int, size: int) -> tuple[int, ...]:
    return tuple(random.Random(name).choices(range(_TOKENS), k=size))


def _counts(url: str) -> dict[str, float]:
    """Return the prompt tokens looked up and found by all engines so far."""
    found = {"hits": 0.0, "queries": 0.0}
    for name, value in _COUNTS.findall(_ask(url, "GET", "/metrics").decode()):
        found[name] += float(value)
    return found


def _ask(url: str, method: str, path: str) -> bytes:
    asked = Request(url + path, method=method, headers={"Authorization": f"Bearer {_ADMIN}"})
    with urlopen(asked, timeout=60) as reply:
        return bytes(reply.read())
