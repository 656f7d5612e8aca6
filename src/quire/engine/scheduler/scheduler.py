"""Tokens owed -> StepPlan. There are no phases: prompt chunk, decode, draft and recomputation are owed tokens alike."""

from __future__ import annotations

from collections import defaultdict

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.decoding.group import Group, Sequence
from quire.engine.decoding.pace import PLAIN
from quire.engine.kvcache.pins import Pins
from quire.engine.scheduler import accounts
from quire.engine.scheduler.budget import chunk_size, held_back
from quire.engine.scheduler.draft import PlanDraft
from quire.engine.scheduler.memory import furnish
from quire.engine.scheduler.paced import PacedSet
from quire.engine.scheduler.policies.registry import make_policy
from quire.engine.scheduler.queue import GroupQueue
from quire.engine.scheduler.rows import DecodeSet, RowBook
from quire.types.errors import OutOfBlocks
from quire.types.stats import RequestBlocks
from quire.types.step import NO_ROWS, Chunk, Ints, StepPlan


class Scheduler:
    """Decides every step anew which sequences compute how many tokens, and owns rows, blocks and queues for it.

    Steady decoding costs nothing per sequence: all members of the decode set advance by one token per tick, and
    a sequence is looked at again only at the tick where it needs a block or has all its tokens. A paced sequence is
    planned when it is due: `paced` knows who is, and `go_on` makes it so.
    """

    def __init__(self, cache: CacheConfig, config: SchedulerConfig) -> None:
        self.policy, self.rows = make_policy(config), RowBook(config.num_rows)
        has = furnish(cache, config, self.policy, self.rows)
        self.pool, self.tiers, self.inheritance, self._memory = has.pool, has.tiers, has.inheritance, has.memory
        self._prefixes, self._compute, self._prefetch = has.prefixes, has.compute, has.prefetch
        self.new_table, self.preemption = has.memory.new_table, has.preemption
        self.pins = Pins(self._prefixes, self.pool, cache.block_size, has_cache=cache.enable_prefix_caching)
        self.paced = PacedSet(self.rows, self.pool, cache.block_size)
        self.waiting, self.running = GroupQueue(self.policy.key), GroupQueue(self.policy.key)
        self.num_preemptions = 0
        self.block_size, self._budget = cache.block_size, config.max_num_batched_tokens
        self._decoding = DecodeSet(config.num_rows)
        self._owing: dict[Group, None] = {}  # running groups with known tokens to compute, in no order
        self.tick = 0  # steps in which the decode set has advanced
        self._stride = 1  # by how many ticks the plan in work advances it: 0 while it is paused
        self.ahead_rows: Ints = NO_ROWS  # those that run ahead in the last plan, the first of its decode_rows
        self._events: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._released: list[int] = []
        self._step = 0
        self._now = 0.0  # when the plan in work was begun, on the engine's clock
        self._stopped_step, self._stopped_for = -1, ""  # when and why a waiting group was last not let in

    # ------------------------------------------------------------------------------------------ coming and going
    def add(self, group: Group) -> None:
        group.queued_step = self._step
        self.waiting.add(group)
        self.policy.added(group, self)

    def end(self, sequence: Sequence, *, keep: bool = True) -> list[int]:
        """Free all that a sequence holds, row and blocks; return its outputs. The group is left to the caller.

        `keep`: what it generated can be found by later prompts.
        """
        if sequence.row is not None:
            self._leave_row(sequence)
            if keep:
                self.inheritance.leave(sequence, leaving=True)
        else:
            self.tiers.unpark(sequence)
        sequence.table.free()
        return sequence.outputs

    def remove(self, group: Group) -> None:
        """Forget a group whose sequences have left their rows."""
        (self.running if group.running else self.waiting).remove(group)
        self.policy.left(group, self)
        self._owing.pop(group, None)
        self._prefetch.forget(group)
        self.rows.reserve(-group.num_spare)
        group.running, group.num_spare = False, 0

    def reset_cache(self) -> int:
        """Forget cached prefixes in all tiers, pinned ones too; returns how many blocks that freed on the device."""
        self.tiers.reset()
        return self._prefixes.reset() + self.pins.reset()

    # ------------------------------------------------------------------------------------- what policies look at
    @property
    def num_decoding(self) -> int:
        """Tokens that those that decode take of the next step."""
        return len(self._decoding) + len(self.paced.due)

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens of running groups are still to be computed."""
        return bool(self._owing)

    def num_cached(self, group: Group) -> int:
        """How many of the tokens that a waiting group owes are in the prefix cache."""
        return self.inheritance.find_first(group).num_tokens

    # ------------------------------------------------------------------------------------------------- planning
    def plan(self, now: float = 0.0) -> StepPlan | None:
        """The next step, or None when nothing can be computed now. `now` is what ledgers say of it."""
        self._now = now
        draft = PlanDraft(self._budget)
        self._stride = 0 if self.policy.pauses(self) else 1
        if self._stride:
            self._decode(draft)
        if self._owing or len(self.waiting):
            self._prefetch.look(self)
            self._prefill(draft)
        if not self._stride and draft.is_idle:  # there is nothing to pause for
            self._stride = 1
            self._decode(draft)
        self.ahead_rows = self._decoding.snapshot() if self._stride else NO_ROWS
        if draft.is_idle and not len(self.ahead_rows) and not draft.loads and not self.tiers.has_orders:
            return None
        plan = draft.finish(self._step, self.ahead_rows, tuple(self._released), self.tiers.take_orders(draft.loads))
        self._released.clear()
        self._step += 1
        self.tick += self._stride
        self.inheritance.settle(plan.chunks)
        return plan

    def _decode(self, draft: PlanDraft) -> None:
        """One token for each that runs ahead, and what is due; the rest of the budget is for prompts."""
        self._serve_events(draft)
        if self.paced.landing:
            self.take_landed()
            self._serve_events(draft)
        draft.budget = self.policy.budget(self._budget, self) - len(self._decoding)
        if self.paced.due:
            self._compute_due(draft)

    def _prefill(self, draft: PlanDraft) -> None:
        """What running groups owe, and whom to let in besides."""
        if self._owing:
            held = 0
            draft.prompts.update(self._owing)
            if len(self.waiting) and self._candidate(draft)[0] is not None:
                first = self.waiting.head(self.rows.num_free)
                held = held_back(draft.budget, self._owing, first, self.policy.goes_before)
            draft.budget -= held
            for group in sorted(self._owing, key=self.policy.key):
                if group.running and draft.budget > 0:
                    self._compute_owed(draft, group)
            draft.budget += held
        self._admit(draft)

    def _serve_events(self, draft: PlanDraft) -> None:
        """Sequences that begin to decode, need a block, or have run as far as they may."""
        tick, events, size = self.tick, self._events, self.block_size
        for sequence in events.pop(tick, ()):
            if sequence.event != tick or sequence.row is None:
                continue  # it left since
            if sequence.decoding:
                position, last = tick + sequence.base, sequence.until
            else:
                position, last = sequence.computed, sequence.group.limit - 1
            if position >= last:
                self._land(sequence)
                continue
            if sequence.decoding and self.pool.num_free:  # its blocks are full: the rule in steady decoding
                capacity = draft.append_block(sequence.row, sequence.table) * size
            elif self._grow(draft, sequence, position + 1 - sequence.table.num_tokens):
                if not sequence.decoding:
                    if sequence.pacer is not PLAIN:
                        draft.write(sequence)
                    last = self._start_decoding(sequence)
                capacity = sequence.table.capacity
            else:
                continue
            sequence.event = event = (capacity if capacity < last else last) - sequence.base
            events[event].append(sequence)

    def _compute_due(self, draft: PlanDraft) -> None:
        """The token that each paced sequence owes, for which there is always budget, and drafts with what is left."""
        due = sorted(self.paced.due, key=lambda sequence: self.policy.key(sequence.group))
        draft.budget -= len(due)
        for sequence in due:
            if sequence not in self.paced.due:
                continue  # preempted for one before it
            if not sequence.introduced:
                draft.add_row(sequence)
            if self._grow(draft, sequence, sequence.num_known - sequence.table.num_tokens):
                draft.tell(sequence)
                self.paced.compute(draft, sequence)

    def _compute_owed(self, draft: PlanDraft, group: Group) -> None:
        """Hand a running group's owed tokens their share of the budget."""
        is_new = not group.forked and not group.leader.introduced  # let in just now, or its last leader was ended
        if is_new and self.inheritance.introduce(draft, group, self.tick, self._now):
            return
        if not group.forked:
            leader = group.leader
            target = leader.num_known if len(group.live) == 1 else group.num_prompt
            if not self._compute_chunk(draft, leader, target) or leader.computed < target:
                return
            draft.fork(group)  # its own tokens wait a step: a tail is copied before a forward, not within
        else:
            for sequence in group.live:
                target = sequence.target
                owes = not sequence.begun and sequence.computed < target and draft.budget > 0
                if owes and not self._compute_chunk(draft, sequence, target):
                    return
        waiting = [sequence for sequence in group.live if not sequence.begun]
        if all(sequence.computed == sequence.target for sequence in waiting):
            self._owing.pop(group)
            for sequence in waiting:
                self.paced.add(sequence)

    def _compute_chunk(self, draft: PlanDraft, sequence: Sequence, target: int) -> bool:
        """False when the group had to give up its blocks."""
        start = sequence.computed
        count = chunk_size(target - start, draft.budget, self._budget, alone=not self.num_decoding)
        if not self._grow(draft, sequence, start + count - sequence.table.num_tokens):
            return False
        assert sequence.row is not None
        sequence.computed = start + count
        sequence.group.ledger.note("chunk", self._now, count)
        samplers: tuple[Sequence, ...] = ()
        if sequence.computed == target:
            siblings = (sequence,) if sequence.group.forked else tuple(sequence.group.live)
            samplers = tuple(each for each in siblings if each.num_known == target)
        guess = self._begin(draft, samplers, draft.budget - count)
        sequence.computed += len(guess)
        rows = tuple(each.row for each in samplers if each.row is not None)
        draft.compute(Chunk(sequence.row, start, count + len(guess), rows, 1 + len(guess)))
        return True

    def _begin(self, draft: PlanDraft, samplers: tuple[Sequence, ...], room: int) -> tuple[int, ...]:
        """Sequences take their first sample. Returns what a lone one is guessed to say, for the same step to verify."""
        guess: tuple[int, ...] = ()
        for sequence in samplers:
            group, sequence.begun = sequence.group, True
            sequence.paced = not sequence.pacer.num_ahead
            if not sequence.paced:
                self._set_event(sequence, self.tick + self._stride)
                continue
            is_alone = group.forked or len(group.live) == 1
            guess = self.paced.guess(
                draft, sequence, room if is_alone and group.sampling.prompt_logprobs is None else 0
            )
        if guess:
            draft.write(samplers[0], guess)
        return guess

    def _admit(self, draft: PlanDraft) -> None:
        """Let waiting groups in, in order, while rows, budget and blocks last; nothing that runs is disturbed."""
        while len(self.waiting):
            group, obstacle = self._candidate(draft)
            if group is None:
                self._stopped_step, self._stopped_for = self._step, obstacle
                return
            has_waited = self._stopped_step >= group.queued_step
            group.ledger.note("admitted", self._now, note=f"waited: {self._stopped_for}" if has_waited else "")
            self.waiting.remove(group)
            self.running.add(group)
            group.running, group.forked = True, False
            for sequence in group.live:
                self.rows.seat(sequence)
            group.num_spare = group.num_beams_to_come
            self.rows.reserve(group.num_spare)
            self._memory.claim(group)
            self.policy.admitted(group, self)
            self._owing[group] = None
            self._compute_owed(draft, group)
            self._prefetch.forget(group)

    def _candidate(self, draft: PlanDraft) -> tuple[Group | None, str]:
        """Who is let in next; or None, and what keeps everybody out of this step."""
        if draft.budget <= 0 or self.rows.num_free <= 0:
            return None, "token budget" if draft.budget <= 0 else "no free row"
        if (group := self.policy.choose(self)) is None:
            return None, "not its turn"
        if group in draft.prompts:  # nobody is let in twice
            return None, "preempted in this step"
        if len(group.live) + group.num_beams_to_come > self.rows.num_free:
            return None, "no free row"
        if delay := self._prefetch.delay(group, self._now) or self.inheritance.delay(group, draft.prompts):
            return None, delay
        return (group, "") if self._memory.has_room(group, self.running) else (None, "no free blocks")

    # --------------------------------------------------------------------------------------------- preempting
    def _grow(self, draft: PlanDraft, sequence: Sequence, num_tokens: int) -> bool:
        """Room for more tokens, taken from less urgent groups if need be. False when its own group was the victim."""
        assert sequence.row is not None
        while True:
            try:
                draft.append(sequence.row, sequence.table, num_tokens)
                return True
            except OutOfBlocks:
                victim = self.running.last() or sequence.group
                self._preempt(draft, victim)
                if victim is sequence.group:
                    return False

    def _preempt(self, draft: PlanDraft, group: Group) -> None:
        dropped = draft.drop(sequence.row for sequence in group.live if sequence.row is not None)
        for sequence in group.live:
            row = self._leave_row(sequence)
            sequence.computed = dropped.get(row, sequence.computed)
            self.inheritance.leave(sequence, leaving=True)
        num_tokens = accounts.num_computed(group, self.tick)
        how = self.preemption.vacate(group, draft, num_tokens)
        draft.drop_loads(self.pool)
        num_owed = 0 if any(sequence.parked for sequence in group.live) else num_tokens
        group.ledger.note("preempted", self._now, num_owed, f"no free blocks; {how}")
        self.remove(group)
        group.num_preemptions += 1
        self.num_preemptions += 1
        self.add(group)

    # ----------------------------------------------------------------------------------------- the decode set
    def _start_decoding(self, sequence: Sequence) -> int:
        """Returns how many tokens it computes at most before it is looked at again."""
        assert sequence.row is not None
        sequence.base, sequence.decoding = sequence.computed - self.tick, True
        sequence.until = min(sequence.group.limit - 1, sequence.computed + max(sequence.pacer.num_ahead, 1))
        self._decoding.add(sequence.row)
        return sequence.until

    def _stop_decoding(self, sequence: Sequence) -> None:
        if sequence.decoding and sequence.row is not None:
            sequence.computed, sequence.decoding, sequence.event = self.tick + sequence.base, False, -1
            self._decoding.discard(sequence.row)

    def _land(self, sequence: Sequence) -> None:
        """It has run as far as it may: to its limit, or to where its pacer must be asked again."""
        self._stop_decoding(sequence)
        if sequence.computed < sequence.group.limit - 1:
            self.paced.landing[sequence] = None

    def _leave_row(self, sequence: Sequence) -> int:
        self._stop_decoding(sequence)
        if sequence.pacer is not PLAIN:
            self.paced.discard(sequence)
        sequence.event, sequence.introduced, sequence.begun = -1, False, False
        self.inheritance.speakers.discard(sequence)
        row = self.rows.unseat(sequence)
        self._released.append(row)
        return row

    def _set_event(self, sequence: Sequence, tick: int) -> None:
        sequence.event = tick
        self._events[tick].append(sequence)

    # ---------------------------------------------------------------------------------------- paced sequences
    def go_on(self, sequence: Sequence) -> None:
        """A paced sequence that has grown computes again: it is due, or it runs ahead from here."""
        if sequence.pacer.num_ahead:
            sequence.paced = False
            self._set_event(sequence, self.tick)
        else:
            self.paced.add(sequence)

    def take_landed(self) -> None:
        """Sequences that ran ahead go on as their pacers say, once all their results came."""
        for sequence in self.paced.landed():
            self.go_on(sequence)

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
        self._compute.note_step(plan, seconds)

    def slots_used(self) -> int:
        """Token slots that hold a computed token, shared ones counted once."""
        num_held, num_pinned = self.pool.num_used - len(self._memory.kept), self.pins.num_alone
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
        queues = self.waiting, self.running, self._decoding, self.paced
        for owner in (self.pool, self._prefixes, self.tiers, self.rows, self.inheritance.speakers, *queues):
            owner.check()
        accounts.check_blocks(self.running, self.pool, self._memory.kept, self.pins)
        accounts.check_groups(self.running, self.waiting, self.rows, self._decoding, self.tick)
