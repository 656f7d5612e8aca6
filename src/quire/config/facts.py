"""Facts about the machine: CPU, memory and GPUs. The runtime collects them once; the configuration depends on them."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.model import DTYPE_BYTES, CpuWeights, Dtype


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One CUDA device. Memory is in bytes; `free_memory` is what the driver can allocate now."""

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
    """The part of the machine that this process may use, within the limits of its control group and CPU affinity."""

    machine: str  # "x86_64", "aarch64"
    cpu_name: str
    cores: int
    isa: frozenset[str]  # instruction set extensions by their /proc/cpuinfo names
    supports_bf16: bool  # the CPU multiplies bfloat16 in hardware, not by emulation
    supports_fp16: bool  # torch multiplies float16 in the CPU's hardware; native kernels multiply it as float32
    total_memory: int
    available_memory: int
    torch_version: str
    cuda: tuple[CudaDevice, ...] = ()
    native_refusal: str | None = None  # why the native CPU kernels cannot be used; None: they can
    triton: bool = False  # Triton is installed and can compile kernels for the CUDA devices
    page_size: int = 4096  # bytes of a page of the CPU's virtual memory
    level_panels: bool = False  # on this CPU, panels of quantized weights are no slower than float panels
    cpu_path: str | None = None  # the instruction set that the native CPU kernels in use are compiled for
    unbuilt_path: str | None = None  # a better instruction set that this CPU has, for which no kernels were built
    tile_units: bool = False  # the CPU has AMX for bfloat16, and the native kernels use it
    bf16_dots: bool = False  # the native kernels use the CPU's bfloat16 dot-product instructions

    @property
    def device(self) -> str:
        """The kind of device on which a model runs by default."""
        return "cuda" if self.cuda else "cpu"

    def computes(self, dtype: Dtype, device: str) -> bool:
        """Whether `device` can multiply `dtype` in hardware."""
        if dtype == "float32":
            return True
        if device != "cpu":
            return dtype == "float16" or self.cuda[cuda_index(device)].supports_bf16
        return self.supports_bf16 if dtype == "bfloat16" else self.supports_fp16

    def weight_bytes(self, dtype: Dtype, device: str) -> int:
        """Return the bytes of one weight in memory. A CPU that cannot multiply a 16-bit type holds float32 instead."""
        as_asked = device != "cpu" or self.computes(dtype, device) or self.has_halves(dtype)
        return DTYPE_BYTES[dtype if as_asked else "float32"]

    def cpu_dtype(self, *, integer: bool) -> Dtype:
        """Return the dtype in which the CPU computes by default.

        `integer`: weights are quantized and may be multiplied as integers. Activations then become integers anyway, so
        bfloat16 is only chosen for tile units (AMX).
        """
        by_integers = integer and self.cpu_path is not None and not self.tile_units
        return "bfloat16" if self.supports_bf16 and not by_integers else "float32"

    def cpu_weights(self, dtype: Dtype) -> CpuWeights:
        """Return how the CPU multiplies activations of `dtype` by quantized weights by default: with integer
        arithmetic, except for bfloat16 on tile units (AMX), where prompts and many streams are faster in float."""
        return "float" if self.tile_units and dtype == "bfloat16" else "integer"

    def has_halves(self, dtype: Dtype) -> bool:
        """Whether the native CPU kernels can multiply activations of `dtype` by bfloat16 weights."""
        return self.cpu_path is not None and dtype in ("float32", "bfloat16")


def cuda_index(device: str) -> int:
    """Return the index of a CUDA device: 1 for "cuda:1", 0 for "cuda"."""
    return int(device.partition(":")[2] or 0)
