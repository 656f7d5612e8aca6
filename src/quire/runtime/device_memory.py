"""What a GPU says of its memory."""

from __future__ import annotations

import torch

from quire.config.memory_check import DeviceMemory


def read_device_memory(device: str) -> DeviceMemory:
    """The memory of a CUDA device as it is now. Waits for nothing."""
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    allocated, reserved = (stats.get(f"{kind}_bytes.all.current", 0) for kind in ("allocated", "reserved"))
    return DeviceMemory(total, free, allocated, reserved)
