"""Numbers on their way from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Host numbers on the device, without waiting for it. On a CPU, the tensor itself."""
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)
