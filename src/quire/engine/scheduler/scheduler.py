"""The scheduler: it makes the StepPlan of every step. There are no prefill and decode phases: prompt chunks, decodes,
drafts and recomputed tokens are all tokens that sequences owe, and one step computes any mix of them. EngineCore calls
it; `prefill`, `ahead_set`, `paced`, `prefix_reuse` and `preemption` do the parts."""

from __future__ import annotations

from collections.abc import Collection

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.decoding.controller import PLAIN
from quire.engine.decoding.group import Group, Sequence, SequenceState
from quire.engine.kvcache.grouped_table import GroupedTable
from quire.engine.scheduler import accounts
from quire.engine.scheduler.adapter_slots import AdapterSlots
from quire.engine.scheduler.ahead_set import MicroBatches
from quire.engine.scheduler.paced import PacedSet
from quire.engine.scheduler.parts import make_parts
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.engine.scheduler.policies.registry import make_policy
from quire.engine.scheduler.prefill import Prefill
from quire.engine.scheduler.queue import GroupQueue, RunningGroups
from quire.engine.scheduler.row_table import RowTable
from quire.types.errors import OutOfBlocks
from quire.types.stats import BlockMap
from quire.types.step import NO_ROWS, Ints, Masks, StepPlan

_AHEAD, _WAITING = SequenceState.AHEAD, SequenceState.WAITING  # a member of an Enum is slow to look up
_RUNNING_AHEAD = (SequenceState.STARTING, _AHEAD)


