"""Runs hopper_gemm.cu on a CPU, a fiber per thread: its barriers, its copies, and where it stores what."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.cuda import hopper_gemm as module
from quire.kernels.cuda.hopper_gemm import Kernel, hopper_gemm

_KERNELS = Path(module.__file__).parent
_SHARED = {  # declarations of shared memory in the kernel, and what stands in for them
    "extern __shared__ char memory[];": "char* memory = now->block->memory.data() + 16384;",
    "__shared__ alignas(8) u64 barriers[2 * STAGES];": "u64* barriers = (u64*)now->block->memory.data();",
    "__shared__ Factors factors[GROUPS];": "Factors* factors = (Factors*)(now->block->memory.data() + 1024);",
}
_ENTRY = """
extern "C" int run(const TensorMap* x, const TensorMap* weight, const Gemm* p, int blocks, int threads, u32 seed) {
    return run_blocks(blocks, CLUSTER, threads, seed, [=] { hopper_gemm(*x, *weight, *p); });
}
"""
_FAULTS = {1: "threads wait for ever", 2: "bytes are missing or left over", 3: "too many arrive, or an address is none"}
has_compiler = shutil.which("g++") is not None


class _FakeMap(ctypes.Structure):
    """A tensor of up to four dimensions as hopper_on_cpu.h reads it."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)

    @classmethod
    def make(
        cls, address: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
    ) -> _FakeMap:
        assert all(0 < each <= 256 for each in box)
        assert all(stride * dtype.itemsize % 16 == 0 for stride in (*strides, address // dtype.itemsize))
        sizes, box = [(*each, 1, 1)[:4] for each in (sizes, box)]
        strides = [dtype.itemsize * stride for stride in (*strides, 0, 0)[:3]]
        return cls((ctypes.c_uint64 * 16)(address, *sizes, *strides, *box))


class CpuKernel:
    """Takes the place of `CudaKernel`."""

    def __init__(self, kernel: Kernel, folder: Path) -> None:
        constants, _ = kernel.source_parts()
        source = (_KERNELS / "hopper_gemm.cu").read_text()
        for declaration, instead in _SHARED.items():
            assert declaration in source
            source = source.replace(declaration, instead)
        lines = [f"constexpr int {name} = {value};\n" for name, value in constants.items()]
        header = (Path(__file__).parent / "hopper_on_cpu.h").read_text()
        place, sum_type = folder / "kernel.cpp", "int" if kernel.dtype == torch.int8 else "float"
        place.write_text("".join((*lines, f"typedef {sum_type} Sum;\n", header, source, _ENTRY)))
        library = place.with_suffix(".so")
        command = ["g++", "-std=c++17", "-O2", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", "-o", library, place]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        self._run = ctypes.CDLL(str(library)).run

    def launch(self, programs: int, threads: int, arguments: Sequence[Any], *, dependent: bool) -> None:
        fault = self._run(*(ctypes.byref(each) for each in arguments), programs, threads, 1)
        assert fault == 0, _FAULTS[fault]


def run_on_cpu(
    monkeypatch: pytest.MonkeyPatch, folder: Path, kernel: Kernel, processors: int, x: Tensor, weight: Tensor,
    out: Tensor, **epilogue: Tensor | None,
) -> None:  # fmt: skip
    """Run the kernel on a device of some multiprocessors, whose threads take turns in a random order."""
    compiled = CpuKernel(kernel, folder)
    monkeypatch.setattr(module, "TensorMap", _FakeMap)
    monkeypatch.setattr(module, "_load", lambda *_: compiled)
    monkeypatch.setattr(module, "num_processors", lambda _: processors)
    module._map_of_rows.cache_clear()
    module._map_of_weight.cache_clear()
    hopper_gemm(x, weight, out, kernel, **epilogue)
