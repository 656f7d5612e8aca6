"""A device that is not here, to compile kernels for."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget


class H200:
    """What Triton asks of a device when it compiles for it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)
