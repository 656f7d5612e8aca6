"""Measures the Python cost of a request between an edge and the engine, in microseconds.

    python -m benchmarks.messages

Times are CPU time of this process, the minimum of several repeats, which other programs on the machine disturb least.
"""

from __future__ import annotations

import random
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from quire.engine.messages import decode_to_engine, encode
from quire.engine.routing import Routes
from quire.serving.requests import read_prompts
from quire.types.output import Finished, TokensOut
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules, check_vocabulary

VOCAB = 150_000
REPEATS = 15
PROMPTS = (128, 16_384)  # tokens
ROWS = (64, 512, 2_048)


def least_us(function: Callable[[], object], seconds: float = 0.02) -> float:
    """Return the least microseconds of one call."""
    once = min(timeit.repeat(function, number=1, repeat=3))
    number = max(1, int(seconds / max(once, 1e-7)))
    return min(timeit.repeat(function, number=number, repeat=REPEATS, timer=time.process_time)) / number * 1e6


def parameters() -> Iterator[tuple[str, float]]:
    """Measure making SamplingParams, in the ways in which they are made."""
    params = SamplingParams(temperature=0.0, max_tokens=8)
    yield (
        "SamplingParams(temperature=0.0, max_tokens=8)",
        least_us(lambda: SamplingParams(temperature=0.0, max_tokens=8)),
    )
    yield "dataclasses.replace(params, seed=3)", least_us(lambda: replace(params, seed=3))
    yield "SamplingParams.trusted", least_us(lambda: SamplingParams.trusted(temperature=0.0, max_tokens=8))


def requests(num_tokens: int) -> Iterator[tuple[str, float]]:
    """Measure reading, sending and checking a request with a prompt of token ids."""
    ids = random.Random(0).choices(range(VOCAB), k=num_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    request = Submit("cmpl-1", tuple(ids), params, TokenRules((2,), (), (2,)), tenant="t")
    frame = encode(request)
    yield f"read a prompt of {num_tokens} ids", least_us(lambda: read_prompts([ids]))
    yield f"encode a request of {num_tokens} tokens", least_us(lambda: encode(request))
    yield f"decode it ({len(frame)} bytes)", least_us(lambda: decode_to_engine(frame))
    yield "check its vocabulary", least_us(lambda: check_vocabulary("prompt", request.prompt_token_ids, VOCAB))


def routing(num_rows: int, num_edges: int = 2, num_steps: int = 400) -> float:
    """Measure dividing a step's tokens among edges while one request ends and one begins at every step. Returns the
    median."""
    routes, live, spent = Routes(), list(range(num_rows)), []
    for handle in live:
        routes.add(handle % num_edges, str(handle), handle, 1)
    for step in range(num_steps):
        samples = np.array(live, dtype=np.int64)
        out = TokensOut(step, samples, samples.astype(np.int32), finished=(Finished(str(live[step % num_rows]), ()),))
        since = time.process_time_ns()
        list(routes.split(out))
        spent.append((time.process_time_ns() - since) / 1e3)
        handle = live[step % num_rows] = num_rows + step
        routes.add(handle % num_edges, str(handle), handle, 1)
    return sorted(spent)[num_steps // 2]


def main() -> None:
    measured = [*parameters(), *(line for tokens in PROMPTS for line in requests(tokens))]
    measured += [(f"route a step of {rows} rows, one of them new", routing(rows)) for rows in ROWS]
    for name, us in measured:
        print(f"{us:9.1f} us  {name}")


if __name__ == "__main__":
    main()
