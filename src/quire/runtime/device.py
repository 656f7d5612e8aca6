"""Converts the configuration's device to torch's, and reads the memory state of a GPU."""

from __future__ import annotations

import torch

from quire.config.facts import cuda_index
from quire.config.memory_check import DeviceMemory


def torch_device(device: str) -> torch.device:
    """Return the device of a configuration. A GPU always has its index: "cuda" is the first one, as in the memory plan.

    torch.device("cuda") equals no tensor's device, and torch.cuda.set_device refuses it.
    """
    found = torch.device(device)
    return torch.device("cuda", cuda_index(device)) if found.type == "cuda" else found


def read_device_memory(device: str) -> DeviceMemory:
    """Return the memory state of a CUDA device. Does not wait for the device."""
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    allocated, reserved = (stats.get(f"{kind}_bytes.all.current", 0) for kind in ("allocated", "reserved"))
    return DeviceMemory(total, free, allocated, reserved)
