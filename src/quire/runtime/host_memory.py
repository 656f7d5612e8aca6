"""Reads how much memory this machine has and how much of it is free, within the limits of the control group."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


def read_host_memory() -> tuple[int, int]:
    """Return total and available bytes: the smaller of what the machine has and what the control group allows."""
    meminfo = {}
    for line in read_text(Path("/proc/meminfo")).splitlines():
        key, _, value = line.partition(":")
        meminfo[key] = int(value.split()[0]) * 1024
    page = os.sysconf("SC_PAGE_SIZE")
    total = meminfo.get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * page
    available = meminfo.get("MemAvailable") or os.sysconf("SC_AVPHYS_PAGES") * page
    for limit_file, usage_file, stat_file in (
        (CGROUP / "memory.max", CGROUP / "memory.current", CGROUP / "memory.stat"),
        (
            CGROUP / "memory/memory.limit_in_bytes",
            CGROUP / "memory/memory.usage_in_bytes",
            CGROUP / "memory/memory.stat",
        ),
    ):
        limit, usage = read_text(limit_file).strip(), read_text(usage_file).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED:
            total = min(total, int(limit))
            available = min(available, max(0, int(limit) - int(usage) + _reclaimable(read_text(stat_file))))
    return total, available


def read_text(path: Path) -> str:
    """Return the text of a system file, or nothing if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _reclaimable(stat: str) -> int:
    """Return the bytes of file pages that the kernel frees under memory pressure, from the text of memory.stat."""
    values = dict(line.split() for line in stat.splitlines() if len(line.split()) == 2)
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))
