"""What becomes of a preempted group's blocks: they are swapped to host memory, or freed and computed again later."""

from __future__ import annotations

from typing import Protocol

from quire.config.tiers import PreemptionName
from quire.engine.decoding.group import Group, Sequence
from quire.engine.kvcache.tiers.base import Tiers
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.engine.scheduler.prefix_reuse import PrefixReuse, SwapBlocks
from quire.engine.scheduler.step_time import ComputeTime


class Preemption(Protocol):
    """How a preempted group gives up its blocks, and so what it owes when it comes back."""

    num_swaps: int  # groups whose blocks were moved

    def vacate(self, group: Group, builder: PlanBuilder, num_tokens: int) -> str:
        """Give up all blocks of the group, which has computed so many tokens; returns what the ledger says of it.

        Sets `num_computed` to what each sequence still has when it is admitted again.
        """


class Recompute:
    """Free everything; every known token is owed again. Results still in flight are dropped when they arrive."""

    num_swaps = 0

    def __init__(self, compute: ComputeTime) -> None:
        self._compute = compute

    def vacate(self, group: Group, builder: PlanBuilder, num_tokens: int) -> str:  # noqa: ARG002 - Preemption's signature
        free(group)
        return f"recompute est. {_milliseconds(self._compute.seconds(num_tokens))}"


class Swap:
    """Move all blocks to host memory, where they are found again: nothing is owed but what was not computed. Where
    that has no room for all, or every position must be computed for its logprobs, recompute."""

    def __init__(self, compute: ComputeTime, tiers: Tiers, reuse: PrefixReuse) -> None:
        self._compute, self._tiers, self._reuse = compute, tiers, reuse
        self._recompute = Recompute(compute)
        self.num_swaps = 0

    def vacate(self, group: Group, builder: PlanBuilder, num_tokens: int) -> str:
        if not any(sequence.num_computed for sequence in group.live):  # what it swapped before is still there
            free(group)
            return "nothing was computed"
        if group.request.sampling.prompt_logprobs is not None:
            return self._recompute.vacate(group, builder, num_tokens)
        found = self._reuse.swap_blocks(group, builder)
        blocks = {key: block for each in found.values() for key, block in each.blocks.items()}
        if not blocks:  # no more than the token that is computed anew in any case
            return self._recompute.vacate(group, builder, num_tokens)
        num_saved = self._tiers.num_to_save(blocks)
        if num_saved is None:
            return f"host memory is full, {self._recompute.vacate(group, builder, num_tokens)}"
        moving = self._tiers.transfer_seconds(num_saved, len(blocks))
        again = self._compute.seconds(num_tokens)
        if not self.is_cheaper(moving, again):
            self._tiers.note_recompute(blocks)
            return f"{self._recompute.vacate(group, builder, num_tokens)} (swap est. {_milliseconds(moving)})"
        self._move(group, found)
        costs = f"est. {_milliseconds(moving)} (recompute est. {_milliseconds(again)})"
        return f"swapped {len(blocks)} blocks, {costs}"

    def is_cheaper(self, moving: float, again: float | None) -> bool:  # noqa: ARG002 - for those that compare
        """Whether blocks that take `moving` seconds to move are moved, or computed in `again` seconds."""
        return True

    def _move(self, group: Group, found: dict[Sequence, SwapBlocks]) -> None:
        self.num_swaps += 1
        for sequence, each in found.items():
            if each.blocks:
                self._tiers.swap_out(sequence, each.blocks)
                sequence.swapped = each.num_tokens
        free(group)


class ByCost(Swap):
    """Whichever is estimated to take less time, by what the link and the model have shown."""

    def is_cheaper(self, moving: float, again: float | None) -> bool:
        return again is None or moving <= again


def free(group: Group) -> None:
    """Give up all blocks; every known token is owed."""
    for sequence in group.live:
        sequence.table.free()
        sequence.num_computed = 0


def make_preemption(
    name: PreemptionName, compute: ComputeTime, tiers: Tiers, reuse: PrefixReuse, *, has_tiers: bool
) -> Preemption:
    """How groups give up their blocks; all are computed again where there is nowhere to move them."""
    if name == "recompute" or not has_tiers:
        return Recompute(compute)
    return (Swap if name == "swap" else ByCost)(compute, tiers, reuse)


def _milliseconds(seconds: float | None) -> str:
    """Three figures, or all before the point."""
    if seconds is None:
        return "unknown"
    shown = seconds * 1e3
    return f"{shown:.3g} ms" if shown < 99.5 else f"{shown:,.0f} ms"
