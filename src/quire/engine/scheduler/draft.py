"""A step plan while it is being decided."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quire.engine.decoding.group import Sequence
from quire.engine.kvcache.table import BlockTable
from quire.types.step import NO_ROWS, BlockCopy, Chunk, Ints, NewRow, StepPlan


class PlanDraft:
    """Collects what changes in one step. A row that is dropped takes all it was promised out of the draft again."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens that may still be handed out
        self._chunks: list[Chunk] = []
        self._new_rows: list[NewRow] = []
        self._grants: list[tuple[int, int, int]] = []  # row, slot, block
        self._copies: list[tuple[int, BlockCopy]] = []  # row, copy

    @property
    def is_idle(self) -> bool:
        return not self._chunks

    def add_row(self, sequence: Sequence) -> None:
        """Tell the workers of a seated sequence: all it knows, and the blocks it holds."""
        group, row = sequence.group, sequence.row
        assert row is not None
        sequence.introduced = True
        tokens = np.array((*group.request.prompt_token_ids, *sequence.outputs), dtype=np.int32)
        self._new_rows.append(
            NewRow(
                row=row,
                token_ids=tokens,
                num_prompt_tokens=group.num_prompt,
                block_ids=tuple(sequence.table.blocks),
                sampling=group.request.sampling,
                rules=group.request.rules,
                sample_index=sequence.index,
                seed=group.seed,
            )
        )

    def append(self, row: int, table: BlockTable, num_tokens: int) -> None:
        """Grow the row's table and note what the workers must learn of it. Raises OutOfBlocks and changes nothing."""
        before = len(table.blocks)
        copies = table.append(num_tokens)
        if copies:  # the tail was replaced by a copy of its own
            self._copies.append((row, copies[0]))
            self._grants.append((row, before - 1, copies[0].target))
        for slot in range(before, len(table.blocks)):
            self._grants.append((row, slot, table.blocks[slot]))

    def append_block(self, row: int, table: BlockTable) -> int:
        """Grow a table whose blocks are full by one block; returns how many it has now."""
        slot = len(table.blocks)
        self._grants.append((row, slot, table.append_block()))
        return slot + 1

    def compute(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self.budget -= chunk.num_tokens

    def drop(self, rows: Iterable[int]) -> dict[int, int]:
        """Returns, for rows of which this step was to compute or introduce something, how far they were before it."""
        gone = set(rows)
        before = {new.row: 0 for new in self._new_rows if new.row in gone}
        before |= {chunk.row: chunk.start for chunk in self._chunks if chunk.row in gone and chunk.row not in before}
        self._chunks = [chunk for chunk in self._chunks if chunk.row not in gone]
        self._new_rows = [new for new in self._new_rows if new.row not in gone]
        self._grants = [grant for grant in self._grants if grant[0] not in gone]
        self._copies = [(row, copy) for row, copy in self._copies if row not in gone]
        return before

    def finish(self, step: int, decode_rows: Ints, released: tuple[int, ...]) -> StepPlan:
        rows = slots = blocks = NO_ROWS
        if self._grants:
            rows, slots, blocks = np.array(self._grants, dtype=np.int32).T
        return StepPlan(
            step=step,
            decode_rows=decode_rows,
            chunks=tuple(self._chunks),
            new_rows=tuple(self._new_rows),
            grant_rows=rows,
            grant_slots=slots,
            grant_blocks=blocks,
            copies=tuple(copy for _, copy in self._copies),
            released=released,
        )
