"""Paced sequences: those that wait for their own results before their next step is planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.engine.decoding.controller import Fault, fault_of
from quire.engine.decoding.group import Group, Sequence, SequenceState
from quire.engine.kvcache.pool import BlockPool
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.engine.scheduler.row_table import RowTable

FORCED_ROWS = 16  # with more rows than this in a step, tokens that a grammar forces are not worth a draft


class PacedSet:
    """Knows which paced sequences are due, and which sequences that ran ahead still have results to come.

    `least_forced` is how many tokens a grammar must force for a guided sequence to be paced, so that one step verifies
    them all. `faults` collects requests whose own code failed here; the engine ends them.
    """

    def __init__(self, rows: RowTable, pool: BlockPool, block_size: int) -> None:
        self._rows, self._pool, self._block_size = rows, pool, block_size
        self.least_forced = 1
        self.due: dict[Sequence, None] = {}
        self.draining: dict[Sequence, None] = {}  # those that go on when their results have come
        self.faults: list[tuple[Group, Fault]] = []

    @contextmanager
    def guarded(self, group: Group) -> Iterator[None]:
        """Run a request's own code; if it fails, note the fault and go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - one request's fault must not become everyone's
            self.faults.append((group, fault_of(error)))

    @property
    def looks_for_forced(self) -> bool:
        """Whether few enough sequences run for tokens that a grammar forces to be worth a draft."""
        return self._rows.num_taken <= FORCED_ROWS

    def num_ahead(self, sequence: Sequence) -> int:
        """How many tokens a sequence may run ahead from here; 0: it is paced, or its own code failed."""
        controller = sequence.controller
        try:
            if controller.is_guided and self.looks_for_forced:
                controller.look_for_forced(self.least_forced)
            return controller.num_ahead
        except Exception as error:  # noqa: BLE001 - one request's fault must not become everyone's
            self.faults.append((sequence.group, fault_of(error)))
            return 0

    def add(self, sequence: Sequence) -> None:
        """Its next step may be planned."""
        sequence.state = SequenceState.DUE
        self.due[sequence] = None

    def discard(self, sequence: Sequence) -> None:
        """It loses its row. Idempotent."""
        self.due.pop(sequence, None)
        self.draining.pop(sequence, None)
        sequence.draft = ()

    # -------------------------------------------------------------------------------------------------- planning
    def compute(self, builder: PlanBuilder, sequence: Sequence) -> None:
        """Plan the one token that a due sequence owes, for which there is a block. A draft may follow it."""
        row, position = sequence.row, sequence.num_tokens - 1
        assert row is not None
        del self.due[sequence]
        sequence.state, sequence.num_computed = SequenceState.AWAITING, position + 1
        builder.write(sequence)
        builder.compute_one(row, position)
        builder.drafting.append(sequence)

    def add_drafts(self, builder: PlanBuilder) -> None:
        """Guess what paced sequences of this step may say next, with the budget and the blocks that are left: every
        token that is owed has got its own before."""
        for sequence in builder.drafting:
            if sequence.row is not None and sequence.state is SequenceState.AWAITING:
                with self.guarded(sequence.group):
                    self._add_draft(builder, sequence)

    def _add_draft(self, builder: PlanBuilder, sequence: Sequence) -> None:
        group, row, table, controller = sequence.group, sequence.row, sequence.table, sequence.controller
        assert row is not None
        left = group.limit - 1 - sequence.num_tokens
        takes_draft = group.search is None and group.sampling.prompt_logprobs is None and builder.samples_alone(row)
        room = max(min(builder.budget, left), 0) if takes_draft else 0  # beams stay of one length
        proposal = controller.propose(room)
        free = table.capacity + self._pool.num_free * self._block_size - table.num_tokens
        draft = proposal.draft[:free]
        num_ordered = min(controller.order(left - len(draft)), free - len(draft)) if room else 0
        builder.mask(row, proposal.masks[: len(draft) + 1])
        if draft or num_ordered:
            builder.append(row, table, len(draft) + num_ordered)
        if num_ordered:
            builder.order(row, num_ordered)
        if draft:
            builder.verify(sequence, draft)
            sequence.draft = draft
            sequence.num_computed += len(draft)

    # ------------------------------------------------------------------------------------------------- committing
    def grow(self, sequence: Sequence, tokens: tuple[int, ...], *, written: bool) -> None:
        """A paced sequence's step came to these tokens. `written`: its row has the last of them already."""
        assert sequence.row is not None
        sequence.outputs.extend(tokens)
        self._rows.extend(sequence.row, tokens)
        sequence.num_computed = sequence.num_readable = sequence.num_tokens - 1
        sequence.synced_tokens = sequence.num_tokens - (not written)
        sequence.table.truncate(sequence.num_computed)
        sequence.draft = ()

    def take_drained(self) -> list[Sequence]:
        """Sequences that ran ahead and all of whose results have come. They know all their tokens again."""
        found = []
        for sequence in list(self.draining):
            row = sequence.row
            assert row is not None
            if self._rows.counts[row] + sequence.group.num_prompt > sequence.num_computed:
                del self.draining[sequence]
                tokens = self._rows.outputs(row, len(sequence.outputs))
                sequence.outputs.extend(tokens)
                sequence.num_readable = sequence.num_computed
                sequence.synced_tokens = sequence.num_tokens
                found.append(sequence)
                if tokens and not sequence.controller.proposer.is_observed:
                    with self.guarded(sequence.group):
                        sequence.controller.proposer.observe(tokens)
        return found

    def take_faults(self) -> list[tuple[Group, Fault]]:
        """Groups whose own code failed since the last call; they are to be ended."""
        faults, self.faults = self.faults, []
        return faults

    # ------------------------------------------------------------------------------------------------------ beams
    def fork(self, parent: Sequence, token: int) -> Sequence:
        """A beam that goes on from another with a token of its own, in a row that was held back for it."""
        group, controller = parent.group, parent.controller.clone()  # if this raises, no block has been shared yet
        child = Sequence(group, parent.index, parent.handle, parent.table.fork(), controller)
        child.outputs, child.num_computed = [*parent.outputs, token], parent.num_computed
        group.num_spare -= 1
        self._rows.reserve(-1)
        self._rows.assign(child)
        group.live.append(child)
        return child

    def rebase(self, sequence: Sequence, parent: Sequence, token: int) -> None:
        """A beam that does not go on becomes one that goes on from another: its row and what is alike are kept."""
        assert sequence.row is not None
        same = sequence.table.follow(parent.table)
        sequence.synced_blocks = same if sequence.synced_blocks is None else min(same, sequence.synced_blocks)
        sequence.outputs, sequence.num_computed = [*parent.outputs, token], parent.num_computed
        sequence.synced_tokens = min(sequence.synced_tokens, same * self._block_size, sequence.num_computed)
        sequence.controller = parent.controller.clone()
        self._rows.rewrite(sequence.row, sequence.outputs)

    def check(self) -> None:
        assert not self.due.keys() & self.draining.keys()
        for sequence in self.draining:
            assert sequence.row is not None
            assert sequence.state is SequenceState.DRAINING
        for sequence in self.due:
            assert sequence.row is not None
            assert sequence.state is SequenceState.DUE
            assert sequence.num_computed == sequence.num_tokens - 1
            assert sequence.table.num_tokens <= sequence.num_computed
            assert sequence.outputs == self._rows.outputs(sequence.row)
