"""What the machine is, as plain numbers. Gathered once by the runtime; read by the resolver and the doctor."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.model import DTYPE_BYTES, Dtype


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One CUDA device. Memory in bytes; `free_memory` is what the driver would hand out now."""

    name: str
    total_memory: int
    free_memory: int
    capability: tuple[int, int]

    @property
    def supports_bf16(self) -> bool:
        return self.capability >= (8, 0)

    @property
    def supports_fp8(self) -> bool:
        return self.capability >= (8, 9)


@dataclass(frozen=True, slots=True)
class HardwareFacts:
    """The machine this process may use: limits of its control group and its CPU affinity are already applied."""

    machine: str  # "x86_64", "aarch64"
    cpu_name: str
    cores: int
    isa: frozenset[str]  # instruction set extensions by their /proc/cpuinfo names
    supports_bf16: bool  # the CPU multiplies this type in hardware, not by emulation
    supports_fp16: bool
    total_memory: int
    available_memory: int
    torch_version: str
    cuda: tuple[CudaDevice, ...] = ()
    native_refusal: str | None = None  # why the compiled CPU kernels cannot be used; None: they can
    triton: bool = False  # Triton is installed, so that kernels can be compiled for the CUDA devices
    page_size: int = 4096  # bytes, of the CPU's virtual memory
    level_panels: bool = False  # the compiled kernels multiply float32 rows by levels as their file stores them
    tile_units: bool = False  # the CPU multiplies tiles of bfloat16 (AMX), and the compiled kernels know how

    @property
    def device(self) -> str:
        """The kind of device a model runs on when nobody chose one."""
        return "cuda" if self.cuda else "cpu"

    def computes(self, dtype: Dtype, device: str) -> bool:
        """Whether `device` multiplies `dtype` in hardware."""
        if dtype == "float32":
            return True
        if device != "cpu":
            return dtype == "float16" or self.cuda[cuda_index(device)].supports_bf16
        return self.supports_bf16 if dtype == "bfloat16" else self.supports_fp16

    def weight_bytes(self, dtype: Dtype, device: str) -> int:
        """Bytes of one resident weight: a CPU without the half type in hardware holds float32 instead."""
        return DTYPE_BYTES[dtype] if device != "cpu" or self.computes(dtype, device) else DTYPE_BYTES["float32"]


def cuda_index(device: str) -> int:
    """The number in "cuda:1"; plain "cuda" is the first device."""
    return int(device.partition(":")[2] or 0)
