"""64 streams with random cuts, for ten minutes or for QUIRE_SOAK_SECONDS."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from cut_streams import make_bodies, run_cut_streams
from tests.soak.conftest import Note, Start

pytestmark = [pytest.mark.soak, pytest.mark.model]
SECONDS = float(os.environ.get("QUIRE_SOAK_SECONDS", "600"))
STREAMS = 64
SIZES = ("--max-num-seqs", "32", "--max-num-batched-tokens", "128", "--kv-cache-memory", "32MiB", "--max-model-len",
         "512")  # fmt: skip


def test_64_streams_with_random_cuts_see_no_server_error_and_no_other_text(start_default: Start, note: Note) -> None:
    """Half of the streams wait in the queue."""
    server = start_default(*SIZES)
    bodies = make_bodies(random.Random(3), 60)
    run = asyncio.run(run_cut_streams(server.url, bodies, STREAMS, SECONDS, seed=5))
    server.wait(server.is_idle)
    note(
        seconds=SECONDS,
        statuses=dict(run.statuses),
        cut=run.num_cut,
        whole=run.num_whole,
        failures=len(run.failures),
        preemptions=server.stats()["preemptions"],
    )
    assert run.failures == []
    assert run.server_errors == {}
    assert set(run.statuses) == {200}
    assert run.num_cut > 0
    assert run.num_whole > 0
