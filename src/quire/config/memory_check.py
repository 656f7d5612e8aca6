"""Compares the memory plan of an engine that has started with what the device says."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.memory import PROCESS_BYTES, MemoryPlan
from quire.config.sizes import format_size

MOST_OFF = 0.02  # of the memory that the engine may use: a larger difference from the plan is warned of


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU: of the whole device, and of this process's tensors as torch counts them."""

    total: int
    free: int
    allocated: int  # in tensors
    reserved: int  # by torch, for these and for tensors to come


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """What this process holds of a GPU, and what it may hold by the plan: without any captured graph, and with all."""

    held: int
    least: int
    most: int
    capacity: int  # that the engine may use

    @property
    def off(self) -> int:
        """Bytes that are held beyond the plan, or below 0, that the plan has too many."""
        return max(self.held - self.most, 0) + min(self.held - self.least, 0)

    @property
    def is_off(self) -> bool:
        return abs(self.off) > MOST_OFF * self.capacity

    def __str__(self) -> str:
        planned = f"{format_size(self.least)} to {format_size(self.most)} were planned"
        text = f"memory after the start: {format_size(self.held)} of the device are held, {planned}"
        if not self.off:
            return text
        differs = f"{format_size(abs(self.off))} {'more' if self.off > 0 else 'less'} than planned"
        return f"{text}: {differs}, {100 * abs(self.off) / self.capacity:.1f} % of {format_size(self.capacity)}"


def check_memory(plan: MemoryPlan, free_before: int, found: DeviceMemory) -> MemoryCheck:
    """Compare a plan, made when so many bytes of the device were free, with what was found after the start. What torch
    has reserved beyond its tensors is for the steps to come, and for graphs."""
    own_context = min(found.total - free_before, PROCESS_BYTES["cuda"])  # is taken before anything can be asked
    used = free_before - found.free + own_context
    held = used - (found.reserved - found.allocated)
    return MemoryCheck(held, plan.held - plan.graphs - plan.draft, plan.held, plan.capacity)
