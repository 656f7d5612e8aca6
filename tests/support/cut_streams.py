"""Streams beside each other, many of them cut at random moments; those that end are compared with the same request
alone."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from real_server import PATIENCE

Body = dict[str, Any]


@dataclass
class CutRun:
    """What `num_streams` clients saw until the time was over."""

    statuses: Counter[int] = field(default_factory=Counter)
    num_cut: int = 0
    num_whole: int = 0
    failures: list[str] = field(default_factory=list)  # errors in streams, broken streams, other texts

    @property
    def server_errors(self) -> dict[int, int]:
        return {status: count for status, count in self.statuses.items() if status >= 500}


def make_bodies(rng: random.Random, count: int) -> list[Body]:
    """Requests whose answers are determined: greedy, or sampled with a seed; some with several samples or a stop."""
    words = ("the", "a", "river", "house", "light", "never", "under", "many", "green", "letters", "seven", "is", "was")
    bodies: list[Body] = []
    for number in range(count):
        prompt = " ".join(rng.choice(words) for _ in range(rng.randint(1, 40)))
        body: Body = {"prompt": f"{number} {prompt}", "max_tokens": rng.randint(4, 48), "ignore_eos": True}
        if number % 2:
            body |= {"temperature": 1.0, "seed": number, "top_p": 0.9}
        else:
            body["temperature"] = 0
        if number % 7 == 3:
            body["n"] = 2
        if number % 5 == 4:
            body["stop"] = [" the"]
        bodies.append(body)
    return bodies


async def run_cut_streams(url: str, bodies: list[Body], num_streams: int, seconds: float, seed: int) -> CutRun:
    """Ask for every body alone first. Then have `num_streams` clients stream random ones of them; every second stream
    is cut after a random time."""
    run, timeout = CutRun(), aiohttp.ClientTimeout(total=PATIENCE)
    connector = aiohttp.TCPConnector(limit=num_streams)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        alone = [await _alone(session, body) for body in bodies]
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(num_streams):
                rng = random.Random(f"{seed}-{number}")
                group.create_task(_client(session, bodies, alone, rng, end, run))
    return run


async def _alone(session: aiohttp.ClientSession, body: Body) -> dict[int, str]:
    async with session.post("/v1/completions", json=body) as answer:
        answer.raise_for_status()
        return {choice["index"]: choice["text"] for choice in (await answer.json())["choices"]}


async def _client(
    session: aiohttp.ClientSession,
    bodies: list[Body],
    alone: list[dict[int, str]],
    rng: random.Random,
    end: float,
    run: CutRun,
) -> None:
    while time.monotonic() < end:
        number = rng.randrange(len(bodies))
        is_cut, moment = rng.random() < 0.5, rng.expovariate(1.0)
        try:
            async with asyncio.timeout(moment if is_cut else PATIENCE):
                await _stream(session, bodies[number], alone[number], run)
        except TimeoutError:
            if not is_cut:
                run.failures.append(f"body {number}: no end within {PATIENCE:g} s")
            run.num_cut += is_cut
        except (aiohttp.ClientError, ValueError) as error:
            run.failures.append(f"body {number}: {error!r}")


async def _stream(session: aiohttp.ClientSession, body: Body, expected: dict[int, str], run: CutRun) -> None:
    """Leaving it early closes the connection: the server learns that the client is gone."""
    texts = dict.fromkeys(expected, "")
    is_done = False
    async with session.post("/v1/completions", json={**body, "stream": True}) as answer:
        run.statuses[answer.status] += 1
        if answer.status != 200:
            return
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    run.failures.append(f"{body['prompt'][:20]!r}: {event['error']}")
                    return
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
            is_done = is_done or line.startswith(b"data: [DONE]")
    run.num_whole += 1
    if not is_done:
        run.failures.append(f"{body['prompt'][:20]!r}: the stream has no end")
    elif texts != expected:
        run.failures.append(f"{body['prompt'][:20]!r}: {texts} is not {expected}")
