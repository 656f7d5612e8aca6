"""Chunked prefill and admission: computes the known tokens that running groups owe, and admits waiting groups. The
scheduler calls it for every plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from quire.engine.decoding.controller import PLAIN
from quire.engine.decoding.group import Group, Sequence, SequenceState
from quire.engine.scheduler.adapter_host import READING
from quire.engine.scheduler.adapter_slots import NO_SLOT
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.engine.scheduler.prefetch import NEAR
from quire.types.images import PromptImage

if TYPE_CHECKING:
    from quire.engine.scheduler.scheduler import Scheduler

_PREFILL, _AWAITING = SequenceState.PREFILL, SequenceState.AWAITING  # a member of an Enum is slow to look up
_LOOK_AHEAD = 32  # waiting groups considered when running prompts leave part of the budget
_SHORT = 4  # a prompt is short relative to one that owes this many times as much
_SHARE = 2  # at most 1 / _SHARE of the budget is left to short prompts, or used by a prompt while others decode


class Prefill:
    """Gives a step's token budget to known tokens: prompts, and preempted sequences that are recomputed. Admits waiting
    groups while rows, budget and blocks last."""

    def __init__(self, scheduler: Scheduler, budget: int, max_encoded: int = 0) -> None:
        self._scheduler, self._budget = scheduler, budget
        self._max_encoded = max_encoded  # tokens of images that a step encodes
        self._owing: dict[Group, None] = {}  # running groups that owe known tokens, in no order
        self._stopped_step, self._stopped_for = -1, ""  # the last plan in which admission stopped, and why
        self._blocked: Group | None = None  # the group for which there were too few free blocks
        self._blocked_at = 0, 0, 0  # the result of `_room` at that time
        self.passed_over: dict[Group, None] = {}  # their next image was too large for what was left of the last step

    def __bool__(self) -> bool:
        """Whether running groups of the current micro-batch still owe known tokens."""
        return bool(self._owing and self._owing_here())

    def _owing_here(self) -> dict[Group, None]:
        """Return the groups of the current micro-batch that owe known tokens."""
        scheduler = self._scheduler
        if len(scheduler.micro_batches) == 1:
            return self._owing
        return {group: None for group in self._owing if group.micro_batch == scheduler.micro_batch}

    def remove(self, group: Group) -> None:
        """Forget a group that ended or was preempted. Idempotent."""
        self._owing.pop(group, None)
        self.passed_over.pop(group, None)

    def plan(self, builder: PlanBuilder) -> None:
        """Plan the tokens that running groups owe, then admit waiting groups."""
        scheduler = self._scheduler
        self._resume_waiting()
        if self._owing and (owing := self._owing_here()):
            held, urgent = 0, self.passed_over
            self.passed_over = {}
            builder.prompts.update(owing)
            if not urgent and scheduler.waiting.num_ready and self._choose_or_defer(builder)[0] is not None:
                first = scheduler.policy.likely_next(scheduler, min(scheduler.rows.num_free, _LOOK_AHEAD))
                held = tokens_for_waiting(
                    builder.budget, owing, first, scheduler.policy.overtakes, scheduler.num_cached
                )
            builder.budget -= held
            ordered = sorted(owing, key=scheduler.policy.key)
            if urgent:
                ordered = [*urgent, *(group for group in ordered if group not in urgent)]
            for group in ordered:
                if group.is_running and builder.budget > 0:
                    self._compute_owed(builder, group)
            builder.budget += held
        self._admit(builder)

    # -------------------------------------------------------------------------------------------------- computing
    def _compute_owed(self, builder: PlanBuilder, group: Group) -> None:
        """Plan as many of a running group's owed tokens as the budget allows. A group that is new attaches its prefix
        hit first."""
        scheduler, leader = self._scheduler, group.live[0]
        is_new = not group.is_forked and not leader.is_introduced  # just admitted, or its previous leader ended
        if is_new and scheduler.reuse.attach(builder, group, scheduler.now):
            scheduler.allocation.note_prefill(group)
            return
        if not group.is_forked:
            is_single = len(group.live) == 1
            target = group.num_prompt + (len(leader.outputs) if is_single else 0)
            if not self._compute_chunk(builder, leader, target):
                return
            is_whole = leader.num_computed == target
            if not is_whole or not is_new:
                scheduler.allocation.note_prefill(group)
            if not is_whole:
                return
            if is_single:
                group.is_forked = True
                del self._owing[group]
                return
            # Their tokens wait for the next step, because blocks are copied only before a forward pass.
            builder.fork(group)
        else:
            for sequence in group.live:
                owes = sequence.state is _PREFILL and sequence.num_computed < sequence.prefill_target
                if owes and builder.budget > 0 and not self._compute_chunk(builder, sequence, sequence.prefill_target):
                    return
        unbegun = [sequence for sequence in group.live if sequence.state is _PREFILL]
        if all(sequence.num_computed == sequence.prefill_target for sequence in unbegun):
            self._owing.pop(group)
            for sequence in unbegun:
                scheduler.paced.add(sequence)

    def _compute_chunk(self, builder: PlanBuilder, sequence: Sequence, target: int) -> bool:
        """Plan the next chunk of a sequence's known tokens, up to `target`. Returns False if its group was
        preempted."""
        scheduler, start, group = self._scheduler, sequence.num_computed, sequence.group
        count = target - start
        if count > builder.budget:
            count = chunk_size(count, builder.budget, self._budget, alone=not scheduler.num_decoding)
        if group.request.images:
            if group.has_whole_images:
                count = _to_edge(group.request.images, start, count, builder.budget)
                if not count:
                    self.passed_over[group] = None
            count = self._encode_images(builder, sequence, start, count)
            if not count:
                return True  # its next image waits for a later step
        if not scheduler.grow_or_preempt(builder, sequence, start + count - sequence.table.num_tokens):
            return False
        assert sequence.row is not None
        sequence.num_computed = start + count
        group.ledger.note("chunk", scheduler.now, count)
        rows: tuple[int, ...] = ()
        if start + count == target:
            if len(group.live) == 1:
                rows = (sequence.row,)
                self._start_decoding(builder, sequence)
            else:
                live = [sequence] if group.is_forked else group.live
                sampling = [each for each in live if each.num_tokens == target and each.row is not None]
                for each in sampling:
                    self._start_decoding(builder, each)
                rows = tuple([each.row for each in sampling if each.row is not None])
        builder.compute(sequence.row, start, count, rows)
        return True

    def _encode_images(self, builder: PlanBuilder, sequence: Sequence, start: int, count: int) -> int:
        """Order the workers to encode the images in the next `count` tokens of a sequence, within the limit of the
        step. Returns how many of these tokens can be computed: those before the first image that is not encoded. The
        first image of a step is always encoded, whatever its size."""
        for image in sequence.group.request.images:
            if image.end <= max(sequence.num_encoded, start) or image.start >= start + count:
                continue
            if builder.num_encoded and builder.num_encoded + image.num_tokens > self._max_encoded:
                return max(image.start - start, 0)
            builder.num_encoded += image.num_tokens
            sequence.num_encoded = image.end
        return count

    def _start_decoding(self, builder: PlanBuilder, sequence: Sequence) -> None:
        """Start to decode a sequence, which takes its first sample in the current plan: it begins to run ahead, or it
        is paced and awaits the result."""
        scheduler = self._scheduler
        if sequence.controller is PLAIN or scheduler.paced.num_ahead(sequence):
            scheduler.ahead.start_at(sequence, scheduler.ahead.tick + scheduler.stride)
        else:
            sequence.state = _AWAITING
            builder.paced_in_step.append(sequence)

    # -------------------------------------------------------------------------------------------------- admitting
    def _resume_waiting(self) -> None:
        """Resume deferred groups that are ready again. Prefetch files for groups that are likely to be admitted
        soon."""
        scheduler, reuse = self._scheduler, self._scheduler.reuse
        if reuse.prefetch is not None:
            reuse.ready += reuse.prefetch.take_ready(scheduler.now, scheduler.policy.rank)
            reuse.prefetch.look(scheduler.policy.likely_next(scheduler, NEAR))
        for ready in (reuse.ready, scheduler.adapters.ready, scheduler.adapters.host.ready):
            for group in ready:
                if scheduler.waiting.is_deferred(group):
                    scheduler.waiting.resume(group)
                    scheduler.policy.resumed(group)
            if ready:
                ready.clear()

    def _admit(self, builder: PlanBuilder) -> None:
        """Admit waiting groups, in the policy's order, while rows, budget and blocks last. Running groups are not
        preempted for them."""
        scheduler, rows = self._scheduler, self._scheduler.rows
        waiting, running, policy = scheduler.waiting, scheduler.running, scheduler.policy
        while waiting.ready:
            group, obstacle = self._choose_or_defer(builder)
            if group is None:
                self._stopped_step, self._stopped_for = scheduler.num_plans, obstacle
                return
            if not group.wait_reason and self._stopped_step >= group.queued_step:
                group.wait_reason = self._stopped_for
            if group.slot_wait_since is not None:
                group.wait_reason = f"{NO_SLOT} for {scheduler.now - group.slot_wait_since:.3f} s"
            reason = group.wait_reason
            group.ledger.note("admitted", scheduler.now, 0, f"waited: {reason}" if reason else "")
            waiting.remove(group)
            running.add(group)
            group.is_running, group.is_forked, group.micro_batch = True, False, scheduler.micro_batch
            for sequence in group.live:
                sequence.state = _PREFILL
                rows.assign(sequence)
            if group.search is not None:
                group.num_spare = group.num_beams_to_come
                rows.reserve(group.num_spare)
            if group.request.adapter_digest:
                scheduler.adapters.enter(group)
            scheduler.allocation.admitted(group)
            policy.admitted(group, scheduler)
            self._owing[group] = None
            self._compute_owed(builder, group)  # attaches the prefix-cache hit first
            if reason or scheduler.reuse.prefetch is not None:  # it may have waited for a prefix or for files
                scheduler.reuse.forget(group)

    def _choose_or_defer(self, builder: PlanBuilder) -> tuple[Group | None, str]:
        """Choose the group to admit next. Returns it, or None and the reason why no group is admitted in this step.
        Groups that are not ready are deferred on the way: others may overtake them."""
        scheduler = self._scheduler
        is_single = len(scheduler.micro_batches.sets) == 1
        while True:
            if not is_single and not self._takes_more:
                return None, "turn of another micro-batch"
            if builder.budget <= 0:
                return None, "token budget"
            if (num_free := scheduler.rows.num_free) <= 0:
                return None, "no free row"
            if (group := scheduler.policy.choose(scheduler)) is None:
                return None, "not its turn"
            if group in builder.prompts:  # it was preempted in this plan
                return None, "preempted in this step"
            if group.request.adapter_digest and (lack := self._lacks_adapter(group)):
                self._defer(group, lack)
                continue
            if num_free < len(group.live) + (0 if group.search is None else group.num_beams_to_come):
                return None, "no free row"
            if group is self._blocked and self._is_unchanged():
                return None, "no free blocks"
            reason = scheduler.reuse.wait_if_pending(group, scheduler.now)
            if not reason and scheduler.allocation.has_room(group, scheduler.running):
                return group, ""
            if not reason:
                self._blocked, self._blocked_at = group, self._room
                return None, "no free blocks"
            self._defer(group, reason)

    @property
    def _takes_more(self) -> bool:
        """Whether waiting groups may join the current micro-batch."""
        scheduler, batches = self._scheduler, self._scheduler.micro_batches
        num_waiting = min(scheduler.waiting.num_ready, scheduler.rows.num_free)
        return batches.takes_more(scheduler.micro_batch, scheduler.running, num_waiting)

    def _lacks_adapter(self, group: Group) -> str:
        """Return why a group must wait for its adapter (no slot, or it must be read into host memory); "" if it need
        not wait."""
        scheduler, adapters = self._scheduler, self._scheduler.adapters
        if not adapters.may_enter(group):
            adapters.wait(group, scheduler.now)
            return NO_SLOT
        return READING if adapters.needs_host(group) and adapters.host.awaits(group) else ""

    def _defer(self, group: Group, reason: str) -> None:
        """Let others overtake a waiting group until it is resumed."""
        group.wait_reason = reason
        self._scheduler.waiting.defer(group)
        self._scheduler.policy.deferred(group)

    def _is_unchanged(self) -> bool:
        """Whether the blocked group still has no room: no row was assigned or released, and no block became free."""
        version, num_blocks, num_states = self._blocked_at
        rows, pool = self._scheduler.rows, self._scheduler.pool
        return rows.version == version and pool.num_free <= num_blocks and pool.num_free_states <= num_states

    @property
    def _room(self) -> tuple[int, int, int]:
        """Return the version of the row table, the free blocks and the free state slots."""
        pool = self._scheduler.pool
        return self._scheduler.rows.version, pool.num_free, pool.num_free_states


def tokens_for_waiting(
    budget: int,
    owing: Collection[Group],
    waiting: Iterable[Group],
    overtakes: Callable[[Group, Group], bool],
    num_cached: Callable[[Group], int],
) -> int:
    """Return how many tokens of the budget running prompts leave to waiting groups, in the order of the queue.

    A group that the policy lets overtake gets all it owes. Groups that owe little compared to the running prompts get
    up to half of the budget. So a prompt of many steps delays short prompts by no step, and takes at most twice as many
    steps because of them.
    """
    most = max(group.leader.num_tokens - group.leader.num_computed for group in owing) // _SHORT
    held = 0
    for group in waiting:
        owed = group.leader.num_tokens - num_cached(group)
        is_short = owed <= most and held + owed <= budget // _SHARE
        if not is_short and not all(overtakes(group, running) for running in owing):
            break
        held += owed
    return min(held, budget)


def _to_edge(images: Iterable[PromptImage], start: int, count: int, left: int) -> int:
    """Return how many tokens from `start` on a step computes instead of `count`, so that it cuts no image: the image at
    the end is computed too if at most `left` tokens allow, or else left to a later step."""
    for image in images:
        if image.start < start + count < image.end:
            return image.end - start if image.end - start <= left else image.start - start
    return count


def chunk_size(owed: int, left: int, budget: int, *, alone: bool) -> int:
    """Return how many of `owed` prompt tokens a step computes, if `left` tokens of its budget are left. While other
    sequences decode (not `alone`), a prompt that does not fit takes at most half of the budget, so that decode steps do
    not become too long."""
    if owed > left and not alone:
        return min(left, -(-budget // _SHARE))
    return min(owed, left)
