"""Steps with more samples than one round holds are sampled in several rounds."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.config import engine as engine_settings
from quire.config.model import Heads
from quire.runtime.worker.runner import _in_rounds
from tiny_models import random_checkpoint, tiny_config
from worker_executor import TinyEngine, similar_checkpoint

PROMPTS = ([5, 9, 2, 11, 7, 3, 8, 1], [4, 4, 17], [60, 2, 2, 9, 9, 31, 7])
DRAFTS = {"method": "draft_model", "model": "similar", "num_speculative_tokens": 3}


@pytest.mark.parametrize("seed", range(50))
def test_rounds_hold_all_samples_in_order_and_split_no_row_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    counts, most = [rng.randint(1, 6) for _ in range(rng.randint(1, 8))], rng.randint(1, 9)
    rows = np.repeat(np.array(rng.sample(range(100), len(counts)), dtype=np.int32), counts)
    samples = np.flatnonzero([rng.random() < 0.8 for _ in rows])  # without the samples of rows that failed
    rounds = list(_in_rounds(samples, rows, most))
    assert [int(sample) for some in rounds for sample in some] == samples.tolist()
    assert all(0 < len(some) <= most for some in rounds)
    for row, count in zip(*np.unique(rows[samples], return_counts=True), strict=True):
        assert count > most or sum(row in rows[some] for some in rounds) == 1


@pytest.mark.parametrize("tensor", [2, 3])
def test_logprobs_of_drafts_are_in_order_where_ranks_sample_in_rounds(
    tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows of up to four samples, and five samples a round."""
    monkeypatch.setattr(engine_settings, "MIN_SAMPLES", 5)
    checkpoint = random_checkpoint(tiny_config("llama", heads=Heads(4, 2, 8)))
    draft = similar_checkpoint(checkpoint, 0.05)
    logprobs = []
    for ranks in (1, tensor):
        engine = TinyEngine(checkpoint, DRAFTS, draft=draft, tensor=ranks, rows=3)
        engine.answers(PROMPTS, logprobs=2, max_tokens=16)
        assert any(len(plan.sample_rows) > 5 for plan in engine.executor.plans)
        entries: dict[int, list[list[int]]] = {}
        for handle, entry in engine.logprobs:
            entries.setdefault(handle, []).append(np.asarray(entry.token_ids).tolist())
        assert {handle: [line[0] for line in lines] for handle, lines in entries.items()} == engine.streams
        logprobs.append(entries)
        engine.executor.close()
    assert logprobs[1] == logprobs[0]
