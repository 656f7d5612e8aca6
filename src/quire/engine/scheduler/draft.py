"""A step plan while it is being decided."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quire.engine.decoding.group import Group, Sequence
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.table import BlockTable
from quire.types.step import NO_ROWS, Bits, BlockCopy, Chunk, DraftOrder, Ints, Masks, NewRow, RowTokens, StepPlan
from quire.types.transfer import SlotMove, Transfers


class PlanDraft:
    """Collects what changes in one step. A row that is dropped takes all it was promised out of the draft again."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens that may still be handed out
        self.prompts: dict[Group, None] = {}  # groups whose known tokens this step computes, or a later one
        self._paced: dict[int, int] = {}  # rows that compute one token and wait for what follows -> its position
        self._chunks: list[Chunk] = []
        self._new_rows: list[NewRow] = []
        self._grants: list[tuple[int, int, int]] = []  # row, slot, block
        self._copies: list[tuple[int, BlockCopy]] = []  # row, copy
        self._writes: list[tuple[int, int, tuple[int, ...]]] = []  # row, start, tokens
        self._masks: dict[int, tuple[Bits, ...]] = {}  # by row: one for each of its samples
        self._orders: list[DraftOrder] = []
        self._loads: dict[bytes, SlotMove] = {}  # by the block's name
        self._undone: dict[int, int] = {}  # targets of copies that were dropped -> their sources

    @property
    def loads(self) -> tuple[SlotMove, ...]:
        return tuple(self._loads.values())

    @property
    def is_idle(self) -> bool:
        return not self._chunks and not self._paced and not self._new_rows

    def add_row(self, sequence: Sequence) -> None:
        """Tell the workers of a seated sequence: all it knows, and the blocks it holds."""
        group, row = sequence.group, sequence.row
        assert row is not None
        self.prompts[group] = None
        sequence.introduced, sequence.right, sequence.told = True, sequence.num_known, None
        tokens = np.array((*group.request.prompt_token_ids, *sequence.outputs), dtype=np.int32)
        self._new_rows.append(
            NewRow(
                row=row,
                token_ids=tokens,
                num_prompt_tokens=group.num_prompt,
                block_ids=tuple(sequence.table.blocks),
                sampling=group.sampling,
                rules=group.request.rules,
                sample_index=sequence.index,
                seed=group.seed,
                num_candidates=group.num_candidates,
            )
        )

    def fork(self, group: Group) -> None:
        """The prompt is computed: every other sequence of the group shares the leader's blocks."""
        leader = group.leader
        for sequence in group.live[1:]:
            sequence.table = leader.table.fork()
            sequence.computed = leader.computed
            self.add_row(sequence)
        group.forked = True

    def tell(self, sequence: Sequence) -> None:
        """Tell the workers which blocks the sequence holds now, as far as they do not know."""
        if sequence.told is not None:
            assert sequence.row is not None
            for slot, block in enumerate(sequence.table.blocks[sequence.told :], sequence.told):
                self._grants.append((sequence.row, slot, block))
            sequence.told = None

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

    def compute_one(self, row: int, position: int) -> None:
        """A paced row's one token, as a decode."""
        self._paced[row] = position
        self.budget -= 1

    def write(self, sequence: Sequence, draft: tuple[int, ...] = ()) -> None:
        """Set right what the sequence's row holds, and what it is guessed to hold next."""
        assert sequence.row is not None
        start, stop = sequence.right, sequence.num_known
        if start < stop or draft:
            self._writes.append((sequence.row, start, (*sequence.known(start, stop), *draft)))
            sequence.right = stop

    def mask(self, row: int, masks: tuple[Bits, ...]) -> None:
        """Which tokens each of the row's samples may choose."""
        if masks:
            self._masks[row] = masks

    def order(self, row: int, num_tokens: int) -> None:
        """Let the runtime guess what follows the row."""
        self._orders.append(DraftOrder(row, num_tokens))

    def load(self, name: bytes, move: SlotMove) -> None:
        """Bring a block from host memory; only the next step may read it."""
        self._loads[name] = move

    def loading(self, name: bytes) -> int | None:
        """The block that is loaded with the content of this name."""
        move = self._loads.get(name)
        return None if move is None else move.block

    def copies_from(self, block: int) -> bool:
        """Whether this step copies a block that somebody gave back."""
        return any(copy.source == block for _, copy in self._copies)

    def drop_loads(self, pool: BlockPool) -> None:
        """Load nothing into blocks that nobody holds any longer."""
        if self._loads:
            self._loads = {name: move for name, move in self._loads.items() if pool.holders(move.block)}

    def source_of(self, block: int) -> int:
        """Where the content is that a block would have had, if the copy of it was dropped."""
        while block in self._undone:
            block = self._undone[block]
        return block

    def start_of(self, row: int) -> int | None:
        """The first position of a row that this step computes, of those that do not run ahead."""
        return self._paced.get(row, next((chunk.start for chunk in self._chunks if chunk.row == row), None))

    def drop(self, rows: Iterable[int]) -> dict[int, int]:
        """Returns, for rows of which this step was to compute or introduce something, how far they were before it."""
        gone = set(rows)
        before = {row: self._paced.pop(row) for row in gone if row in self._paced}
        before |= {chunk.row: chunk.start for chunk in self._chunks if chunk.row in gone}
        before |= {new.row: 0 for new in self._new_rows if new.row in gone}
        self._chunks = [chunk for chunk in self._chunks if chunk.row not in gone]
        self._new_rows = [new for new in self._new_rows if new.row not in gone]
        self._grants = [grant for grant in self._grants if grant[0] not in gone]
        self._undone |= {copy.target: copy.source for row, copy in self._copies if row in gone}
        self._copies = [(row, copy) for row, copy in self._copies if row not in gone]
        self._writes = [write for write in self._writes if write[0] not in gone]
        self._masks = {row: masks for row, masks in self._masks.items() if row not in gone}
        self._orders = [order for order in self._orders if order.row not in gone]
        return before

    def finish(self, step: int, decode_rows: Ints, released: tuple[int, ...], transfers: Transfers) -> StepPlan:
        """The plan; `decode_rows` are those that run ahead."""
        rows = slots = blocks = NO_ROWS
        if self._grants:
            rows, slots, blocks = np.array(self._grants, dtype=np.int32).T
        if self._paced:
            decode_rows = np.concatenate([decode_rows, np.array(list(self._paced), dtype=np.int32)])
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
            writes=self._row_tokens() if self._writes else (),
            masks=self._place_masks(len(decode_rows) - len(self._paced)) if self._masks else None,
            drafts=tuple(self._orders),
            transfers=transfers,
        )

    def _row_tokens(self) -> tuple[RowTokens, ...]:
        """All writes, as parts of one array."""
        tokens = np.array([token for _, _, written in self._writes for token in written], dtype=np.int32)
        writes, place = [], 0
        for row, start, written in self._writes:
            writes.append(RowTokens(row, start, tokens[place : place + len(written)]))
            place += len(written)
        return tuple(writes)

    def _place_masks(self, num_ahead: int) -> Masks:
        """The masks with the places of their samples: rows that run ahead have none."""
        places: list[int] = []
        bits: list[Bits] = []
        place = num_ahead
        samples = [(row, 1) for row in self._paced]
        samples += [(row, chunk.num_sampled) for chunk in self._chunks for row in chunk.sample_rows]
        for row, count in samples:
            masks = self._masks.get(row, ())
            places += range(place, place + len(masks))
            bits += masks
            place += count
        return Masks(np.array(places, dtype=np.int32), np.stack(bits))
