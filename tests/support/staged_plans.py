"""Plans of two micro-batches for a tiny model, whose steps differ in size."""

from __future__ import annotations

import numpy as np

from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Chunk, NewRow, StepPlan
from tiny_models import engine_config, random_checkpoint, tiny_config

CHECKPOINT = random_checkpoint(tiny_config(num_layers=4))
CONFIG = engine_config(rows=4, block_size=64, num_blocks=8)


def new_row(row: int, tokens: list[int]) -> NewRow:
    ids = np.array(tokens, dtype=np.int32)
    return NewRow(row, ids, len(tokens), (row,), SamplingParams(temperature=0.0), TokenRules(), 0, 0)


def prompt_plan(step: int, *rows: int, released: tuple[int, ...] = (), length: int = 3) -> StepPlan:
    tokens = [(5 + 3 * place * (step + 1)) % 90 + 3 for place in range(length)]
    chunks = tuple(Chunk(row, 0, length, (row,)) for row in rows)
    return StepPlan(step, chunks=chunks, new_rows=tuple(new_row(row, tokens) for row in rows), released=released)


def decode_plan(step: int, *rows: int) -> StepPlan:
    return StepPlan(step, decode_rows=np.array(rows, dtype=np.int32))


PLANS = [
    prompt_plan(0, 0, length=40),
    prompt_plan(1, 1, 2),
    *[decode_plan(step, *((0,) if step % 2 == 0 else (1, 2))) for step in range(2, 16)],
]
