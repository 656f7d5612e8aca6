"""Tokens owed -> StepPlan. There are no phases: prompt chunk, decode, draft and recomputation are owed tokens alike."""

from __future__ import annotations

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.decoding.controller import PLAIN
from quire.engine.decoding.group import Group, Sequence, SequenceState
from quire.engine.scheduler import accounts
from quire.engine.scheduler.decode_set import DecodeSet
from quire.engine.scheduler.paced import PacedSet
from quire.engine.scheduler.parts import make_parts
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.engine.scheduler.policies.registry import make_policy
from quire.engine.scheduler.prefill import Prefill
from quire.engine.scheduler.queue import GroupQueue
from quire.engine.scheduler.row_table import RowTable
from quire.types.errors import OutOfBlocks
from quire.types.stats import RequestBlocks
from quire.types.step import NO_ROWS, Ints, Masks, StepPlan

_AHEAD = (SequenceState.STARTING, SequenceState.AHEAD)


class Scheduler:
    """Decides every step anew which sequences compute how many tokens, and owns rows, blocks and queues for it.

    Steady decoding costs nothing per sequence: see DecodeSet. A paced sequence is planned when it is due: `paced` knows
    which are, and `go_on` makes it so.
    """

    def __init__(self, cache: CacheConfig, config: SchedulerConfig) -> None:
        self.policy, self.rows = make_policy(config), RowTable(config.num_rows)
        parts = make_parts(cache, config, self.policy, self.rows)
        self.pool, self.tree, self.tiers, self.reuse, self.room = (
            parts.pool,
            parts.tree,
            parts.tiers,
            parts.reuse,
            parts.room,
        )
        self.new_table, self.preemption, self.pins = parts.room.new_table, parts.preemption, parts.pins
        self._compute_time = parts.compute_time
        self.paced = PacedSet(self.rows, self.pool, cache.block_size)
        self.waiting, self.running = GroupQueue(self.policy.key), GroupQueue(self.policy.key)
        self.num_preemptions = 0
        self.block_size, self._budget = cache.block_size, config.max_num_batched_tokens
        self.decoding = DecodeSet(config.num_rows)
        self.prefill = Prefill(self, self._budget)
        self._stride = 1  # ticks by which the plan in work advances the decode set: 0 while it is paused
        self.ahead_rows: Ints = NO_ROWS  # rows that run ahead in the last plan, the first of its decode_rows
        self.masks: Masks | None = None  # masks of the last plan that were known when it was made
        self._released: list[int] = []
        self.num_plans = 0
        self.now = 0.0  # when the plan in work was begun, on the engine's clock

    # ------------------------------------------------------------------------------------------ coming and going
    def add(self, group: Group) -> None:
        group.queued_step, group.waited_for = self.num_plans, ""
        self.waiting.add(group)
        self.policy.added(group, self)

    def end(self, sequence: Sequence, *, keep: bool = True) -> list[int]:
        """Free all that a sequence holds, row and blocks; return its outputs. The group is left to the caller.

        `keep`: later prompts can find what it generated.
        """
        if sequence.row is not None:
            self._leave_row(sequence)
            if keep:
                self.reuse.publish(sequence, leaving=True)
        else:
            self.tiers.release_swapped(sequence)
        sequence.table.free()
        if sequence.controller is not PLAIN:
            sequence.controller.close()
        return sequence.outputs

    def remove(self, group: Group) -> None:
        """Forget a group whose sequences have left their rows."""
        (self.running if group.is_running else self.waiting).remove(group)
        self.policy.left(group, self)
        self.prefill.remove(group)
        self.reuse.forget(group)
        if group.num_spare:
            self.rows.reserve(-group.num_spare)
        group.is_running, group.num_spare = False, 0
        self.room.note_prefill(group)

    def reset_cache(self) -> int:
        """Forget cached prefixes in all tiers, pinned ones too; returns how many blocks that freed on the device."""
        self.tiers.reset()
        return self.reuse.reset() + self.pins.reset()

    # ------------------------------------------------------------------------------------- what policies look at
    @property
    def tick(self) -> int:
        """Steps in which those that decode have advanced."""
        return self.decoding.tick

    @property
    def next_tick(self) -> int:
        """The tick after the plan in work: the same one while the decode set is paused."""
        return self.decoding.tick + self._stride

    @property
    def num_decoding(self) -> int:
        """Tokens that those that decode take of the next step."""
        return len(self.decoding) + len(self.paced.due)

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens of running groups are still to be computed."""
        return bool(self.prefill)

    def num_cached(self, group: Group) -> int:
        """How many of the tokens that a waiting group owes are in the prefix cache."""
        return self.reuse.num_cached(group)

    # ------------------------------------------------------------------------------------------------- planning
    def plan(self, now: float = 0.0) -> StepPlan | None:
        """The next step, or None when nothing can be computed now. `now` is what ledgers say of it."""
        self.now = now
        self.tree.now = now
        builder = PlanBuilder(self._budget)
        self._stride = 0 if self.policy.pauses(self) else 1
        if self._stride:
            self._decode(builder)
        if self.prefill or len(self.waiting):
            self.prefill.plan(builder)
        if not self._stride and builder.is_idle:  # there is nothing to pause for
            self._stride = 1
            self._decode(builder)
        if builder.drafting:
            self.paced.add_drafts(builder)
        self.ahead_rows = self.decoding.snapshot() if self._stride else NO_ROWS
        if builder.is_idle and not len(self.ahead_rows) and not builder.loads and not self.tiers.has_transfers:
            return None
        return self._finish(builder)

    def _finish(self, builder: PlanBuilder) -> StepPlan:
        transfers, released = self.tiers.take_transfers(builder.loads), tuple(self._released)
        is_guided = self.rows.num_guided > 0 and self._samples_guided(builder)
        plan, self.masks = builder.finish(self.num_plans, self.ahead_rows, released, transfers, is_guided=is_guided)
        self._released.clear()
        self.num_plans += 1
        self.decoding.tick += self._stride
        self.reuse.publish_plan(plan.chunks)
        return plan

    def _samples_guided(self, builder: PlanBuilder) -> bool:
        """Whether a guided row, which waits for its mask and nothing else, samples in the plan in work."""
        if len(self.ahead_rows) and self.rows.guided[self.ahead_rows].any():
            return True
        rows, states = [row for chunk in builder.chunks for row in chunk.sample_rows], (SequenceState.STARTING,)
        return any(self.rows.guided[row] and self.rows.sequence_at(row).state in states for row in rows)

    def _decode(self, builder: PlanBuilder) -> None:
        """One token for each that runs ahead, and for each that is due; the rest of the budget is for prompts."""
        self._serve_events(builder)
        if self.paced.draining:
            self.take_drained()
            self._serve_events(builder)
        builder.budget = self.policy.budget(self._budget, self) - len(self.decoding)
        if self.paced.due:
            self._compute_due(builder)

    def _serve_events(self, builder: PlanBuilder) -> None:
        """Look at the sequences that begin to decode, need a block, or have run as far as they may."""
        decoding, full = self.decoding, list[Sequence]()
        for sequence in decoding.take_events():
            ahead = sequence.ahead
            assert ahead is not None
            if sequence.state is SequenceState.AHEAD:
                if decoding.tick + ahead.base >= ahead.until:
                    self._leave_decoding(sequence)
                else:
                    full.append(sequence)
            elif sequence.num_computed >= sequence.group.limit - 1:
                self._leave_decoding(sequence)
            elif self.grow(builder, sequence, sequence.num_computed + 1 - sequence.table.num_tokens):
                if sequence.controller is not PLAIN:
                    builder.write(sequence)
                with self.paced.guarded(sequence.group):
                    decoding.schedule(sequence, decoding.join(sequence), sequence.table.capacity)
        if full:
            self._append_blocks(builder, [sequence for sequence in full if sequence.ahead is not None])

    def _append_blocks(self, builder: PlanBuilder, full: list[Sequence]) -> None:
        """Give a block to each sequence that runs ahead and whose blocks are full: to all at once, which is the rule
        in steady decoding, or to one after the other where that takes preemptions."""
        decoding, pool = self.decoding, self.pool
        if pool.num_free >= len(full):
            builder.grant(decoding.append_blocks(full, pool.take(len(full)), self.block_size))
            return
        for sequence in full:
            ahead = sequence.ahead
            if ahead is None:
                continue  # preempted for one before it
            if self.grow(builder, sequence, decoding.tick + ahead.base + 1 - sequence.table.num_tokens):
                decoding.schedule(sequence, ahead, sequence.table.capacity)

    def _compute_due(self, builder: PlanBuilder) -> None:
        """The one token that each due sequence owes, for which there is always budget."""
        due = sorted(self.paced.due, key=lambda sequence: self.policy.key(sequence.group))
        for sequence in due:
            if sequence not in self.paced.due:
                continue  # preempted for one before it
            if not sequence.is_introduced:
                builder.introduce(sequence)
            if self.grow(builder, sequence, sequence.num_tokens - sequence.table.num_tokens):
                builder.sync_blocks(sequence)
                self.paced.compute(builder, sequence)

    # --------------------------------------------------------------------------------------------- preempting
    def grow(self, builder: PlanBuilder, sequence: Sequence, num_tokens: int) -> bool:
        """Room for more tokens, taken from less urgent groups if need be. False when its own group was the victim."""
        assert sequence.row is not None
        while True:
            try:
                builder.append(sequence.row, sequence.table, num_tokens)
                return True
            except OutOfBlocks:
                victim = self.running.last() or sequence.group
                self._preempt(builder, victim)
                if victim is sequence.group:
                    return False

    def _preempt(self, builder: PlanBuilder, group: Group) -> None:
        before = builder.drop(sequence.row for sequence in group.live if sequence.row is not None)
        for sequence in group.live:
            row = self._leave_row(sequence)
            sequence.num_computed = before.get(row, sequence.num_computed)
        self.reuse.publish_group(group, leaving=True)
        num_tokens = accounts.num_computed(group, self.tick)
        how = self.preemption.vacate(group, builder, num_tokens)
        builder.drop_loads(self.pool)
        num_owed = 0 if any(sequence.swapped for sequence in group.live) else num_tokens
        group.ledger.note("preempted", self.now, num_owed, f"no free blocks; {how}")
        self.remove(group)
        group.num_preemptions += 1
        self.num_preemptions += 1
        self.add(group)

    # -------------------------------------------------------------------------------- between running ahead and paced
    def _leave_decoding(self, sequence: Sequence) -> None:
        """It has run as far as it may: to its limit, or to where its controller must be asked again."""
        self.decoding.leave(sequence)
        sequence.state = SequenceState.DRAINING
        if sequence.num_computed < sequence.group.limit - 1:
            self.paced.draining[sequence] = None

    def pace(self, sequence: Sequence) -> None:
        """A sequence that runs ahead is paced as soon as the results of its steps have come."""
        if sequence.state in _AHEAD:
            self._leave_decoding(sequence)

    def go_on(self, sequence: Sequence) -> None:
        """A sequence all of whose tokens are known computes again: it runs ahead from here, or is due."""
        if self.paced.num_ahead(sequence):
            self.decoding.prepare(sequence, self.tick)
        else:
            self.paced.add(sequence)

    def take_drained(self) -> None:
        """Sequences that ran ahead go on as their controllers say, once all their results have come."""
        for sequence in self.paced.take_drained():
            self.go_on(sequence)

    def _leave_row(self, sequence: Sequence) -> int:
        self.decoding.leave(sequence)
        if sequence.controller is not PLAIN:
            self.paced.discard(sequence)
        self.reuse.leave(sequence)
        sequence.state, sequence.is_introduced = SequenceState.WAITING, False
        row = self.rows.release(sequence)
        self._released.append(row)
        return row

    def prune(self, sequence: Sequence) -> None:
        """End a beam that does not go on; its row is held back for another."""
        self.end(sequence, keep=False)
        sequence.group.live.remove(sequence)
        sequence.group.num_spare += 1
        self.rows.reserve(1)

    # ----------------------------------------------------------------------------------------------- accounts
    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        self.policy.note_step(plan.num_tokens, seconds)
        self._compute_time.note_step(plan, seconds)

    def slots_used(self) -> int:
        """Token slots that hold a computed token, shared ones counted once."""
        num_held, num_pinned = self.pool.num_used - len(self.room.kept), self.pins.num_alone()
        return accounts.slots_used(self.running, self.pool, num_held, num_pinned, self.block_size, self.tick)

    def request_blocks(self) -> tuple[RequestBlocks, ...]:
        """What every live request holds, running ones first."""
        return accounts.request_blocks((*self.running, *self.waiting), self.tick)

    def check_idle(self) -> None:
        """With no request left, nothing may be held; a leak is an error now, not a slow death. Costs nothing."""
        num_held = self.pool.num_used - self.pins.num_blocks
        if num_held or self.rows.num_taken:
            raise RuntimeError(f"{num_held} blocks and {self.rows.num_taken} rows are held by nobody")

    def check(self) -> None:
        """Every block is held exactly by the tables that list it; rows, queues and decode set agree."""
        self.pool.check(len(self.tree))
        for owner in (self.reuse, self.tiers, self.rows, self.waiting, self.running, self.decoding, self.paced):
            owner.check()
        accounts.check_blocks(self.running, self.pool, self.room.kept, self.pins, self.tree)
        accounts.check_groups(self.running, self.waiting, self.rows, self.decoding)