class Scheduler:
    """Decides for each step which sequences compute how many tokens. Owns the rows, the blocks and the queues.

    Sequences that run ahead are in the AheadSet, and cost nothing per step while they need no block. Paced sequences
    are planned one by one when they are due: PacedSet knows which are.
    """

    def __init__(self, cache: CacheConfig, config: SchedulerConfig) -> None:
        self.policy, self.rows = make_policy(config), RowTable(config.num_rows)
        self._is_grouped = not cache.groups.is_plain
        parts = make_parts(cache, config, self.policy, self.rows)
        self.pool, self.tree, self.tiers = parts.pool, parts.tree, parts.tiers
        self.reuse, self.allocation = parts.reuse, parts.allocation
        self.new_table, self.preemption, self.pins = parts.allocation.new_table, parts.preemption, parts.pins
        self.compute_time = parts.compute_time
        self.paced = PacedSet(self.rows, self.pool, cache.block_size)
        self.waiting, self.running = GroupQueue(self.policy.key), RunningGroups(self.policy.key)
        self.num_preemptions = 0
        self.block_size, self._budget = cache.block_size, config.max_num_batched_tokens
        self.micro_batches = MicroBatches(config.micro_batches, config.num_rows, cache.block_size)
        self.micro_batch, self.ahead = 0, self.micro_batches.sets[0]  # of the current plan, or of the last one
        self.adapters = AdapterSlots(config.adapter_slots, config.host_adapters)
        self.prefill = Prefill(self, self._budget, 0 if config.images is None else config.images.max_encoded_tokens)
        self.stride = 1  # ticks by which the current plan advances the AheadSet; 0 while decoding is paused
        self.ahead_rows: Ints = NO_ROWS  # the rows of the last plan that run ahead: the first of its decode_rows
        self.masks: Masks | None = None  # the masks of the last plan, as far as they were known when it was made
        self._released: list[int] = []
        self.num_plans = 0
        self.now = 0.0  # seconds on the engine's clock at which the current plan was begun

    # ------------------------------------------------------------------------------------------ adding and ending
    def add(self, group: Group) -> None:
        """Put a new or preempted group into the waiting queue."""
        group.queued_step, group.wait_reason = self.num_plans, ""
        self.waiting.add(group)
        try:
            self.policy.added(group, self)
        except Exception:
            self.waiting.remove(group)  # the request is refused
            raise

    def end(self, sequence: Sequence, *, keep: bool = True) -> list[int]:
        """Free the row and the blocks of a sequence, and return its outputs. The caller updates the group.

        With `keep`, its full blocks stay in the prefix cache.
        """
        if sequence.row is not None:
            row = self._release_row(sequence)
            if keep:
                self.reuse.publish_last(sequence, row)
        else:
            self.tiers.release_swapped(sequence)
        sequence.table.free()
        if sequence.controller is not PLAIN:
            sequence.controller.close()
        return sequence.outputs

    def remove(self, group: Group) -> None:
        """Take a group out of its queue and of all indexes. Its sequences have no rows any more."""
        if group.is_running:
            self.running.remove(group)
            self.prefill.remove(group)
        else:
            self.waiting.remove(group)
            self.reuse.forget(group)
        self.policy.removed(group, self)
        if group.request.adapter_digest:
            self.adapters.leave(group)
        if group.num_spare:
            self.rows.reserve(-group.num_spare)
        group.is_running, group.num_spare = False, 0
        self.allocation.note_prefill(group)

    def reset_cache(self) -> int:
        """Empty the prefix cache in all tiers, pinned prefixes included. Returns how many blocks became free on the
        device."""
        self.tiers.reset()
        return self.reuse.reset() + self.pins.reset()

    # ------------------------------------------------------------------------------------- what policies look at
    @property
    def tick(self) -> int:
        """The number of steps in which sequences that run ahead advanced."""
        return self.micro_batches.tick

    @property
    def num_decoding(self) -> int:
        """How many tokens of the next step decoding sequences take."""
        return len(self.ahead) + (len(self.paced.due_in(self.micro_batch)) if self.paced.due else 0)

    @property
    def is_prefilling(self) -> bool:
        """Whether running groups owe known tokens."""
        return bool(self.prefill)

    def num_cached(self, group: Group) -> int:
        """Return how many of the tokens that a waiting group owes are in the prefix cache."""
        return self.reuse.num_cached(group)

    # ------------------------------------------------------------------------------------------------- planning
    def plan(self, now: float = 0.0, busy: Collection[int] = ()) -> StepPlan | None:
        """Return the plan of the next step, or None if nothing can be computed now. Ledger entries get the time `now`.
        The plan is of the next micro-batch that has something to compute and is not `busy`."""
        if len(self.micro_batches.sets) == 1:
            return self._plan(now)
        for number in self.micro_batches.turns(busy):
            self.micro_batch, self.ahead = number, self.micro_batches.sets[number]
            if (plan := self._plan(now)) is not None:
                self.micro_batches.note_planned(number)
                return plan
        return None

    def _plan(self, now: float) -> StepPlan | None:
        """The plan of the current micro-batch."""
        self.now = now
        self.tree.now = now
        self.pool.begin_plan()
        builder = PlanBuilder(self._budget)
        self.stride = 0 if self.policy.pauses_decoding(self) else 1
        if self.stride:
            self._decode(builder)
        if self.prefill or len(self.waiting):
            self.prefill.plan(builder)
        if not self.stride and builder.computes_only_ahead:  # no prompt can be computed, so decoding need not pause
            self.stride = 1
            self._decode(builder)
        if builder.paced_in_step:
            self.paced.add_drafts_and_masks(builder)
        self.ahead_rows = self.ahead.snapshot() if self.stride else NO_ROWS
        has_rows = len(self.ahead_rows) or not builder.computes_only_ahead
        if not (has_rows or builder.loads or self.tiers.has_transfers):
            return None
        return self._finish(builder)

    def plan_transfers(self) -> StepPlan | None:
        """Return a plan that computes nothing and carries the waiting transfers, or None if there are none."""
        if not self.tiers.has_transfers:
            return None
        self.pool.begin_plan()
        self.stride, self.ahead_rows = 0, NO_ROWS
        return self._finish(PlanBuilder(self._budget))

    def _finish(self, builder: PlanBuilder) -> StepPlan:
        """Make the plan from what the builder has collected, and advance the tick."""
        transfers, released = self.tiers.take_transfers(builder.loads), tuple(self._released)
        is_guided = self.rows.num_guided > 0 and self._samples_guided(builder)
        placements = self.adapters.take_placements() if self.adapters.placements else ()
        plan, self.masks = builder.finish(
            self.num_plans, self.ahead_rows, released, transfers, placements, self.pool, is_guided=is_guided
        )
        self._released.clear()
        self.num_plans += 1
        self.ahead.tick += self.stride
        self.reuse.plan_completed(plan.chunks)
        return plan

    def _samples_guided(self, builder: PlanBuilder) -> bool:
        """Whether a row that runs ahead under a grammar samples in the current plan, so that its sampling waits for
        masks."""
        if len(self.ahead_rows) and self.rows.guided[self.ahead_rows].any():
            return True
        rows = [row for chunk in builder.chunks for row in chunk.sample_rows if self.rows.guided[row]]
        return any(self.rows.sequence_at(row).state is SequenceState.STARTING for row in rows)

    def _decode(self, builder: PlanBuilder) -> None:
        """Plan one token for each sequence that runs ahead and for each paced sequence that is due. The rest of the
        budget is for prompts."""
        self._serve_events(builder)
        if self.paced.draining:
            self.resume_drained()
            self._serve_events(builder)
        budget = self._budget if self.prefill.passed_over else self.policy.budget(self._budget, self)
        builder.budget = budget - len(self.ahead)
        if self.paced.due:
            self._plan_due(builder)

    def _serve_events(self, builder: PlanBuilder) -> None:
        """Handle the sequences whose event is at this tick: they begin to run ahead, need a block, or must stop running
        ahead."""
        ahead_set = self.ahead
        for sequence in ahead_set.take_events():
            if sequence.ahead is None:
                continue  # it was preempted for a sequence before it
            if sequence.state is _AHEAD or sequence.num_computed >= sequence.group.limit - 1:
                self._stop_running_ahead(sequence)
                continue
            num_tokens = sequence.num_computed + 1 - sequence.table.num_tokens
            if sequence.table.fill(num_tokens) or self.grow_or_preempt(builder, sequence, num_tokens):
                if sequence.controller is PLAIN:
                    ahead_set.join(sequence)
                    continue
                builder.write(sequence)
                with self.paced.guarded(sequence.group):
                    ahead_set.join(sequence)
        if full := ahead_set.take_full():
            self._append_blocks(builder, full)

    def _append_blocks(self, builder: PlanBuilder, full: dict[int, list[int]]) -> None:
        """Append a block to the table of each of these rows, which run ahead. If enough blocks are free, as usual, all
        get theirs at once; otherwise one after the other, with preemptions."""
        ahead_set, pool = self.ahead, self.pool
        if pool.num_free >= len(full) and not self._is_grouped:
            blocks = pool.take(len(full))
            builder.grant(full, ahead_set.append_blocks(full, blocks), blocks)
            return
        for sequence in [self.rows.sequence_at(row) for row in full]:
            row = sequence.row
            if sequence.ahead is None or row is None:
                continue  # it was preempted for a sequence before it
            sequence.table.num_tokens = ahead_set.tick + sequence.base
            if self.grow_or_preempt(builder, sequence, 1):
                ahead_set.schedule(row, sequence)

    def _plan_due(self, builder: PlanBuilder) -> None:
        """Plan the tokens that each due sequence owes. There is always budget for one; others may have to wait."""
        due = sorted(self.paced.due_in(self.micro_batch), key=lambda sequence: self.policy.key(sequence.group))
        spare = max(builder.budget - len(due), 0)
        for sequence in due:
            if sequence not in self.paced.due:
                continue  # it was preempted for a sequence before it
            if not sequence.is_introduced:
                builder.introduce(sequence)
            more = min(sequence.num_tokens - sequence.num_computed - 1, spare)
            end, spare = sequence.num_computed + 1 + more, spare - more
            if self.grow_or_preempt(builder, sequence, end - sequence.table.num_tokens):
                builder.sync_blocks(sequence)
                self.paced.plan_owed(builder, sequence, end)

    # --------------------------------------------------------------------------------------------- preempting
    def grow_or_preempt(self, builder: PlanBuilder, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for more tokens in a sequence's block table. While blocks are missing, preempt a running group.

        Returns False if that was the sequence's own group.
        """
        assert sequence.row is not None
        while True:
            try:
                if self._is_grouped:
                    self._append(builder, sequence.row, sequence, num_tokens)
                else:
                    builder.append(sequence.row, sequence.table, num_tokens)
                return True
            except OutOfBlocks:
                victim = self.running.last() or sequence.group  # the least urgent one by the policy's key
                self.preempt(builder, victim)
                if victim is sequence.group:
                    return False

    def _append(self, builder: PlanBuilder, row: int, sequence: Sequence, num_tokens: int) -> None:
        """Make room for more tokens in a table of windows and states. Raises OutOfBlocks and changes nothing."""
        table = sequence.table
        assert isinstance(table, GroupedTable)
        is_prompt, end = sequence.state is SequenceState.PREFILL, table.num_tokens + num_tokens
        start = sequence.num_computed if sequence.ahead is None else end - 1
        table.check_slot()
        table.leave_window(start)
        builder.append(row, table, num_tokens)
        last = (sequence.num_tokens - 1) // self.block_size * self.block_size if is_prompt else 0
        lasting = (last, sequence.group.num_known)
        builder.move_state(row, table.plan_states(start, end, lasting, trails=not is_prompt))

    def preempt(self, builder: PlanBuilder, group: Group) -> None:
        """Take a running group out of the plan, its rows and its blocks, and put it back into the waiting queue."""
        before = builder.drop(sequence.row for sequence in group.live if sequence.row is not None)
        for sequence in group.live:
            row = self._release_row(sequence)
            sequence.num_computed = before.get(row, sequence.num_computed)
        self.reuse.publish_group(group, leaving=True)
        num_tokens = accounts.num_computed(group)
        how = self.preemption.free_blocks(group, builder, num_tokens)
        builder.drop_loads(self.pool)
        num_owed = 0 if any(sequence.num_swapped for sequence in group.live) else num_tokens
        group.ledger.note("preempted", self.now, num_owed, f"no free blocks; {how}")
        self.remove(group)
        group.num_preemptions += 1
        self.num_preemptions += 1
        self.add(group)

    # -------------------------------------------------------------------------------- between running ahead and paced
    def _stop_running_ahead(self, sequence: Sequence) -> None:
        """Stop a sequence from running ahead. If it is not at its limit, it continues when its results have come."""
        if sequence.ahead is not None:
            sequence.ahead.leave(sequence)
        sequence.state = SequenceState.DRAINING
        if sequence.num_computed < sequence.group.limit - 1:
            self.paced.draining[sequence] = None

    def pace(self, sequence: Sequence) -> None:
        """Stop a sequence from running ahead. It is paced as soon as the results of its steps have come."""
        if sequence.state in _RUNNING_AHEAD:
            self._stop_running_ahead(sequence)

    def continue_decoding(self, sequence: Sequence) -> None:
        """Let a sequence whose tokens are all known compute its next one: it runs ahead from here, or is paced and
        due. It is due if it owes more tokens than its last one."""
        if sequence.num_computed == sequence.num_tokens - 1 and self.paced.num_ahead(sequence):
            self.micro_batches.of(sequence).start(sequence)
        else:
            self.paced.add(sequence)

    def resume_drained(self) -> None:
        """Continue the sequences that stopped running ahead and whose results have all come."""
        for sequence in self.paced.take_drained():
            self.continue_decoding(sequence)

    def _release_row(self, sequence: Sequence) -> int:
        if sequence.ahead is not None:
            sequence.ahead.leave(sequence)
        if sequence.controller is not PLAIN:
            self.paced.discard(sequence)
        self.reuse.leave(sequence)
        sequence.state, sequence.is_introduced = _WAITING, False
        row = self.rows.release(sequence)
        self._released.append(row)
        return row

    def drop_beam(self, sequence: Sequence) -> None:
        """End a beam without children. Its row stays reserved for another beam of the group."""
        self.end(sequence, keep=False)
        sequence.group.live.remove(sequence)
        sequence.group.num_spare += 1
        self.rows.reserve(1)

    def note_token(self, group: Group) -> None:
        """Note that the first token of a group came: its LoRA adapter is in its slot, and what was computed with it is
        right."""
        for proven in self.adapters.note_token(group) if group.held_chunks is not None else ():
            held, proven.held_chunks = proven.held_chunks or (), None
            for sequence, chunk in held:
                if sequence.row == chunk.row:
                    owners = ((row, self.rows.sequences[row]) for row in chunk.sample_rows)
                    rows = tuple(row for row, owner in owners if owner is not None and owner.group is proven)
                    self.reuse.note_computed(sequence, chunk._replace(sample_rows=rows))

    # ----------------------------------------------------------------------------------------------- accounts
    def note_step(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        """Learn from the time that a step of `num_tokens` tokens took."""
        self.policy.note_step(num_tokens, seconds)
        self.compute_time.note_step(plan, num_tokens, seconds)

    def slots_used(self) -> int:
        """Return how many token slots hold a computed token. Shared slots count once."""
        num_held = self.pool.num_used - len(self.allocation.kept)
        return accounts.slots_used(self.running, self.pool, num_held, self.block_size)

    def block_map(self, step: int) -> BlockMap:
        """Return the holders of all blocks, and the blocks of each live request, running requests first."""
        pool, groups = self.pool, (*self.running, *self.waiting)
        evictable = accounts.in_memory(self.tree.evictable_blocks(), pool)
        holders, requests = accounts.block_holders(groups, pool, self.pins), accounts.request_blocks(groups, pool)
        return BlockMap(step, self.block_size, holders, requests, evictable)

    def check_idle(self) -> None:
        """Raise RuntimeError if blocks or rows are held though no request is live: a leak. Costs nothing."""
        num_held = self.pool.num_used - self.pins.num_blocks
        if num_held or self.rows.num_taken:
            raise RuntimeError(f"{num_held} blocks and {self.rows.num_taken} rows are held though no request is live")

    def check(self) -> None:
        """Assert that every block is held exactly by the tables that list it, and that rows, queues and AheadSet
        agree."""
        self.pool.check(len(self.tree))
        for owner in (self.reuse, self.tiers, self.rows, self.waiting, self.paced):
            owner.check()
        accounts.check_blocks(self.running, self.pool, self.allocation.kept, self.pins, self.tree)
        self.micro_batches.check(self.running)
        accounts.check_groups(self.running, self.waiting, self.rows, sum(map(len, self.micro_batches.sets)))
        self.adapters.check(self.running, self.waiting)
