"""Sends requests to a server and hangs up on them at random moments."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cut:
    """One wave of cut requests: when the last client hung up, and how many had heard something by then."""

    last_at: float
    num_heard: int


async def cut_wave(port: int, bodies: list[Mapping[str, Any]], rng: random.Random, seconds: float) -> Cut:
    """Send all bodies at once; each client hangs up after a random part of `seconds`."""
    moments = [rng.random() * seconds for _ in bodies]
    heard = await asyncio.gather(
        *(_ask_and_cut(port, body, moment) for body, moment in zip(bodies, moments, strict=True))
    )
    return Cut(time.monotonic(), sum(heard))


async def _ask_and_cut(port: int, body: Mapping[str, Any], seconds: float) -> bool:
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    received = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while data := await reader.read(65_536):
                received += data
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()
    assert not received or received.startswith(b"HTTP/1.1 200"), received[:300]
    return bool(received)
