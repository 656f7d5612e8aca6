"""An executor without a model: it keeps a paged memory of token ids, and proves at every step that each row reads back
exactly its own history through its block table. The next token is a hash of what was read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.types.step import NewRow, RowFailure, StepPlan, StepResult

VOCAB = 97
EMPTY = -1


def next_token(history: Sequence[int], seed: int, index: int) -> int:
    """What the pretend model says after `history`. Sample index and seed matter, as they would when sampling."""
    value = seed % 1_000_003 + 31 * index
    for token in history:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
    return value % VOCAB


def continuation(
    prompt: Sequence[int], length: int, *, seed: int = 0, index: int = 0, end_ids: Sequence[int] = ()
) -> list[int]:
    """The answer any correct engine must give."""
    history, start = list(prompt), len(prompt)
    while len(history) - start < length:
        history.append(next_token(history, seed, index))
        if history[-1] in end_ids:
            break
    return history[start:]


@dataclass
class FakeRow:
    new: NewRow
    tokens: list[int]
    blocks: list[int]


@dataclass
class FakeExecutor:
    """Obeys plans in order. `depth` results may wait uncollected; `fail_rows` raises a row's own error once."""

    num_blocks: int
    block_size: int
    depth: int = 1
    poison: set[int] = field(default_factory=set)  # prompts beginning with these tokens fail, alone
    crash_at: int | None = None

    def __post_init__(self) -> None:
        self.memory = np.full((self.num_blocks, self.block_size), EMPTY, dtype=np.int64)
        self.rows: dict[int, FakeRow] = {}
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.closed = False

    def launch(self, plan: StepPlan) -> None:
        assert len(self.results) < self.depth
        if self.crash_at is not None and plan.step >= self.crash_at:
            raise RuntimeError("device lost")
        self.plans.append(plan)
        for row in plan.released:
            self.rows.pop(row, None)
        for new in plan.new_rows:
            assert new.row not in self.rows, "a seated row was given away"
            self.rows[new.row] = FakeRow(new, new.token_ids.tolist(), list(new.block_ids))
        self._grant(plan)
        for copy in plan.copies:
            self.memory[copy.target] = self.memory[copy.source]
        self.results.append(self._forward(plan))

    def collect(self) -> StepResult:
        return self.results.popleft()

    def close(self) -> None:
        self.closed = True

    def _grant(self, plan: StepPlan) -> None:
        for row, slot, block in zip(plan.grant_rows, plan.grant_slots, plan.grant_blocks, strict=True):
            blocks = self.rows[int(row)].blocks
            assert slot <= len(blocks)
            blocks[slot : slot + 1] = [int(block)]

    def _forward(self, plan: StepPlan) -> StepResult:
        assert len(set(plan.decode_rows.tolist())) == len(plan.decode_rows)
        for chunk in plan.chunks:
            row = self.rows[chunk.row]
            assert self._read(row, chunk.start) == row.tokens[: chunk.start], "a chunk begins before what it builds on"
        for number in plan.decode_rows.tolist():
            self._write(number, len(self.rows[number].tokens) - 1, 1)
        for chunk in plan.chunks:
            self._write(chunk.row, chunk.start, chunk.num_tokens)
        reads = [(row, len(self.rows[row].tokens)) for row in plan.decode_rows.tolist()]
        reads += [(row, chunk.start + chunk.num_tokens) for chunk in plan.chunks for row in chunk.sample_rows]
        sampled, failures = [], []
        for number, length in reads:
            row = self.rows[number]
            assert length == len(row.tokens), "a row samples before all its tokens are computed"
            history = self._read(row, length)
            assert history == row.tokens, f"row {number} read another sequence's memory"
            sampled.append(next_token(history, row.new.seed, row.new.sample_index))
            if row.tokens[0] in self.poison:
                failures.append(RowFailure(number, "poisoned"))
        for (number, _), token in zip(reads, sampled, strict=True):
            self.rows[number].tokens.append(token)
        return StepResult(plan.step, np.array(sampled, dtype=np.int32), failures=tuple(failures))

    def _write(self, number: int, start: int, count: int) -> None:
        row = self.rows[number]
        for position in range(start, start + count):
            self.memory[row.blocks[position // self.block_size], position % self.block_size] = row.tokens[position]

    def _read(self, row: FakeRow, length: int) -> list[int]:
        whole = self.memory[row.blocks].reshape(-1)
        return whole[:length].tolist()
