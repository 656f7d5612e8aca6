"""An executor without a model: it keeps a paged memory of token ids, and proves at every step that each row reads back
exactly its own history through its block table. The next token is a hash of what was read."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fake_tiers import FakeTiers
from quire.config.kv_cache import PLAIN, KVGroups
from quire.types.adapters import NO_ADAPTER, AdapterInfo
from quire.types.errors import InvalidRequest
from quire.types.step import (
    Candidates,
    Masks,
    NewRow,
    RowDraft,
    RowFailure,
    RowLogprobs,
    StateMove,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from quire.types.transfer import TransferReport
from toy_model import VOCAB, all_logprobs, continuation, next_token

__all__ = ["VOCAB", "FakeExecutor", "continuation", "next_token"]

EMPTY = -1
GUESSED = -2  # what a drafter leaves in the memory ahead of its row


@dataclass
class FakeRow:
    new: NewRow
    tokens: list[int]
    blocks: list[int]
    mark: int = 0  # added to every token that the row writes: who reads it by another mark finds other tokens
    fails: bool = False  # every step that computes it reports an error of its own


@dataclass(frozen=True)
class FakeSpan:
    """Tokens of a row that a step computes."""

    number: int
    row: FakeRow
    start: int
    count: int

    @property
    def history(self) -> list[int]:
        return [token + self.row.mark for token in self.row.tokens]


@dataclass
class FakeAdapters:
    """The adapters of the pretend model: folders that `contents` has, by their digests. `slots` is what plans have put
    into the device's slots; a row adds the number of its adapter to every token that it writes."""

    contents: dict[str, str] = field(default_factory=dict)  # folder -> digest
    held: set[str] = field(default_factory=set)  # known
    capacity: int = 0  # how many of them host memory has room for; 0: all
    recent: dict[str, None] = field(default_factory=dict)  # those in host memory, the last used last
    num_read_in_steps: int = 0
    slots: dict[int, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)  # digests that cannot be put into a slot
    num_placed: int = 0
    on_read: Callable[[], object] = field(default=lambda: None)

    def read(self, name: str, folder: str) -> AdapterInfo:
        self.on_read()
        if folder not in self.contents:
            raise InvalidRequest("lora_path", f"{folder!r} has no adapter", "name another folder")
        digest = self.contents[folder]
        self.held.add(digest)
        self.use(digest)
        return AdapterInfo(name, digest, 8, 1_000, folder)

    def forget(self, digest: str) -> None:
        assert digest in self.held, "an adapter was forgotten that is not held"
        self.held.remove(digest)
        self.recent.pop(digest, None)
        self.slots = {slot: each for slot, each in self.slots.items() if each != digest}

    def use(self, digest: str) -> None:
        self.recent.pop(digest, None)
        self.recent[digest] = None
        while self.capacity and len(self.recent) > self.capacity:
            del self.recent[next(iter(self.recent))]

    def place(self, plan: StepPlan, rows: Iterable[FakeRow]) -> None:
        placed = [placement.slot for placement in plan.adapters]
        assert len(set(placed)) == len(placed), "a slot was given two adapters"
        used = {row.new.adapter for row in rows}
        for slot, digest in plan.adapters:
            assert slot not in used, "a slot was given away that a row uses"
            assert digest in self.held, "an adapter was placed that is not held"
            self.num_read_in_steps += digest not in self.recent
            self.use(digest)
            self.slots.pop(slot, None)
            if digest not in self.lost:
                self.slots[slot] = digest
            self.num_placed += 1

    def mark(self, slot: int) -> int:
        return 0 if slot == NO_ADAPTER else 1_000_003 * zlib.crc32(self.slots[slot].encode())

    def is_missing(self, slot: int) -> bool:
        return slot != NO_ADAPTER and slot not in self.slots


