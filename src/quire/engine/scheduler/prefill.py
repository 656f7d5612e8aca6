"""Prompts: which running groups still owe known tokens, and which waiting groups are admitted beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.engine.decoding.controller import PLAIN
from quire.engine.decoding.group import Group, Sequence, SequenceState
from quire.engine.scheduler.budget import chunk_size, held_back
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.engine.scheduler.prefetch import NEAR
from quire.types.step import Chunk

if TYPE_CHECKING:
    from quire.engine.scheduler.scheduler import Scheduler

_LOOK_AHEAD = 32  # waiting groups for which running prompts may leave part of a step


class Prefill:
    """The scheduler's part that hands a step's budget to tokens that are known: prompts, and preempted sequences that
    are computed again. It admits waiting groups while rows, budget and blocks last."""

    def __init__(self, scheduler: Scheduler, budget: int) -> None:
        self._scheduler, self._budget = scheduler, budget
        self._owing: dict[Group, None] = {}  # running groups with known tokens to compute, in no order
        self._stopped_step, self._stopped_for = -1, ""  # when and why a waiting group was last not admitted
        self._blocked: Group | None = None  # the group for which there was no room,
        self._blocked_at = 0, 0  # at this version of the row table, with so many free blocks

    def __bool__(self) -> bool:
        """Whether known tokens of running groups are still to be computed."""
        return bool(self._owing)

    def remove(self, group: Group) -> None:
        """A group ended, or was preempted. Idempotent."""
        self._owing.pop(group, None)

    def plan(self, builder: PlanBuilder) -> None:
        """What running groups owe, and whom to admit besides."""
        scheduler = self._scheduler
        self._look_at_waiting()
        if self._owing:
            held = 0
            builder.prompts.update(self._owing)
            if scheduler.waiting.num_ready and self._candidate(builder)[0] is not None:
                first = scheduler.policy.soon(scheduler, min(scheduler.rows.num_free, _LOOK_AHEAD))
                held = held_back(builder.budget, self._owing, first, scheduler.policy.goes_before, scheduler.num_cached)
            builder.budget -= held
            for group in sorted(self._owing, key=scheduler.policy.key):
                if group.is_running and builder.budget > 0:
                    self._compute_owed(builder, group)
            builder.budget += held
        self._admit(builder)

    # -------------------------------------------------------------------------------------------------- computing
    def _compute_owed(self, builder: PlanBuilder, group: Group) -> None:
        """Give a running group's owed tokens their share of the budget."""
        scheduler, room = self._scheduler, self._scheduler.room
        is_new = not group.is_forked and not group.leader.is_introduced  # just admitted, or its last leader ended
        if is_new and scheduler.reuse.attach(builder, group, scheduler.tick, scheduler.now):
            room.note_prefill(group)
            return
        if len(group.live) == 1 and not group.is_forked:
            self._compute_only(builder, group, is_new=is_new)
            return
        if not group.is_forked:
            leader, target = group.leader, group.num_prompt
            if not self._compute_chunk(builder, leader, target):
                return
            is_whole = leader.num_computed == target
            if not is_whole or not is_new:
                room.note_prefill(group)
            if not is_whole:
                return
            builder.fork(group)  # its own tokens wait a step: a tail is copied before a forward, not within
        else:
            for sequence in group.live:
                owes = sequence.state is SequenceState.PREFILL and sequence.num_computed < sequence.target
                if owes and builder.budget > 0 and not self._compute_chunk(builder, sequence, sequence.target):
                    return
        unbegun = [sequence for sequence in group.live if sequence.state is SequenceState.PREFILL]
        if all(sequence.num_computed == sequence.target for sequence in unbegun):
            self._owing.pop(group)
            for sequence in unbegun:
                scheduler.paced.add(sequence)

    def _compute_only(self, builder: PlanBuilder, group: Group, *, is_new: bool) -> None:
        """`_compute_owed` for the usual group, of one sequence."""
        sequence = group.live[0]
        target = group.num_prompt + len(sequence.outputs)
        if not self._compute_chunk(builder, sequence, target):
            return
        is_whole = sequence.num_computed == target
        if not is_whole or not is_new:
            self._scheduler.room.note_prefill(group)
        if is_whole:
            group.is_forked = True
            del self._owing[group]

    def _compute_chunk(self, builder: PlanBuilder, sequence: Sequence, target: int) -> bool:
        """False when the group had to give up its blocks."""
        scheduler, start, group = self._scheduler, sequence.num_computed, sequence.group
        count = chunk_size(target - start, builder.budget, self._budget, alone=not scheduler.num_decoding)
        if not scheduler.grow(builder, sequence, start + count - sequence.table.num_tokens):
            return False
        assert sequence.row is not None
        sequence.num_computed = start + count
        group.ledger.note("chunk", scheduler.now, count)
        rows: list[int] = []
        if start + count == target:
            for each in [sequence] if group.is_forked else group.live:
                if each.num_tokens == target and each.row is not None:
                    rows.append(each.row)
                    self._begin(builder, each)
        builder.compute(Chunk(sequence.row, start, count, tuple(rows)))
        return True

    def _begin(self, builder: PlanBuilder, sequence: Sequence) -> None:
        """The sequence takes its first sample in the plan in work."""
        scheduler = self._scheduler
        if sequence.controller is PLAIN or scheduler.paced.num_ahead(sequence):
            scheduler.decoding.prepare(sequence, scheduler.next_tick)
        else:
            sequence.state = SequenceState.AWAITING
            builder.drafting.append(sequence)

    # -------------------------------------------------------------------------------------------------- admitting
    def _look_at_waiting(self) -> None:
        """Have files read for groups that are soon to be admitted; put those back in line that are ready again."""
        scheduler, reuse = self._scheduler, self._scheduler.reuse
        if reuse.prefetch is not None:
            reuse.ready += reuse.prefetch.take_ready(scheduler.now)
            reuse.prefetch.look(scheduler.policy.soon(scheduler, NEAR))
        if reuse.ready:
            for group in reuse.ready:
                if scheduler.waiting.is_deferred(group):
                    scheduler.waiting.resume(group)
                    scheduler.policy.resumed(group)
            reuse.ready.clear()

    def _admit(self, builder: PlanBuilder) -> None:
        """Admit waiting groups, in order, while rows, budget and blocks last; nothing that runs is disturbed."""
        scheduler, rows = self._scheduler, self._scheduler.rows
        while scheduler.waiting.num_ready:
            group, obstacle = self._candidate(builder)
            if group is None:
                self._stopped_step, self._stopped_for = scheduler.num_plans, obstacle
                return
            if not group.waited_for and self._stopped_step >= group.queued_step:
                group.waited_for = self._stopped_for
            group.ledger.note("admitted", scheduler.now, 0, f"waited: {group.waited_for}" if group.waited_for else "")
            scheduler.waiting.remove(group)
            scheduler.running.add(group)
            group.is_running, group.is_forked = True, False
            for sequence in group.live:
                sequence.state = SequenceState.PREFILL
                rows.assign(sequence)
            if group.search is not None:
                group.num_spare = group.num_beams_to_come
                rows.reserve(group.num_spare)
            scheduler.room.admit(group)
            scheduler.policy.admitted(group, scheduler)
            self._owing[group] = None
            self._compute_owed(builder, group)
            scheduler.reuse.forget(group)

    def _candidate(self, builder: PlanBuilder) -> tuple[Group | None, str]:
        """Who is admitted next; or None, and what keeps everybody out of this step. Groups that are not ready are
        deferred: they wait, and others go on."""
        scheduler = self._scheduler
        while True:
            num_free = scheduler.rows.num_free
            if builder.budget <= 0 or num_free <= 0:
                return None, "token budget" if builder.budget <= 0 else "no free row"
            if (group := scheduler.policy.choose(scheduler)) is None:
                return None, "not its turn"
            if group in builder.prompts:  # nobody is admitted twice
                return None, "preempted in this step"
            if len(group.live) + group.num_beams_to_come > num_free:
                return None, "no free row"
            if group is self._blocked and self._is_unchanged():
                return None, "no free blocks"
            reason = scheduler.reuse.wait_reason(group, scheduler.now)
            if not reason and scheduler.room.has_room(group, scheduler.running):
                return group, ""
            if not reason:
                self._blocked, self._blocked_at = group, (scheduler.rows.version, scheduler.pool.num_free)
                return None, "no free blocks"
            group.waited_for = reason
            scheduler.waiting.defer(group)
            scheduler.policy.deferred(group)

    def _is_unchanged(self) -> bool:
        """Whether nothing can have made room for the blocked group: no sequence has come or gone, and no block."""
        version, num_free = self._blocked_at
        return self._scheduler.rows.version == version and self._scheduler.pool.num_free <= num_free
