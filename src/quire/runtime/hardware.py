"""Detects the machine's hardware: CPU, instruction sets, memory within the control group, CUDA devices."""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from quire.config.environment import CPU_PATH, CPU_PIN, read_environment
from quire.config.facts import CudaDevice, HardwareFacts
from quire.kernels.native.cores import pin_threads
from quire.kernels.native.loader import (
    LacksPath,
    ask_for_path,
    choose_path,
    find_unbuilt_path,
    usable_cores,
    why_not_native,
)
from quire.kernels.native.ops import has_tile_units
from quire.kernels.native.panels import dot_inputs, level_panels_pay
from quire.runtime.host_memory import read_host_memory, read_text
from quire.types.errors import ConfigError

logger = logging.getLogger("quire.runtime")


def detect_hardware() -> HardwareFacts:
    """Return the facts about this machine. Constant facts are cached; free memory is read at every call."""
    total, available = read_host_memory()
    return replace(_machine(), total_memory=total, available_memory=available, cuda=_cuda_devices())


@cache
def _machine() -> HardwareFacts:
    """Return all facts except memory and devices."""
    use_cpu_path()
    cpuinfo = read_cpuinfo(read_text(Path("/proc/cpuinfo")))
    refusal = why_not_native(torch.float32, torch.device("cpu"))
    unbuilt = find_unbuilt_path() if refusal is None else None
    return HardwareFacts(
        machine=platform.machine(),
        cpu_name=cpuinfo[0] or platform.processor() or "unknown",
        cores=usable_cores(),
        isa=cpuinfo[1],
        supports_bf16=_multiplies_bf16(cpuinfo[1]),
        supports_fp16=refusal is not None and _multiplies_fp16(),
        total_memory=0,
        available_memory=0,
        torch_version=str(torch.__version__),
        native_refusal=refusal,
        triton=find_spec("triton") is not None,
        page_size=os.sysconf("SC_PAGE_SIZE"),
        level_panels=refusal is None and level_panels_pay(),
        tile_units=refusal is None and has_tile_units(),
        bf16_dots=refusal is None and dot_inputs() > 0,
        cpu_path=choose_path().name if refusal is None else None,
        unbuilt_path=None if unbuilt is None else unbuilt.name,
    )


def use_cpu_path() -> None:
    """Let the compiled kernels use the instruction set path that the environment names, if it names one. Raises
    ConfigError if that path is not available."""
    try:
        ask_for_path(read_environment().cpu_path)
        why_not_native(torch.float32, torch.device("cpu"))
    except LacksPath as error:
        raise ConfigError(CPU_PATH, str(error), "set it to one of them or unset it") from None


def pin_cpu_threads() -> None:
    """Pin the threads of the compiled kernels to cores if the environment says so, and log the cores."""
    use_cpu_path()  # before the kernels are opened
    wanted = read_environment().cpu_pin
    if (reason := why_not_native(torch.float32, torch.device("cpu"))) is not None:
        if wanted:
            logger.warning("%s: threads are not pinned: %s", CPU_PIN, reason)
        return
    cores = pin_threads(wanted=wanted)
    if cores:
        logger.info("CPU threads are pinned to cores %s", ",".join(map(str, cores)))
    elif wanted:
        logger.warning("%s: threads are not pinned; the process does not have a whole core for each", CPU_PIN)


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether the CPU has instructions for multiplying in `dtype`."""
    machine = _machine()
    return {torch.bfloat16: machine.supports_bf16, torch.float16: machine.supports_fp16}.get(dtype, True)


def _multiplies_bf16(isa: frozenset[str]) -> bool:
    """Whether the CPU has bfloat16 units. torch also says yes for CPUs with AVX-512 but without such units, where
    oneDNN emulates the gemms."""
    has_units = platform.machine() not in ("x86_64", "AMD64") or bool(isa & {"avx512_bf16", "amx_bf16"})
    return has_units and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _multiplies_fp16() -> bool:
    """Whether float16 gemms are fast. torch says yes for every Arm CPU with float16 arithmetic, but its float16
    gemms there are not vectorised."""
    return platform.machine() != "aarch64" and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


_ARM_PARTS = {
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
    ("0x41", "0xd08"): "Arm Cortex-A72",
    ("0x41", "0xd0b"): "Arm Cortex-A76",
}


def read_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    """Return the CPU's name and instruction set flags, from the text of /proc/cpuinfo (x86 and aarch64)."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip().lower(), value.strip())
    name = fields.get("model name", "")
    if not name and "cpu part" in fields:
        part = (fields.get("cpu implementer", ""), fields["cpu part"])
        name = _ARM_PARTS.get(part, f"Arm implementer {part[0]} part {part[1]}")
    return name, frozenset((fields.get("flags") or fields.get("features") or "").split())


def _cuda_devices() -> tuple[CudaDevice, ...]:
    if not torch.cuda.is_available():
        return ()
    devices = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        devices.append(CudaDevice(name, total, free, capability))
    return tuple(devices)
