"""The indices of a plan's tokens and samples in its batch, compared with a simple loop over the chunks."""

from __future__ import annotations

import numpy as np
import pytest

from quire.runtime.worker.batch import Longs, find_samples, find_spans, find_tokens
from quire.types.step import Chunk, StepPlan

ROWS = 40


def random_plan(rng: np.random.Generator) -> tuple[StepPlan, Longs]:
    """Decodes, prompts, forks, drafts and chunks that sample nothing, in any number; and how long each row is."""
    rows = rng.permutation(ROWS).tolist()
    decodes = [rows.pop() for _ in range(rng.integers(0, 8))]
    lengths, chunks = rng.integers(1, 50, ROWS), []
    for _ in range(rng.integers(0 if decodes else 1, 8)):
        row, num_tokens = rows.pop(), int(rng.integers(1, 9))
        start, kind = int(rng.integers(0, 20)), rng.integers(0, 4)
        lengths[row] = start + num_tokens
        if kind == 0:
            chunks.append(Chunk(row, start, num_tokens))
        elif kind == 1:
            forks = [rows.pop() for _ in range(rng.integers(0, 3))]
            lengths[forks] = lengths[row]
            chunks.append(Chunk(row, start, num_tokens, (row, *forks)))
        else:
            num_sampled = int(rng.integers(1, num_tokens + 1)) if kind == 2 else 1
            chunks.append(Chunk(row, start, num_tokens, (row,), num_sampled))
    return StepPlan(0, np.array(decodes, dtype=np.int32), tuple(chunks)), lengths


@pytest.mark.parametrize("seed", range(40))
def test_tokens_and_samples_of_any_plan_are_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan, lengths = random_plan(rng)
    order = rng.permutation(len(plan.decode_rows))
    decodes = plan.decode_rows[order].astype(np.int64)
    tokens = [(row, lengths[row] - 1) for row in decodes.tolist()]
    spans, samples, wanted, spread, grown = [], [], [], [], []
    for place, row in enumerate(plan.decode_rows.tolist()):
        wanted.append(int(np.flatnonzero(order == place)[0]))
        spread.append(len(wanted) - 1)
        grown.append(len(samples))
        samples.append((row, lengths[row]))
    for chunk in plan.chunks:
        spans.append((len(tokens), chunk.start, chunk.num_tokens, chunk.row))
        tokens += [(chunk.row, position) for position in range(chunk.start, chunk.start + chunk.num_tokens)]
        if not chunk.sample_rows:
            continue
        for back in range(chunk.num_sampled - 1, -1, -1):
            wanted.append(len(tokens) - 1 - back)
            for row in chunk.sample_rows:
                spread.append(len(wanted) - 1)
                if chunk.num_sampled == 1:
                    grown.append(len(samples))
                samples.append((row, lengths[row] - back))

    lying = find_spans(plan)
    token_rows, positions = find_tokens(decodes, lengths, lying)
    assert list(zip(token_rows.tolist(), positions.tolist(), strict=True)) == tokens
    assert lying.tolist() == [list(span) for span in spans]
    found = find_samples(plan, order, lengths, lying)
    assert list(zip(found.rows.tolist(), found.lengths.tolist(), strict=True)) == samples
    assert found.wanted.tolist() == wanted
    assert found.spread.tolist() == (spread if len(spread) > len(wanted) else [])
    assert found.verifies == (len(grown) < len(samples))
    assert found.grown.tolist() == (grown if found.verifies else [])
    for numbers in (token_rows, positions, *found[:5]):
        assert numbers.dtype == np.int64
