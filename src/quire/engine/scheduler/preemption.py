"""Preemption strategies: the blocks of a preempted group are freed and recomputed later (Recompute), swapped to host
memory (Swap), or whichever is estimated to be faster (ByCost). `Scheduler.grow_or_preempt` chooses the victim."""

from __future__ import annotations

from typing import Protocol

from quire.config.tiers import PreemptionName
from quire.engine.decoding.group import Group, Sequence
from quire.engine.kvcache.tiers.base import SwapBlocks, Tiers
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.engine.scheduler.prefix_reuse import PrefixReuse
from quire.engine.scheduler.step_time import ComputeTime


class Preemption(Protocol):
    """A strategy for freeing the blocks of a preempted group."""

    num_swaps: int  # groups whose blocks were swapped out

    def free_blocks(self, group: Group, builder: PlanBuilder, num_tokens: int) -> str:
        """Free all blocks of a group that has computed `num_tokens` tokens. Returns the note for the ledger.

        Sets `num_computed` of each sequence to 0 and, if its blocks are swapped out, `num_swapped`.
        """


class Recompute:
    """Free all blocks: the group owes all its known tokens again. Results still in flight are dropped."""

    num_swaps = 0

    def __init__(self, compute: ComputeTime) -> None:
        self._compute = compute

    def free_blocks(self, group: Group, builder: PlanBuilder, num_tokens: int) -> str:  # noqa: ARG002 - Preemption's signature
        free(group)
        return f"recompute est. {_milliseconds(self._compute.seconds(num_tokens))}"


class Swap:
    """Move all blocks of a group to host memory; they are loaded again when the group is admitted.

    The blocks are freed without being moved if the group has computed nothing since it was last swapped out: its blocks
    in host memory stay. They are recomputed instead if the request needs a result of every position (prompt logprobs,
    some kinds of pooling), if no token has come yet from the slot of its LoRA adapter, if there is nothing to move but
    the last token, or if host memory is full. `ByCost` overrides `should_swap`, and so also recomputes when that is
    estimated to be faster.
    """

    def __init__(self, compute: ComputeTime, tiers: Tiers, reuse: PrefixReuse) -> None:
        self._compute, self._tiers, self._reuse = compute, tiers, reuse
        self._recompute = Recompute(compute)
        self.num_swaps = 0

    def free_blocks(self, group: Group, builder: PlanBuilder, num_tokens: int) -> str:
        # Blocks that it swapped out before stay in host memory.
        if not any(sequence.num_computed for sequence in group.live):
            free(group)
            return "nothing was computed"
        wants_all = group.request.sampling.prompt_logprobs is not None or not group.reads_cache
        if wants_all or group.held_chunks is not None:
            return self._recompute.free_blocks(group, builder, num_tokens)
        found = self._reuse.swap_blocks(group, builder)
        blocks = {key: block for each in found.values() for key, block in each.blocks.items()}
        if not blocks:  # nothing but the last token, which is always computed again
            return self._recompute.free_blocks(group, builder, num_tokens)
        num_saved = self._tiers.num_to_save(blocks)
        if num_saved is None:
            return f"host memory is full, {self._recompute.free_blocks(group, builder, num_tokens)}"
        swap_seconds = self._tiers.transfer_seconds(num_saved, len(blocks))
        recompute_seconds = self._compute.seconds(num_tokens)
        if not self.should_swap(swap_seconds, recompute_seconds):
            self._tiers.note_recompute(blocks)
            note = self._recompute.free_blocks(group, builder, num_tokens)
            return f"{note} (swap est. {_milliseconds(swap_seconds)})"
        self._move(group, found)
        costs = f"est. {_milliseconds(swap_seconds)} (recompute est. {_milliseconds(recompute_seconds)})"
        return f"swapped {len(blocks)} blocks, {costs}"

    def should_swap(self, swap_seconds: float, recompute_seconds: float | None) -> bool:  # noqa: ARG002 - for subclasses
        """Whether to swap blocks instead of recomputing them, by the estimates for both. `recompute_seconds` is None
        if it is unknown."""
        return True

    def _move(self, group: Group, found: dict[Sequence, SwapBlocks]) -> None:
        self.num_swaps += 1
        for sequence, each in found.items():
            if each.blocks:
                self._tiers.swap_out(sequence, each.blocks)
                sequence.num_swapped = each.num_tokens
        free(group)


class ByCost(Swap):
    """Swap or recompute, whichever is estimated to take less time by the measured speeds of copies and of the model."""

    def should_swap(self, swap_seconds: float, recompute_seconds: float | None) -> bool:
        return recompute_seconds is None or swap_seconds <= recompute_seconds


def free(group: Group) -> None:
    """Free all blocks of a group."""
    for sequence in group.live:
        sequence.table.free()
        sequence.num_computed = 0


def make_preemption(
    name: PreemptionName, compute: ComputeTime, tiers: Tiers, reuse: PrefixReuse, *, has_tiers: bool
) -> Preemption:
    """Make the strategy that the configuration names; without a host tier, Recompute."""
    if name == "recompute" or not has_tiers:
        return Recompute(compute)
    return (Swap if name == "swap" else ByCost)(compute, tiers, reuse)


def _milliseconds(seconds: float | None) -> str:
    """Format seconds as milliseconds, with three digits or all before the point."""
    if seconds is None:
        return "unknown"
    shown = seconds * 1e3
    return f"{shown:.3g} ms" if shown < 99.5 else f"{shown:,.0f} ms"
