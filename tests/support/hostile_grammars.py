"""Hostile structures in every field and combination of fields that can carry one, and what they do to a server."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hostile_structures import Hostile
from real_server import RealServer, resident_bytes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 24}
HARMLESS_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
HARMLESS = {"type": "json_schema", "json_schema": {"name": "x", "schema": HARMLESS_SCHEMA}}
CANARY = {"prompt": "x", "max_tokens": 8, "structured_outputs": {"regex": "[a-z]{8}"}}
LONG_PROMPT = 1_000  # tokens; four of them fill the KV cache of a server that is attacked
Body = tuple[str, dict[str, Any]]


def _tool(parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


def bodies(hostile: Hostile) -> Iterator[Body]:
    """One body for every place that can carry a structure."""
    ((kind, value),) = hostile.fields.items()
    structure = {"structured_outputs": hostile.fields}
    tool = _tool(HARMLESS_SCHEMA)
    yield COMPLETIONS, {"prompt": "go", "max_tokens": 24, **structure}
    yield COMPLETIONS, {"prompt": "go", "max_tokens": 24, "n": 2, f"guided_{kind}": value}
    yield COMPLETIONS, {"prompt": "go", "max_tokens": 24, "use_beam_search": True, "n": 2, **structure}
    yield CHAT, {**ASK, **structure}
    yield CHAT, {**ASK, "n": 3, **structure, "tools": [tool]}
    yield CHAT, {**ASK, **structure, "tools": [tool], "tool_choice": "auto"}
    yield CHAT, {**ASK, **structure, "tools": [tool], "tool_choice": "required"}
    if kind != "json":
        return
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return
    described = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    yield CHAT, {**ASK, "response_format": described}
    yield CHAT, {**ASK, "response_format": described, "tools": [tool], "tool_choice": "auto"}
    for wrapped in (schema, parameters):
        yield CHAT, {**ASK, "tools": [_tool(wrapped)], "tool_choice": "required"}
        yield CHAT, {**ASK, "tools": [_tool(wrapped)], "tool_choice": "auto", "response_format": HARMLESS}
        yield CHAT, {**ASK, "tools": [tool, _tool(wrapped, name="g", strict=True)]}
        yield CHAT, {**ASK, "n": 2, "tools": [_tool(wrapped)], "tool_choice": "required", "use_beam_search": True}


@dataclass
class Damage:
    """What the bodies did: statuses, the engine's growth in bytes, and how long a harmless request took beside them."""

    statuses: Counter[int] = field(default_factory=Counter)
    growth: int = 0
    seconds: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def attack(server: RealServer, hostiles: Sequence[Hostile], *, workers: int = 4) -> Damage:
    """Send every body, a few at a time, with harmless structured requests beside them."""
    damage, over, lock = Damage(), threading.Event(), threading.Lock()
    harmless = list(bodies(Hostile("harmless", {"json": HARMLESS_SCHEMA})))
    with ThreadPoolExecutor(workers) as pool:  # the engine touches memory that every request would
        answers = list(pool.map(lambda body: server.post(*body), harmless))
    refused = [(body, answer.text) for body, answer in zip(harmless, answers, strict=True) if answer.status_code != 200]
    assert not refused, refused
    assert server.post(COMPLETIONS, CANARY).status_code == 200
    long_prompts = [[100 + which] * LONG_PROMPT for which in range(workers)]  # the KV cache is touched as it fills
    with ThreadPoolExecutor(workers) as pool:
        filled = pool.map(lambda ids: server.post(COMPLETIONS, {"prompt": ids, "max_tokens": 1}), long_prompts)
        assert [answer.status_code for answer in filled] == [200] * workers
    engine = server.engine_pid()
    before = resident_bytes(engine)

    def watch() -> None:
        while not over.wait(0.02):
            damage.growth = max(damage.growth, resident_bytes(engine) - before)

    def ask() -> None:
        while not over.is_set():
            began = time.monotonic()
            answer = server.post(COMPLETIONS, CANARY)
            damage.seconds.append(time.monotonic() - began)
            if answer.status_code != 200:
                damage.faults.append(f"a harmless request: {answer.text[:200]}")

    def send(body: Body) -> None:
        answer = server.post(*body)
        with lock:
            damage.statuses[answer.status_code] += 1
            if answer.status_code not in (200, 400, 429):
                damage.faults.append(f"{answer.status_code} {json.dumps(body)[:300]}: {answer.text[:300]}")

    threads = [threading.Thread(target=target) for target in (watch, ask)]
    for thread in threads:
        thread.start()
    try:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(send, [body for hostile in hostiles for body in bodies(hostile)]))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    return damage
