"""PacedSet: the paced sequences. The scheduler plans the next step of a paced sequence only after the result of its
last step has come; all other sequences run ahead (ahead_set.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.engine.decoding.controller import Fault, fault_of
from quire.engine.decoding.group import Group, Sequence, SequenceState
from quire.engine.kvcache.pool import BlockPool
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.engine.scheduler.row_table import RowTable

FORCED_ROWS = 16  # with more running sequences, drafts of forced tokens are not worth their cost


class PacedSet:
    """The paced sequences that are due, that is, planned next, and the draining sequences, which stopped running ahead
    and wait for the results of steps in flight.

    `least_forced` is how many tokens a grammar must force for a guided sequence to be paced, so that one step verifies
    all of them as a draft. `faults` collects the groups whose own code (grammar, draft proposer) raised an exception
    here; the engine ends them.
    """

    def __init__(self, rows: RowTable, pool: BlockPool, block_size: int) -> None:
        self._rows, self._pool, self._block_size = rows, pool, block_size
        self.least_forced = 1
        self.due: dict[Sequence, None] = {}
        self.draining: dict[Sequence, None] = {}  # sequences that continue when all their results have come
        self.faults: list[tuple[Group, Fault]] = []

    @contextmanager
    def guarded(self, group: Group) -> Iterator[None]:
        """Run the code of one request. An exception becomes a Fault of its group, so that only this request ends."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - contain the fault: only this request ends
            self.faults.append((group, fault_of(error)))

    @property
    def looks_for_forced(self) -> bool:
        """Whether so few sequences run that drafts of tokens forced by a grammar are worth their cost."""
        return self._rows.num_taken <= FORCED_ROWS

    def num_ahead(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence may run ahead from here; 0: it must be paced, or its own code failed."""
        controller = sequence.controller
        try:
            if controller.is_guided:
                takes_draft = self.looks_for_forced and sequence.table.takes_draft(self._rows.num_rows)
                controller.look_for_forced(self.least_forced if takes_draft else None)
            return controller.num_ahead
        except Exception as error:  # noqa: BLE001 - contain the fault: only this request ends
            self.faults.append((sequence.group, fault_of(error)))
            return 0

    def add(self, sequence: Sequence) -> None:
        """Make a sequence due: the next plan computes its last token and all tokens that it owes before."""
        sequence.state = SequenceState.DUE
        self.due[sequence] = None

    def due_in(self, micro_batch: int) -> list[Sequence]:
        """Return the due sequences of a micro-batch."""
        return [sequence for sequence in self.due if sequence.group.micro_batch == micro_batch]

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that loses its row. Idempotent."""
        self.due.pop(sequence, None)
        self.draining.pop(sequence, None)
        sequence.draft = ()

    # -------------------------------------------------------------------------------------------------- planning
    def plan_owed(self, builder: PlanBuilder, sequence: Sequence, end: int) -> None:
        """Plan the tokens up to `end` that a due sequence owes, for which it has blocks: its last token, and accepted
        draft tokens that are not in its state yet. If that is all, it awaits its sample, and a draft may be added
        later."""
        row, start, is_whole = sequence.row, sequence.num_computed, end == sequence.num_tokens
        assert row is not None
        builder.write(sequence)
        sequence.num_computed = end
        if is_whole and end - start == 1:
            builder.compute_one(row, start)
        else:
            builder.compute(row, start, end - start, (row,) if is_whole else ())
        if is_whole:
            del self.due[sequence]
            sequence.state = SequenceState.AWAITING
            builder.paced_in_step.append(sequence)

    def add_drafts_and_masks(self, builder: PlanBuilder) -> None:
        """Add draft tokens and masks for the paced sequences of this step, from the budget and blocks that the owed
        tokens leave."""
        for sequence in builder.paced_in_step:
            if sequence.row is not None and sequence.state is SequenceState.AWAITING:
                with self.guarded(sequence.group):
                    self._add_draft(builder, sequence)

    def _add_draft(self, builder: PlanBuilder, sequence: Sequence) -> None:
        group, row, table, controller = sequence.group, sequence.row, sequence.table, sequence.controller
        assert row is not None
        left = group.limit - 1 - sequence.num_tokens
        takes_draft = group.search is None and group.sampling.prompt_logprobs is None and builder.samples_alone(row)
        takes_draft = takes_draft and table.takes_draft(self._rows.num_rows)
        # No drafts for beams, which all have the same length.
        room = max(min(builder.budget, left), 0) if takes_draft else 0
        proposal = controller.propose(room)
        free = table.capacity + self._pool.num_takeable * self._block_size - table.num_tokens
        draft = proposal.draft[:free]
        num_requested = min(controller.num_to_draft(left - len(draft)), free - len(draft)) if room else 0
        builder.mask(row, proposal.masks[: len(draft) + 1])
        if draft or num_requested:
            builder.append(row, table, len(draft) + num_requested)
        if num_requested:
            builder.request_draft(row, num_requested)
        if draft:
            builder.verify(sequence, draft)
            builder.move_state(row, table.plan_draft(sequence.num_tokens, len(draft), self._rows.num_rows))
            sequence.draft = draft
            sequence.num_computed += len(draft)

    # ------------------------------------------------------------------------------------------------- committing
    def append_tokens(self, sequence: Sequence, tokens: tuple[int, ...], *, written: bool) -> None:
        """Append the tokens that a paced sequence's step produced, and roll back rejected draft tokens. Accepted tokens
        that are not in the sequence's state are owed again. `written`: the workers' row holds the last token
        already."""
        assert sequence.row is not None
        sequence.outputs.extend(tokens)
        self._rows.extend(sequence.row, tokens)
        settled = sequence.table.settle_draft(sequence.num_tokens - 1, (sequence.group.num_known,))
        sequence.num_computed = sequence.num_readable = settled
        sequence.synced_tokens = sequence.num_tokens - (not written)
        sequence.table.truncate(settled)
        sequence.draft = ()

    def take_drained(self) -> list[Sequence]:
        """Return the draining sequences whose results have all come, and remove them. Their tokens are in `outputs`
        again."""
        found = []
        for sequence in list(self.draining):
            row = sequence.row
            assert row is not None
            if self._rows.count_of[row] + sequence.group.num_prompt > sequence.num_computed:
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
        """Return the groups whose own code failed since the last call. The caller ends them."""
        faults, self.faults = self.faults, []
        return faults

    # ------------------------------------------------------------------------------------------------------ beams
    def fork_beam(self, parent: Sequence, token: int) -> Sequence:
        """Return a new beam that continues `parent` with `token`, in a reserved row."""
        group, controller = parent.group, parent.controller.clone()  # if this raises, no block has been shared yet
        child = Sequence(group, parent.index, parent.handle, parent.table.fork(), controller)
        child.outputs, child.num_computed = [*parent.outputs, token], parent.num_computed
        group.num_spare -= 1
        self._rows.reserve(-1)
        self._rows.assign(child)
        group.live.append(child)
        return child

    def replace_beam(self, sequence: Sequence, parent: Sequence, token: int) -> None:
        """Turn a beam without children into one that continues `parent` with `token`. It keeps its row and the blocks
        that both share."""
        assert sequence.row is not None
        same = sequence.table.replace_with(parent.table)
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
            assert sequence.num_computed < sequence.num_tokens
            assert sequence.table.num_tokens <= sequence.num_computed
            assert sequence.outputs == self._rows.outputs(sequence.row)