class FakeSides:
    """The side blocks of the same memory: window blocks hold tokens too, and a state is a digest of all tokens so far.
    Proves that every token finds its window, and every row the state it left."""

    def __init__(self, memory: npt.NDArray[np.int64], groups: KVGroups, num_blocks: int, block_size: int) -> None:
        self._memory, self._groups, self._num_blocks, self._size = memory, groups, num_blocks, block_size
        self._windows: dict[int, list[int]] = {}
        self._slots: dict[int, int] = {}  # row -> slot
        self.num_window_reads = self.num_checkpoints = 0

    def assign(self, plan: StepPlan) -> None:
        width = self._groups.num_window_blocks
        for place, block in enumerate(plan.window_owners.tolist()):
            self._windows[block] = plan.window_blocks[place * width : (place + 1) * width].tolist()
            assert len(self._windows[block]) == width
        for new in plan.new_rows:
            self._slots.pop(new.row, None)

    def compute(self, plan: StepPlan, spans: list[FakeSpan]) -> None:
        if self._groups.num_window_blocks:
            for span in spans:
                self._write_windows(span)
            for span in spans:
                self._check_windows(span)
        if self._groups.num_states:
            self._move(plan, spans)

    def _write_windows(self, span: FakeSpan) -> None:
        history = span.history
        for position in range(span.start, span.start + span.count):
            for place, block in enumerate(self._windows[span.row.blocks[position // self._size]]):
                self._memory[block, position % self._size] = history[position] + 7 * (place + 1)

    def _check_windows(self, span: FakeSpan) -> None:
        assert self._groups.window is not None
        history, first = span.history, max(span.start - self._groups.window + 1, 0)
        for position in range(first, span.start + span.count):
            windows = self._windows[span.row.blocks[position // self._size]]
            assert len(windows) == self._groups.num_window_blocks
            for place, block in enumerate(windows):
                found = self._memory[block, position % self._size]
                assert found == history[position] + 7 * (place + 1), f"row {span.number} lost token {position}"
                self.num_window_reads += 1

    def _move(self, plan: StepPlan, spans: list[FakeSpan]) -> None:
        """All rows read before any writes, as on a device."""
        moves: dict[int, list[StateMove]] = {}
        for move in plan.states:
            moves.setdefault(move.row, []).append(move)
        written: dict[int, npt.NDArray[np.int64]] = {}
        read: set[int] = set()
        for span in spans:
            own = moves.pop(span.number, [])
            places = [move.position for move in own]
            assert places == sorted(set(places))
            assert all(span.start <= place < span.start + span.count for place in places), "a move out of place"
            if own and own[0].position == span.start:
                _, _, slot, source = own.pop(0)
            else:
                source = slot = self._slots[span.number]
            if span.start:
                found = self._memory[self._blocks(source), 0]
                assert (found == self._digest(span.history[: span.start])).all(), f"row {span.number} lost its state"
                if source != slot:
                    read.add(source)
            for _, position, following, source in own:
                assert slot == source
                assert slot not in written, "two rows write to one slot"
                written[slot] = self._digest(span.history[:position])
                slot, self.num_checkpoints = following, self.num_checkpoints + 1
            assert slot not in written, "two rows write to one slot"
            written[slot] = self._digest(span.history[: span.start + span.count])
            self._slots[span.number] = slot
        for row, own in moves.items():  # its own code failed when the step was planned
            self._slots[row] = own[0].source
        assert not read & written.keys(), "a slot is read by one row and written by another"
        for slot, digest in written.items():
            self._memory[self._blocks(slot), 0] = digest

    def _blocks(self, slot: int) -> list[int]:
        first = self._num_blocks + slot * self._groups.blocks_per_state
        return list(range(first, first + self._groups.blocks_per_state))

    def _digest(self, tokens: list[int]) -> npt.NDArray[np.int64]:
        return hash(tuple(tokens)) // 8 + np.arange(self._groups.blocks_per_state)


@dataclass(frozen=True)
class Sample:
    """One sample of a step: what follows the first `length` tokens of a row."""

    row: int
    length: int
    verifies: bool = False  # several samples of one row: it does not grow by them


@dataclass
class FakeExecutor:
    """Obeys plans in order. `depth` results may wait uncollected; `poison` raises a row's own error."""

    num_blocks: int
    block_size: int
    depth: int = 1
    poison: set[int] = field(default_factory=set)  # prompts beginning with these tokens fail, alone
    crash_at: int | None = None
    wrong_drafts: int = 3  # one in so many tokens of a draft is wrong
    period: int = 0  # answers go on with what stands so many tokens before; 0: by the hash
    tiers: FakeTiers = field(default_factory=lambda: FakeTiers(0, 1))
    groups: KVGroups = PLAIN
    adapters: FakeAdapters = field(default_factory=FakeAdapters)

    def __post_init__(self) -> None:
        total = self.num_blocks + self.groups.num_states * self.groups.blocks_per_state
        self.memory = np.full((total, self.block_size), EMPTY, dtype=np.int64)
        self.sides = FakeSides(self.memory, self.groups, self.num_blocks, self.block_size)
        self.rows: dict[int, FakeRow] = {}
        self.results: deque[StepResult] = deque()
        self.owed: StepPlan | None = None  # the guided plan that waits for its masks
        self.masks: dict[int, list[npt.NDArray[np.uint32]]] = {}  # by row: the last supplied one, and a later plan's
        self.plans: list[StepPlan] = []
        self.marks: dict[int, int] = {}  # of rows that the next plans introduce
        self.expected: dict[int, str] = {}  # by row: the adapter that it must run with
        self.closed = False

    def launch(self, plan: StepPlan) -> None:
        assert self.owed is None, "a plan was launched while another one waits for its masks"
        assert len(self.results) < self.depth
        if self.crash_at is not None and plan.step >= self.crash_at:
            raise RuntimeError("device lost")
        self.plans.append(plan)
        self.tiers.begin(self.memory)
        for row in plan.released:
            self.rows.pop(row, None)
            self.masks.pop(row, None)
        self.adapters.place(plan, self.rows.values())
        self.sides.assign(plan)
        for new in plan.new_rows:
            assert new.row not in self.rows, "a seated row was given away"
            is_missing = self.adapters.is_missing(new.adapter)
            mark = self.marks.get(new.row, 0) + (0 if is_missing else self.adapters.mark(new.adapter))
            self.rows[new.row] = FakeRow(new, new.token_ids.tolist(), list(new.block_ids), mark, is_missing)
        self._write_rows(plan)
        self._grant(plan)
        self.tiers.submit(plan.transfers, self.memory)
        for copy in plan.copies:
            self.memory[copy.target] = self.memory[copy.source]
        self.tiers.spoil(plan.transfers, self.memory)
        self._compute(plan)
        if plan.guided:
            assert plan.masks is None, "a guided plan has masks"
            self.owed = plan
            return
        if plan.masks is not None:
            for row, bits in zip(plan.sample_rows[plan.masks.samples].tolist(), plan.masks.bits, strict=True):
                self.masks[row] = [*self.masks.get(row, [])[:1], bits.copy()]
        self.results.append(self._sample(plan, plan.masks))

    def supply_masks(self, masks: Masks | None) -> None:
        plan, self.owed = self.owed, None
        assert plan is not None, "masks were supplied for a plan that waits for none"
        if masks is not None:
            self._note_masks(plan, masks)
        self.results.append(self._sample(plan, masks))

    def collect(self) -> StepResult:
        assert self.results or self.owed is None, "a guided plan is collected before its masks were supplied"
        return self.results.popleft()

    def _note_masks(self, plan: StepPlan, masks: Masks) -> None:
        """Where a mask is said to be the row's last one, it is."""
        rows = plan.sample_rows[masks.samples].tolist()
        assert masks.changed is None or len(masks.changed) == len(rows)
        for place, row in enumerate(rows):
            if masks.changed is not None and not masks.changed[place]:
                assert row in self.masks, f"row {row} has had no mask yet, so this one is new"
                is_known = any((bits == masks.bits[place]).all() for bits in self.masks[row])
                assert is_known, f"the mask of row {row} did change"
            self.masks[row] = [masks.bits[place].copy()]

    def transfers(self) -> TransferReport:
        return self.tiers.report()

    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        return self.adapters.read(name, folder)

    def forget_adapter(self, digest: str) -> None:
        self.adapters.forget(digest)

    def close(self) -> None:
        self.closed = True

    def _write_rows(self, plan: StepPlan) -> None:
        assert len({write.row for write in plan.writes}) == len(plan.writes)
        for write in plan.writes:
            tokens = self.rows[write.row].tokens
            assert write.start <= len(tokens), "a write leaves a gap"
            assert len(write.token_ids) > 0
            tokens[write.start :] = write.token_ids.tolist()

    def _grant(self, plan: StepPlan) -> None:
        grants = set(zip(plan.grant_rows.tolist(), plan.grant_slots.tolist(), plan.grant_blocks.tolist(), strict=True))
        assert len({grant[:2] for grant in grants}) == len(grants), "a slot was given two blocks"
        for row, slot, block in zip(plan.grant_rows, plan.grant_slots, plan.grant_blocks, strict=True):
            blocks = self.rows[int(row)].blocks
            assert slot <= len(blocks)
            blocks[slot : slot + 1] = [int(block)]

    # ------------------------------------------------------------------------------------------------ the forward
    def _sample(self, plan: StepPlan, masks: Masks | None) -> StepResult:
        samples = self._samples(plan)
        assert [sample.row for sample in samples] == plan.sample_rows.tolist()
        allowed = _allowed(masks)
        tokens: list[int] = []
        logprobs, failures = [], []
        for place, sample in enumerate(samples):
            row = self.rows[sample.row]
            history = self._history(sample)
            if self.period:
                token = history[-self.period]
            else:
                token = next_token(history, row.new.seed, row.new.sample_index, allowed.get(place))
            tokens.append(token)
            if row.new.sampling.logprobs is not None:
                logprobs.append(RowLogprobs(sample.row, _entry(history, token)))
            if row.tokens[0] in self.poison:
                failures.append(RowFailure(sample.row, "poisoned"))
        computed = [*plan.decode_rows.tolist(), *[chunk.row for chunk in plan.chunks]]
        failures += [RowFailure(number, "spoiled") for number in computed if self.rows[number].fails]
        candidates = self._candidates(samples, allowed)
        for sample, token in zip(samples, tokens, strict=True):
            if not sample.verifies:
                self.rows[sample.row].tokens.append(token)
        drafts = self._draft(plan, samples, tokens)
        result = np.array(tokens, dtype=np.int32)
        return StepResult(plan.step, result, tuple(logprobs), (), tuple(failures), candidates, drafts)

    def _compute(self, plan: StepPlan) -> None:
        computed = plan.decode_rows.tolist() + [chunk.row for chunk in plan.chunks]
        assert len(set(computed)) == len(computed)
        for number in computed:
            row = self.rows[number]
            adapter = self.adapters.slots.get(row.new.adapter, "")
            assert row.fails or self.expected.get(number, adapter) == adapter, "a row ran with another's adapter"
        for chunk in plan.chunks:
            row = self.rows[chunk.row]
            seen = self._first_seen(chunk.start)
            found = self._read(row, seen, chunk.start)
            assert found == row.tokens[seen : chunk.start], "a chunk begins before what it builds on"
        spans = [(number, len(self.rows[number].tokens) - 1, 1) for number in plan.decode_rows.tolist()]
        spans += [(chunk.row, chunk.start, chunk.num_tokens) for chunk in plan.chunks]
        for span in spans:
            self._write(*span)
        self.sides.compute(plan, [FakeSpan(number, self.rows[number], *rest) for number, *rest in spans])

    def _samples(self, plan: StepPlan) -> list[Sample]:
        samples = [Sample(row, len(self.rows[row].tokens)) for row in plan.decode_rows.tolist()]
        for chunk in plan.chunks:
            end = chunk.start + chunk.num_tokens
            if chunk.num_sampled > 1:
                assert chunk.sample_rows == (chunk.row,)
                samples += [Sample(chunk.row, end - back, True) for back in range(chunk.num_sampled - 1, -1, -1)]
                assert end == len(self.rows[chunk.row].tokens)
            else:
                samples += [Sample(row, end) for row in chunk.sample_rows]
        return samples

    def _history(self, sample: Sample) -> list[int]:
        row = self.rows[sample.row]
        assert sample.verifies or sample.length == len(row.tokens), "a row samples before all its tokens are computed"
        seen = self._first_seen(sample.length - 1)
        found = self._read(row, seen, sample.length)
        assert found == row.tokens[seen : sample.length], f"row {sample.row} read another sequence's memory"
        return row.tokens[: sample.length]

    def _candidates(self, samples: list[Sample], allowed: dict[int, npt.NDArray[np.bool_]]) -> Candidates | None:
        found = [(place, self.rows[each.row].new.num_candidates) for place, each in enumerate(samples)]
        found = [(place, count) for place, count in found if count]
        if not found:
            return None
        width = max(count for _, count in found)
        scores = np.stack([self._scores(samples[place], allowed.get(place)) for place, _ in found])
        order = np.argsort(-scores, axis=1, kind="stable")[:, :width]
        places = np.array([place for place, _ in found], dtype=np.int32)
        return Candidates(places, order.astype(np.int32), np.take_along_axis(scores, order, axis=1))

    def _scores(self, sample: Sample, allowed: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.float32]:
        scores = all_logprobs(self.rows[sample.row].tokens[: sample.length])
        return scores if allowed is None else np.where(allowed, scores, np.float32(-np.inf))

    # ---------------------------------------------------------------------------------------------------- drafting
    def _draft(self, plan: StepPlan, samples: list[Sample], tokens: list[int]) -> tuple[RowDraft, ...]:
        """Guesses that are right more often than not; on the way, memory ahead of the row is written to."""
        drafts = []
        for order in plan.drafts:
            row = self.rows[order.row]
            own = [(s.length, token) for s, token in zip(samples, tokens, strict=True) if s.row == order.row]
            assert own, "nothing follows a row that sampled nothing"
            history = row.tokens[: own[0][0]]
            for length, token in own:
                history.append(token)
                if length < len(row.tokens) and row.tokens[length] != token:
                    break
            for position in range(len(history) - 1, len(history) - 1 + order.num_tokens):
                self.memory[row.blocks[position // self.block_size], position % self.block_size] = GUESSED
            guess = continuation(history, order.num_tokens, seed=row.new.seed, index=row.new.sample_index)
            wrong = [(token + ((sum(history) + place) % self.wrong_drafts == 0)) for place, token in enumerate(guess)]
            drafts.append(RowDraft(order.row, np.array(wrong, dtype=np.int32) % VOCAB))
        return tuple(drafts)

    def _write(self, number: int, start: int, count: int) -> None:
        row = self.rows[number]
        for position in range(start, start + count):
            place = row.blocks[position // self.block_size], position % self.block_size
            self.memory[place] = row.tokens[position] + row.mark

    def _first_seen(self, position: int) -> int:
        """The first token that the one at `position` sees in any layer."""
        window = self.groups.window
        return max(position - window + 1, 0) if self.groups.all_windows and window is not None else 0

    def _read(self, row: FakeRow, start: int, end: int) -> list[int]:
        whole = self.memory[row.blocks].reshape(-1)
        return (whole[start:end] - row.mark).tolist()


def _entry(history: list[int], token: int) -> TokenLogprobs:
    scores = all_logprobs(history)
    return TokenLogprobs(np.array([token], dtype=np.int32), scores[[token]], int((scores > scores[token]).sum()) + 1)


def _allowed(masks: Masks | None) -> dict[int, npt.NDArray[np.bool_]]:
    """Which tokens each masked sample may choose: [VOCAB], by its place."""
    if masks is None:
        return {}
    octets = np.ascontiguousarray(masks.bits).view(np.uint8)
    bits = np.unpackbits(octets, axis=1, bitorder="little")[:, :VOCAB].astype(bool)
    assert bits.any(axis=1).all()
    assert len(set(masks.samples.tolist())) == len(masks.samples)
    return dict(zip(masks.samples.tolist(), bits, strict=True))
