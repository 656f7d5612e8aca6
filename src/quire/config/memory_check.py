"""Compares the memory plan of a started engine with the memory in use on the device."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.memory import PROCESS_BYTES, MemoryPlan
from quire.config.sizes import format_size

MOST_OFF = 0.02  # share of the engine's memory: larger deviations from the plan are logged as warnings


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a GPU in bytes: of the whole device, and of this process's tensors as torch counts them."""

    total: int
    free: int
    allocated: int  # in tensors
    reserved: int  # by torch's allocator, for present and future tensors


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """The GPU memory that this process holds, and the planned bounds: `least` without any captured graph, `most` with
    all."""

    held: int
    least: int
    most: int
    capacity: int  # bytes that the engine may use

    @property
    def off(self) -> int:
        """Bytes held above `most` (positive) or below `least` (negative)."""
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
    """Compare a plan with the memory found after the start. `free_before`: free bytes of the device when the plan was
    made.

    Memory that torch reserves beyond its tensors is not counted: it serves later steps and graphs.
    """
    own_context = min(found.total - free_before, PROCESS_BYTES["cuda"])  # exists already when free_before is read
    used = free_before - found.free + own_context
    held = used - (found.reserved - found.allocated)
    return MemoryCheck(held, plan.held - plan.graphs - plan.draft, plan.held, plan.capacity)
