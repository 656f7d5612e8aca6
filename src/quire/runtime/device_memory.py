"""Reads the memory state of a GPU."""

from __future__ import annotations

import torch

from quire.config.memory_check import DeviceMemory


def read_device_memory(device: str) -> DeviceMemory:
    """Return the memory state of a CUDA device. Does not wait for the device."""
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    allocated, reserved = (stats.get(f"{kind}_bytes.all.current", 0) for kind in ("allocated", "reserved"))
    return DeviceMemory(total, free, allocated, reserved)
