"""Clients that hang up at random moments, streaming or not, running or queued."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from cut_drill import cut_wave
from tests.soak.conftest import Note, Start

pytestmark = [pytest.mark.soak, pytest.mark.model]
WAVES, WAVE = 20, 25
SIZES = ("--threads", "1", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--kv-cache-memory", "128MiB",
         "--max-model-len", "1024")  # fmt: skip


def test_five_hundred_cut_requests_leave_no_block_held_after_a_second(start_default: Start, note: Note) -> None:
    """A wave is three times what the engine takes at once, so about half of it is cut in the queue."""
    server, rng = start_default(*SIZES), random.Random(7)
    freed, num_heard = [], 0
    for _ in range(WAVES):
        bodies = [
            {"prompt": [rng.randrange(1_000, 20_000)] * rng.randint(1, 60), "max_tokens": 400, "ignore_eos": True,
             "stream": number % 2 == 0, "n": rng.choice([1, 1, 1, 2])}
            for number in range(WAVE)
        ]  # fmt: skip
        cut = asyncio.run(cut_wave(server.port, list(bodies), rng, 2.0))
        server.wait(server.is_idle)
        freed.append(time.monotonic() - cut.last_at)
        num_heard += cut.num_heard
    note(cut=WAVES * WAVE, heard_something=num_heard, blocks_free_after_max_s=max(freed), every_wave_s=freed)
    assert max(freed) <= 1.0
    assert server.requests() == {}
    answer = server.post("/v1/completions", {"prompt": "The sky is", "max_tokens": 4, "temperature": 0})
    assert answer.status_code == 200
