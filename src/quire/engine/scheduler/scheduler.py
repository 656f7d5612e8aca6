"""Tokens owed -> StepPlan. There are no phases: a prompt chunk, a decode and a recomputation are owed tokens alike."""

from __future__ import annotations

from collections import defaultdict

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.decoding.group import Group, Sequence
from quire.engine.kvcache.prefixes import NO_MATCH, Match, make_prefixes
from quire.engine.kvcache.table import BlockTable
from quire.engine.scheduler.draft import PlanDraft
from quire.engine.scheduler.policies.registry import find_policy
from quire.engine.scheduler.preemption import Preemption, Recompute
from quire.engine.scheduler.queue import GroupQueue
from quire.engine.scheduler.rows import DecodeSet, RowBook
from quire.types.errors import OutOfBlocks
from quire.types.stats import RequestBlocks
from quire.types.step import Chunk, StepPlan


class Scheduler:
    """Decides every step anew which sequences compute how many tokens, and owns rows, blocks and queues for it.

    Steady decoding costs nothing per sequence: all members of the decode set advance by one token per tick, and
    a sequence is looked at again only at the tick where it needs a block or has all its tokens.
    """

    def __init__(self, cache: CacheConfig, config: SchedulerConfig, preemption: Preemption | None = None) -> None:
        policy = self._policy = find_policy(config.policy)
        self.pool, self._prefixes = make_prefixes(
            cache.num_blocks, cache.block_size, enabled=cache.enable_prefix_caching
        )
        self.rows = RowBook(config.num_rows)
        self.waiting, self.running = GroupQueue(policy), GroupQueue(policy)
        self.num_preemptions = self.prefix_queries = self.prefix_hits = 0  # the latter two in prompt tokens
        self._block_size, self._has_cache = cache.block_size, cache.enable_prefix_caching
        self._budget = config.max_num_batched_tokens
        self._preemption = preemption or Recompute()
        self._decoding = DecodeSet(config.num_rows)
        self._owing: dict[Group, None] = {}  # running groups with known tokens to compute, in no order
        self._tick = 0  # steps in which the decode set has advanced
        self._events: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._released: list[int] = []
        self._step = 0
        self._now = 0.0  # when the plan in work was begun, on the engine's clock
        self._stopped_step, self._stopped_for = -1, ""  # when and why a waiting group was last not let in

    # ------------------------------------------------------------------------------------------ coming and going
    def new_table(self) -> BlockTable:
        return BlockTable(self.pool, self._block_size)

    def add(self, group: Group) -> None:
        group.queued_step = self._step
        self.waiting.add(group)

    def end(self, sequence: Sequence, *, keep: bool = True) -> list[int]:
        """Free all that a sequence holds, row and blocks; return its outputs. The group is left to the caller.

        `keep`: what it generated can be found by later prompts.
        """
        if sequence.row is not None:
            self._leave_row(sequence)
            if keep:
                self._keep(sequence, leaving=True)
        sequence.table.free()
        return sequence.outputs

    def remove(self, group: Group) -> None:
        """Forget a group that has no live sequences."""
        (self.running if group.running else self.waiting).remove(group)
        self._owing.pop(group, None)
        group.running = False

    def reset_cache(self) -> int:
        """Forget cached prefixes; returns how many blocks that freed. What is held now is not found again either."""
        return self._prefixes.reset()

    # ------------------------------------------------------------------------------------------------- planning
    def plan(self, now: float = 0.0) -> StepPlan | None:
        """The next step, or None when nothing can be computed now. `now` is what ledgers say of it."""
        self._now = now
        draft = PlanDraft(self._budget)
        self._serve_events(draft)
        draft.budget -= len(self._decoding)
        for group in sorted(self._owing, key=self._policy):
            if group.running and draft.budget > 0:
                self._compute_owed(draft, group)
        self._admit(draft)
        if draft.is_idle and not len(self._decoding):
            return None
        plan = draft.finish(self._step, self._decoding.snapshot(), tuple(self._released))
        self._released.clear()
        self._step += 1
        self._tick += 1
        for chunk in plan.chunks:  # what this step computes, later ones may read
            sequence = self.rows.sequences[chunk.row]
            assert sequence is not None
            self._keep(sequence)
        return plan

    def _serve_events(self, draft: PlanDraft) -> None:
        """Sequences that begin to decode, need a block, or have their last token on the way."""
        tick, events, size = self._tick, self._events, self._block_size
        for sequence in events.pop(tick, ()):
            if sequence.event != tick or sequence.row is None:
                continue  # it left since
            last = sequence.group.limit - 1
            position = tick + sequence.base if sequence.decoding else sequence.computed
            if position >= last:
                self._stop_decoding(sequence)
                continue
            if sequence.decoding and self.pool.num_free:  # its blocks are full: the rule in steady decoding
                capacity = draft.append_block(sequence.row, sequence.table) * size
            elif self._grow(draft, sequence, position + 1 - sequence.table.num_tokens):
                if not sequence.decoding:
                    self._start_decoding(sequence)
                capacity = sequence.table.capacity
            else:
                continue
            sequence.event = event = (capacity if capacity < last else last) - sequence.base
            events[event].append(sequence)

    def _compute_owed(self, draft: PlanDraft, group: Group) -> None:
        """Hand a running group's owed tokens their share of the budget."""
        if not group.forked and not group.leader.introduced:  # at admission, or when the leader before it was ended
            self._introduce(draft, group)
        if not group.forked:
            leader = group.leader
            target = leader.num_known if len(group.live) == 1 else group.num_prompt
            if not self._compute_chunk(draft, leader, target) or leader.computed < target:
                return
            self._fork(draft, group)  # its own tokens wait a step: a tail is copied before a forward, not within
        else:
            for sequence in group.live:
                owes = sequence.computed < sequence.num_known and draft.budget > 0
                if owes and not self._compute_chunk(draft, sequence, sequence.num_known):
                    return
        if all(sequence.computed == sequence.num_known for sequence in group.live):
            self._owing.pop(group)

    def _introduce(self, draft: PlanDraft, group: Group) -> None:
        """Tell the workers of a group's leader, or of all its samples where each finds its own prompt and more."""
        samples, found = group.live, [NO_MATCH]
        if len(samples) > 1 and all(sequence.outputs for sequence in samples):
            found = [self._find(sequence, sequence.num_known - 1) for sequence in samples]
            group.forked = all(match.num_tokens >= group.num_prompt for match in found)
        if not group.forked:
            samples, found = samples[:1], [self._find_first(group)]
        for sequence, match in zip(samples, found, strict=True):
            self._prefixes.adopt(sequence.table, match)
            sequence.computed = match.num_tokens
            draft.add_row(sequence)
        if num_found := self._num_computed(group):
            group.ledger.note("cached", self._now, num_found)
        if group.num_cached is None:
            group.num_cached = min(num_found, group.num_prompt)
            self.prefix_hits += group.num_cached
            self.prefix_queries += group.num_prompt if self._reads_cache(group) else 0

    def _compute_chunk(self, draft: PlanDraft, sequence: Sequence, target: int) -> bool:
        """False when the group had to give up its blocks."""
        start = sequence.computed
        count = min(target - start, draft.budget)
        if not self._grow(draft, sequence, start + count - sequence.table.num_tokens):
            return False
        assert sequence.row is not None
        sequence.computed = start + count
        samplers: tuple[Sequence, ...] = ()
        if sequence.computed == target:
            siblings = (sequence,) if sequence.group.forked else tuple(sequence.group.live)
            samplers = tuple(each for each in siblings if each.num_known == target)
        sequence.group.ledger.note("chunk", self._now, count)
        draft.compute(Chunk(sequence.row, start, count, tuple(each.row for each in samplers if each.row is not None)))
        for each in samplers:
            self._set_event(each, self._tick + 1)
        return True

    def _fork(self, draft: PlanDraft, group: Group) -> None:
        """The prompt is computed: every other sequence shares its blocks."""
        leader = group.leader
        for sequence in group.live[1:]:
            sequence.table = leader.table.fork()
            sequence.computed = leader.computed
            draft.add_row(sequence)
        group.forked = True

    def _admit(self, draft: PlanDraft) -> None:
        """Let waiting groups in, in order, while rows, budget and blocks last; nothing that runs is disturbed."""
        while (group := self.waiting.first()) is not None:
            obstacle = self._obstacle(draft, group)
            if obstacle is not None:
                self._stopped_step, self._stopped_for = self._step, obstacle
                return
            has_waited = self._stopped_step >= group.queued_step
            group.ledger.note("admitted", self._now, note=f"waited: {self._stopped_for}" if has_waited else "")
            self.waiting.remove(group)
            self.running.add(group)
            group.running, group.forked = True, False
            for sequence in group.live:
                self.rows.seat(sequence)
            self._owing[group] = None
            self._compute_owed(draft, group)

    def _obstacle(self, draft: PlanDraft, group: Group) -> str | None:
        """What keeps a waiting group out of this step."""
        if draft.budget <= 0:
            return "token budget"
        if len(group.live) > self.rows.num_free:
            return "no free row"
        return None if self._has_blocks_for(group) else "no free blocks"

    def _has_blocks_for(self, group: Group) -> bool:
        """Room for all the group knows, and a block for each live sequence, so that it is not thrown out at once."""
        if not len(self.running):
            return True
        size, prompt = self._block_size, group.num_prompt
        own = sum(-(-sequence.num_known // size) - prompt // size for sequence in group.live)
        headroom = len(self.rows.sequences) - self.rows.num_free
        missing = prompt // size + own + headroom - self.pool.num_free
        if 0 < missing <= prompt // size:  # blocks it would share with those who run cost nothing
            missing -= sum(self.pool.holders(node.block) > 0 for node in self._find_first(group).nodes)
        return missing <= 0

    # ------------------------------------------------------------------------------------------ the prefix cache
    def _find_first(self, group: Group) -> Match:
        """What is cached of the tokens that the leader computes first; the last of them is always computed anew."""
        target = group.leader.num_known if len(group.live) == 1 else group.num_prompt
        return self._find(group.leader, target - 1)

    def _find(self, sequence: Sequence, limit: int) -> Match:
        if not self._reads_cache(sequence.group):
            return NO_MATCH
        return self._prefixes.find(sequence.group.request.cache_salt, sequence.known, limit)

    def _reads_cache(self, group: Group) -> bool:
        """Where prompt logprobs are asked for, every position must be computed."""
        return self._has_cache and group.request.sampling.prompt_logprobs is None

    def _keep(self, sequence: Sequence, *, leaving: bool = False) -> None:
        """Let others find the blocks whose tokens are known and computed by the steps planned so far."""
        num_tokens = min(sequence.computed, sequence.num_known)
        salt = sequence.group.request.cache_salt
        self._prefixes.keep(sequence.table, salt, sequence.known, num_tokens, leaving=leaving)

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
        before = self._num_computed(group)
        for sequence in group.live:
            self._keep(sequence, leaving=True)
            self._preemption.vacate(sequence)
        group.ledger.note("preempted", self._now, before - self._num_computed(group), "no free blocks")
        self.remove(group)
        group.num_preemptions += 1
        self.num_preemptions += 1
        self.add(group)

    # ----------------------------------------------------------------------------------------- the decode set
    def _start_decoding(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        sequence.base, sequence.decoding = sequence.computed - self._tick, True
        self._decoding.add(sequence.row)

    def _stop_decoding(self, sequence: Sequence) -> None:
        if sequence.decoding and sequence.row is not None:
            sequence.computed, sequence.decoding = self._tick + sequence.base, False
            self._decoding.discard(sequence.row)

    def _leave_row(self, sequence: Sequence) -> int:
        self._stop_decoding(sequence)
        sequence.event, sequence.introduced = -1, False
        row = self.rows.unseat(sequence)
        self._released.append(row)
        return row

    def _set_event(self, sequence: Sequence, tick: int) -> None:
        sequence.event = tick
        self._events[tick].append(sequence)

    # ----------------------------------------------------------------------------------------------- accounts
    def slots_used(self) -> int:
        """Token slots that hold a computed token, shared ones counted once."""
        used, num_held = 0, 0
        tails: defaultdict[int, list[int]] = defaultdict(list)  # partial tails that are shared -> tokens of each holder
        for group in self.running:
            for sequence in group.live:
                computed = self._tick + sequence.base if sequence.decoding else sequence.computed
                blocks = sequence.table.blocks
                used += computed
                num_held += len(blocks)
                if (filled := computed % self._block_size) and self.pool.holders(blocks[-1]) > 1:
                    tails[blocks[-1]].append(filled)
        counted_again = (num_held - self.pool.num_used) * self._block_size
        for each in tails.values():
            counted_again -= (len(each) - 1) * self._block_size - (sum(each) - max(each))
        return used - counted_again

    def request_blocks(self) -> tuple[RequestBlocks, ...]:
        """What every live request holds, running ones first."""
        found = []
        for group in (*self.running, *self.waiting):
            state = "running" if group.running else "preempted" if group.num_preemptions else "waiting"
            blocks = tuple(dict.fromkeys(block for sequence in group.live for block in sequence.table.blocks))
            found.append(RequestBlocks(group.request.request_id, state, self._num_computed(group), blocks))
        return tuple(found)

    def _num_computed(self, group: Group) -> int:
        """Tokens a group has computed, a prompt that its sequences share counted once."""
        each = [self._tick + one.base if one.decoding else one.computed for one in group.live]
        shared = min(group.num_prompt, *each) * (len(each) - 1) if group.forked and len(each) > 1 else 0
        return sum(each) - shared

    def check_idle(self) -> None:
        """With no request left, nothing may be held; a leak is an error now, not a slow death. Costs nothing."""
        rows = len(self.rows.sequences) - self.rows.num_free
        if self.pool.num_used or rows:
            raise RuntimeError(f"{self.pool.num_used} blocks and {rows} rows are held by nobody")

    def check(self) -> None:
        """Every block is held exactly by the tables that list it; rows, queues and decode set agree."""
        for owner in (self.pool, self._prefixes, self.rows, self.waiting, self.running, self._decoding):
            owner.check()
        held: defaultdict[int, int] = defaultdict(int)
        for group in self.running:
            assert group.running
            assert group.live
            for sequence in group.live:
                self._check_sequence(sequence)
                for block in sequence.table.blocks:
                    held[block] += 1
        for group in self.waiting:
            assert not group.running
            assert all(s.row is None and not s.table.blocks for s in group.live)
        assert all(self.pool.holders(block) == held[block] for block in range(self.pool.num_blocks))
        assert sum(s is not None for s in self.rows.sequences) == sum(len(group.live) for group in self.running)

    def _check_sequence(self, sequence: Sequence) -> None:
        sequence.table.check()
        assert sequence.row is not None
        assert self.rows.sequences[sequence.row] is sequence
        assert sequence.decoding == (sequence.row in self._decoding)
        computed = self._tick + sequence.base if sequence.decoding else sequence.computed
        assert sequence.table.num_tokens <= computed <= sequence.table.capacity
        assert computed < sequence.group.limit
