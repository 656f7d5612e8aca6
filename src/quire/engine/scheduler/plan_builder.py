"""Collects the StepPlan of one step while the scheduler decides it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from struct import pack_into

import numpy as np

from quire.engine.decoding.group import Group, Sequence
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.table import BlockTable
from quire.types.adapters import AdapterPlacement
from quire.types.step import (
    NO_ROWS,
    Bits,
    BlockCopy,
    Chunk,
    DraftRequest,
    Ints,
    Masks,
    NewRow,
    RowTokens,
    StateMove,
    StepPlan,
)
from quire.types.transfer import SlotMove, Transfers

_INT32 = np.dtype(np.int32)
_make = tuple.__new__  # with all fields of a NamedTuple; takes a third of the time of its own constructor


class PlanBuilder:
    """Collects what one step computes and changes. `drop` removes everything that was planned for a row, when its group
    is preempted."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens that this step may still compute
        self.num_encoded = 0  # tokens of images that the workers encode in this step
        self.prompts: dict[Group, None] = {}  # groups that owe known tokens: if preempted, they are not admitted again
        self.paced_in_step: list[Sequence] = []  # paced sequences in this step, which may get draft tokens and masks
        self._paced: dict[int, int] = {}  # paced rows that compute one token -> its position
        self._chunks: dict[int, Chunk] = {}  # by row
        self._new_rows: dict[int, Sequence] = {}  # sequences whose rows the workers do not know yet, by row
        self._grants: tuple[list[int], list[int], list[int]] = [], [], []  # rows, slots and blocks
        self._copies: list[tuple[int, BlockCopy]] = []  # row, copy
        self._writes: list[tuple[int, int, tuple[int, ...]]] = []  # row, start, tokens
        self._states: list[StateMove] = []
        self._masks: dict[int, tuple[Bits, ...]] = {}  # by row, one mask for each of its samples
        self._draft_requests: list[DraftRequest] = []
        self._loads: dict[bytes, tuple[int, SlotMove]] = {}  # block that tables list, move; by content hash
        self._undone: dict[int, int] = {}  # targets of dropped copies -> their sources

    @property
    def loads(self) -> tuple[SlotMove, ...]:
        return tuple([move for _, move in self._loads.values()]) if self._loads else ()

    @property
    def computes_only_ahead(self) -> bool:
        """Whether the step, as planned so far, computes only rows that run ahead."""
        return not self._chunks and not self._paced and not self._new_rows

    @property
    def chunks(self) -> Iterable[Chunk]:
        return self._chunks.values()

    def introduce(self, sequence: Sequence) -> None:
        """Send the workers a new row: all known tokens of its sequence, and the blocks it has when the plan is
        complete."""
        group, row = sequence.group, sequence.row
        assert row is not None
        self.prompts[group] = None
        sequence.is_introduced, sequence.synced_blocks = True, None
        sequence.synced_tokens, sequence.num_encoded = group.num_prompt + len(sequence.outputs), 0
        self._new_rows[row] = sequence

    def introduces(self, row: int) -> bool:
        """Whether this plan sends the row to the workers as a new one."""
        return row in self._new_rows

    def fork(self, group: Group) -> None:
        """Fork the leader, whose prompt is planned, for every other sequence of its group: they share its blocks."""
        leader = group.leader
        for sequence in group.live[1:]:
            sequence.table = leader.table.fork()
            sequence.num_computed = leader.num_computed
            self.introduce(sequence)
        group.is_forked = True

    def sync_blocks(self, sequence: Sequence) -> None:
        """Send the workers the blocks of a sequence that they do not know yet."""
        first = sequence.synced_blocks
        if first is not None:
            assert sequence.row is not None
            self._grant(sequence.row, first, sequence.table.blocks[first:])
            sequence.synced_blocks = None

    def append(self, row: int, table: BlockTable, num_tokens: int) -> None:
        """Make room for more tokens in a row's table, and send its new blocks and copies to the workers. Raises
        OutOfBlocks and changes nothing."""
        slot = len(table.blocks)
        if copies := table.append(num_tokens):  # the shared last block was replaced by a copy
            self._copies += [(row, copy) for copy in copies]
            slot -= 1
        if row not in self._new_rows and (fresh := table.blocks[slot:]):
            self._grant(row, slot, fresh)

    def _grant(self, row: int, slot: int, blocks: list[int]) -> None:
        """Send the blocks of a row's table from `slot` on to the workers."""
        rows, slots, granted = self._grants
        rows += [row] * len(blocks)
        slots += range(slot, slot + len(blocks))
        granted += blocks

    def move_state(self, row: int, moves: list[tuple[int, int, int]]) -> None:
        """Send the workers the slots to which the state of a row is written, as (position, slot, source)."""
        self._states += [StateMove(row, *move) for move in moves]

    def grant(self, rows: Iterable[int], slots: list[int], blocks: list[int]) -> None:
        """Send the workers one new block for each of these rows: blocks[i] is entry slots[i] of the row's table."""
        self._grants[0].extend(rows)
        self._grants[1].extend(slots)
        self._grants[2].extend(blocks)

    def copy(self, row: int, copy: BlockCopy) -> None:
        """Copy a block into the target block of a row that this plan introduces."""
        self._copies.append((row, copy))

    def compute(self, row: int, start: int, num_tokens: int, sample_rows: tuple[int, ...]) -> None:
        """Compute a chunk of known tokens."""
        self._chunks[row] = _make(Chunk, (row, start, num_tokens, sample_rows, 1))
        self.budget -= num_tokens

    def compute_one(self, row: int, position: int) -> None:
        """Compute one token of a paced row as a decode row."""
        self._paced[row] = position
        self.budget -= 1

    def samples_alone(self, row: int) -> bool:
        """Whether a row is the only one that samples from the positions that this step computes for it."""
        return row in self._paced or (row in self._chunks and self._chunks[row].sample_rows == (row,))

    def verify(self, sequence: Sequence, draft: tuple[int, ...]) -> None:
        """Add draft tokens to verify after the tokens that the step computes for a paced row."""
        row = sequence.row
        assert row is not None
        position, count = self._paced.pop(row, None), len(draft)
        if position is not None:
            self._chunks[row] = Chunk(row, position, 1 + count, (row,), 1 + count)
        else:
            chunk = self._chunks[row]
            self._chunks[row] = Chunk(row, chunk.start, chunk.num_tokens + count, chunk.sample_rows, 1 + count)
        self.budget -= count
        self._writes.append((row, sequence.num_tokens, draft))

    def write(self, sequence: Sequence) -> None:
        """Send the workers the tokens of a sequence that its row does not hold yet."""
        assert sequence.row is not None
        start, stop = sequence.synced_tokens, sequence.num_tokens
        if start < stop:
            self._writes.append((sequence.row, start, sequence.token_ids(start, stop)))
            sequence.synced_tokens = stop

    def mask(self, row: int, masks: tuple[Bits, ...]) -> None:
        """Set the masks of allowed tokens for a row's samples."""
        if masks:
            self._masks[row] = masks

    def request_draft(self, row: int, num_tokens: int) -> None:
        """Request that the runtime drafts tokens for a row after the step."""
        self._draft_requests.append(DraftRequest(row, num_tokens))

    def load(self, key: bytes, block: int, move: SlotMove) -> None:
        """Load a block that tables list, or a side block of it, from host memory. Only the next step may read it."""
        self._loads[key] = block, move

    def load_target(self, key: bytes) -> int | None:
        """Return the block for which this plan loads the content with this hash, or None."""
        load = self._loads.get(key)
        return None if load is None else load[0]

    def copies_from(self, block: int) -> bool:
        """Whether this step copies from a block. Its holder may have released it since."""
        return any(copy.source == block for _, copy in self._copies)

    @property
    def num_copied(self) -> int:
        """How many blocks this step copies."""
        return len(self._copies)

    def drop_loads(self, pool: BlockPool) -> None:
        """Remove the loads into blocks that no table holds any more."""
        if self._loads:
            held = pool.held_among(move.block for move in self.loads)
            self._loads = {key: load for key, load in self._loads.items() if load[1].block in held}

    def source_of(self, block: int) -> int:
        """Return the block that holds the content of `block`: another one if the copy into `block` was dropped."""
        while block in self._undone:
            block = self._undone[block]
        return block

    def start_of(self, row: int) -> int | None:
        """Return the first position that this step computes for a row; None for rows that run ahead or compute
        nothing."""
        chunk = self._chunks.get(row)
        return self._paced.get(row) if chunk is None else chunk.start

    def drop(self, rows: Iterable[int]) -> dict[int, int]:
        """Remove rows from the plan. Returns how many tokens each row had computed before, for rows that this plan
        computes or introduces."""
        dropped = set(rows)
        self.paced_in_step = [sequence for sequence in self.paced_in_step if sequence.row not in dropped]
        before = {row: self._paced.pop(row) for row in dropped if row in self._paced}
        before |= {row: self._chunks.pop(row).start for row in dropped if row in self._chunks}
        before |= {row: 0 for row in dropped if self._new_rows.pop(row, None) is not None}
        kept = [grant for grant in zip(*self._grants, strict=True) if grant[0] not in dropped]
        self._grants = [row for row, _, _ in kept], [slot for _, slot, _ in kept], [block for _, _, block in kept]
        self._undone |= {copy.target: copy.source for row, copy in self._copies if row in dropped}
        self._copies = [(row, copy) for row, copy in self._copies if row not in dropped]
        self._writes = [write for write in self._writes if write[0] not in dropped]
        self._masks = {row: masks for row, masks in self._masks.items() if row not in dropped}
        self._draft_requests = [each for each in self._draft_requests if each.row not in dropped]
        self._states = [move for move in self._states if move.row not in dropped]
        return before

    # -------------------------------------------------------------------------------------------------- finishing
    def finish(
        self,
        step: int,
        ahead_rows: Ints,
        released: tuple[int, ...],
        transfers: Transfers,
        adapters: tuple[AdapterPlacement, ...],
        pool: BlockPool,
        *,
        is_guided: bool,
    ) -> tuple[StepPlan, Masks | None]:
        """Return the plan, and the masks that are known already. A guided plan gets all its masks later, including
        these. Blocks belong to `pool`."""
        windows = pool.take_assigned()
        if pool.names_memory:
            self._name_memory(pool)
        rows = slots = blocks = decode_rows = NO_ROWS
        if self._grants[0]:
            numbers = [*self._grants[0], *self._grants[1], *self._grants[2]]
            packed = bytearray(4 * len(numbers))  # writable, because torch refuses read-only arrays
            pack_into(f"{len(numbers)}i", packed, 0, *numbers)  # faster than numpy with a list
            rows, slots, blocks = np.frombuffer(packed, np.int32).reshape(3, -1)
        decode_rows = ahead_rows
        if self._paced:
            decode_rows = np.concatenate([ahead_rows, np.fromiter(self._paced, dtype=np.int32)])
        chunks = tuple(self._chunks.values())
        masks = self._place_masks(len(ahead_rows)) if self._masks else None
        plan = StepPlan(
            step=step,
            decode_rows=decode_rows,
            chunks=chunks,
            new_rows=tuple([_new_row(sequence, pool) for sequence in self._new_rows.values()]),
            grant_rows=rows,
            grant_slots=slots,
            grant_blocks=blocks,
            window_owners=np.fromiter(windows, dtype=np.int32) if windows else NO_ROWS,
            window_blocks=np.fromiter(chain.from_iterable(windows.values()), np.int32) if windows else NO_ROWS,
            adapters=adapters,
            states=tuple(self._states),
            copies=tuple([copy for _, copy in self._copies]) if self._copies else (),
            released=released,
            writes=self._row_tokens() if self._writes else (),
            masks=None if is_guided else masks,
            drafts=tuple(self._draft_requests),
            transfers=transfers,
            guided=is_guided,
        )
        return plan, masks

    def _name_memory(self, pool: BlockPool) -> None:
        """Replace granted blocks by their memory."""
        self._grants[2][:] = _memory_of(self._grants[2], pool)

    def _row_tokens(self) -> tuple[RowTokens, ...]:
        """Join the writes of each row to one RowTokens. All are slices of one array."""
        joined: dict[int, tuple[int, tuple[int, ...]]] = {}
        for row, start, written in self._writes:  # a draft follows the tokens that its row did not hold yet
            begun = joined.get(row)
            joined[row] = (start, written) if begun is None else (begun[0], (*begun[1], *written))
        tokens = np.array([token for _, written in joined.values() for token in written], dtype=np.int32)
        writes, place = [], 0
        for row, (start, written) in joined.items():
            writes.append(RowTokens(row, start, tokens[place : place + len(written)]))
            place += len(written)
        return tuple(writes)

    def _place_masks(self, num_ahead: int) -> Masks:
        """Return the masks of paced rows with the indices of their samples in the step."""
        places: list[int] = []
        bits: list[Bits] = []
        place = num_ahead
        samples = [(row, 1) for row in self._paced]
        samples += [(row, chunk.num_sampled) for chunk in self._chunks.values() for row in chunk.sample_rows]
        for row, count in samples:
            masks = self._masks.get(row, ())
            places += range(place, place + len(masks))
            bits += masks
            place += count
        return Masks(np.array(places, dtype=np.int32), np.stack(bits))


def _new_row(sequence: Sequence, pool: BlockPool) -> NewRow:
    """Return the NewRow for a row that the workers do not know yet."""
    group, outputs, blocks = sequence.group, sequence.outputs, sequence.table.blocks
    request = group.request
    tokens = np.frombuffer(request.prompt_token_ids, _INT32)
    if outputs:
        tokens = np.concatenate([tokens, np.array(outputs, dtype=np.int32)])
    fields = (
        sequence.row,
        tokens,
        group.num_prompt,
        tuple(_memory_of(blocks, pool) if pool.names_memory else blocks),
        group.sampling,
        request.rules,
        sequence.index,
        group.seed,
        0 if group.search is None else group.num_candidates,
        request.images,
        request.pooling,
        group.slot,
    )
    return _make(NewRow, fields)


def _memory_of(blocks: list[int], pool: BlockPool) -> list[int]:
    """Return the memory of blocks. A block without memory is never read, so it becomes 0."""
    return [pool.memory_of(block) or 0 for block in blocks]
