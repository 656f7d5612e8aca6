"""Paced sequences: those that wait for their own results before their next step is planned."""

from __future__ import annotations

from quire.engine.decoding.group import Group, Sequence
from quire.engine.decoding.pace import Fault, fault_of
from quire.engine.kvcache.pool import BlockPool
from quire.engine.scheduler.draft import PlanDraft
from quire.engine.scheduler.rows import RowBook
from quire.types.step import Chunk


class PacedSet:
    """Knows which sequences are due, and which still have results to come from when they ran ahead."""

    def __init__(self, rows: RowBook, pool: BlockPool, block_size: int) -> None:
        self._rows, self._pool, self._block_size = rows, pool, block_size
        self.due: dict[Sequence, None] = {}  # they owe the token they were given last
        self.landing: dict[Sequence, None] = {}
        self.faults: list[tuple[Group, Fault]] = []

    def add(self, sequence: Sequence) -> None:
        """Its next step may be planned."""
        sequence.begun = sequence.paced = True
        self.due[sequence] = None

    def discard(self, sequence: Sequence) -> None:
        self.due.pop(sequence, None)
        self.landing.pop(sequence, None)
        sequence.paced, sequence.draft = False, ()

    def compute(self, draft: PlanDraft, sequence: Sequence) -> None:
        """Plan the token that a due sequence owes, for which budget was set aside, and what it is guessed to say."""
        row, start = sequence.row, sequence.num_known - 1
        assert row is not None
        del self.due[sequence]
        guess = self.guess(draft, sequence, draft.budget)
        draft.write(sequence, guess)
        sequence.computed = start + 1 + len(guess)
        draft.budget += 1
        if guess:
            draft.compute(Chunk(row, start, 1 + len(guess), (row,), 1 + len(guess)))
        else:
            draft.compute_one(row, start)

    def guess(self, draft: PlanDraft, sequence: Sequence, room: int) -> tuple[int, ...]:
        """What a sequence may say next, with blocks for it, but never at another's cost. Its masks are noted."""
        row, table, left = sequence.row, sequence.table, sequence.group.limit - 1 - sequence.num_known
        assert row is not None
        if sequence.group.search is not None:
            room = 0  # beams stay of one length
        free = table.capacity + self._pool.num_free * self._block_size - table.num_tokens
        try:
            proposal = sequence.pacer.propose(max(min(room, left), 0))
            guess = proposal.draft[:free]
            num_ordered = min(sequence.pacer.order(left - len(guess)), free - len(guess)) if room > 0 else 0
        except Exception as error:  # noqa: BLE001 - one request's fault must not become everyone's
            self.faults.append((sequence.group, fault_of(error)))
            return ()
        draft.mask(row, proposal.masks[: len(guess) + 1])
        if guess or num_ordered:
            draft.append(row, table, len(guess) + num_ordered)
        if num_ordered:
            draft.order(row, num_ordered)
        sequence.draft = guess
        return guess

    def take_faults(self) -> list[tuple[Group, Fault]]:
        """Groups whose own code failed while the last step was planned; they are to be ended."""
        faults, self.faults = self.faults, []
        return faults

    def grow(self, sequence: Sequence, tokens: tuple[int, ...], *, written: bool) -> None:
        """A sequence's last step came to these tokens. `written`: its row has the last of them already."""
        assert sequence.row is not None
        sequence.outputs.extend(tokens)
        self._rows.extend(sequence.row, tokens)
        sequence.computed = sequence.num_known - 1
        sequence.right = sequence.num_known - (not written)
        sequence.table.truncate(sequence.computed)
        sequence.draft = ()

    def landed(self) -> list[Sequence]:
        """Sequences that ran ahead and of which all results came. Their pacers were told what they said meanwhile."""
        found = []
        for sequence in list(self.landing):
            assert sequence.row is not None
            if self._rows.counts[sequence.row] + sequence.group.num_prompt > sequence.computed:
                del self.landing[sequence]
                tokens = self._rows.outputs(sequence.row, len(sequence.outputs))
                sequence.outputs.extend(tokens)
                sequence.right = sequence.num_known
                found.append(sequence)
                self._tell(sequence, tokens)
        return found

    def _tell(self, sequence: Sequence, tokens: list[int]) -> None:
        try:
            sequence.pacer.catch_up(tokens)
        except Exception as error:  # noqa: BLE001 - one request's fault must not become everyone's
            self.faults.append((sequence.group, fault_of(error)))

    def fork(self, parent: Sequence, token: int) -> Sequence:
        """A beam that goes on from another with a token of its own, in a row that was held back for it."""
        group = parent.group
        child = Sequence(group, parent.index, parent.handle, parent.table.fork(), parent.pacer.clone())
        child.outputs, child.computed = [*parent.outputs, token], parent.computed
        group.num_spare -= 1
        self._rows.reserve(-1)
        self._rows.seat(child)
        group.live.append(child)
        return child

    def rebase(self, sequence: Sequence, parent: Sequence, token: int) -> None:
        """A beam that does not go on becomes one that goes on from another: its row and what is alike are kept."""
        assert sequence.row is not None
        same = sequence.table.follow(parent.table)
        sequence.told = same if sequence.told is None else min(same, sequence.told)
        sequence.outputs, sequence.computed = [*parent.outputs, token], parent.computed
        sequence.right = min(sequence.right, same * self._block_size, sequence.computed)
        sequence.pacer = parent.pacer.clone()
        self._rows.rewrite(sequence.row, sequence.outputs)

    def check(self) -> None:
        assert not self.due.keys() & self.landing.keys()
        for sequence in (*self.due, *self.landing):
            assert sequence.begun
            assert sequence.row is not None
        for sequence in self.due:
            assert sequence.paced
            assert sequence.row is not None
            assert sequence.computed == sequence.num_known - 1
            assert sequence.table.num_tokens <= sequence.computed
            assert sequence.outputs == self._rows.outputs(sequence.row)
