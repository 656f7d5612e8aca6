"""What a GPU did while some work ran: how long it was busy, and which kernels took most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType

PARTS = 20  # of a run


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A kernel or copy on the device; times in nanoseconds."""

    name: str
    begin: int
    end: int


def profiled(work: Callable[[], object], keep: Path | None = None) -> list[DeviceEvent]:
    """Run `work` under the profiler. Returns what the device did, in order. `keep`: write a trace for Chrome there."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    if keep is not None:
        profile.export_chrome_trace(str(keep))
    kineto = profile.profiler.kineto_results
    events = [event for event in kineto.events() if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0]
    found = [DeviceEvent(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in events]
    return sorted(found, key=lambda event: event.begin)


def busy_parts(events: list[DeviceEvent], count: int) -> list[float]:
    """Return the share of time in which the device was busy, for equal parts of the time of these events."""
    start = events[0].begin
    length = -(-(max(event.end for event in events) - start) // count)
    busy, done = [0] * count, start
    for event in events:
        begin = max(event.begin, done)
        done = max(done, event.end)
        while begin < event.end:
            part = (begin - start) // length
            end = min(event.end, start + (part + 1) * length)
            busy[part] += end - begin
            begin = end
    return [nanoseconds / length for nanoseconds in busy]


def show(events: list[DeviceEvent], top: int, steps: int = 1) -> None:
    """Print the device's busy shares and the `top` kernels that took most; times and launches by step."""
    parts = busy_parts(events, PARTS)
    span = max(event.end for event in events) - events[0].begin
    busy = sum(parts) / PARTS * span
    whole, launches = span * 1e-6 / steps, len(events) / steps
    print(f"device: busy {100 * busy / span:.1f} % of {whole:,.2f} ms, {launches:.0f} launches")
    print("  busy by part: " + " ".join(f"{100 * part:.0f}" for part in parts))
    times: defaultdict[str, list[int]] = defaultdict(list)
    for event in events:
        times[event.name].append(event.end - event.begin)
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:top]:
        share, taken = 100 * sum(each) / busy, 1e-3 * sum(each) / steps
        print(f"  {share:5.1f} %  {taken:10.1f} us  {len(each) / steps:8.1f} x  {name[:100]}")
