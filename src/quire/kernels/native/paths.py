"""The instruction sets that the CPU kernels are compiled for, one library for each. setup.py reads this file too."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import NamedTuple

COMPILE = (  # compiler flags of every path, before its own
    "-O3",
    "-g0",
    "-std=c++17",
    "-pthread",
    "-ffp-contract=off",  # no implicit FMA: a sum has the same bits wherever it is compiled, see simd.h
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)


class CpuPath(NamedTuple):
    """The kernels compiled for one instruction set."""

    name: str
    library: str  # several paths may share one library, which then checks the CPU at run time
    needs: frozenset[str]  # features that the CPU and the operating system must offer, as cpu_features.cpp names them
    flags: tuple[str, ...]  # compiler flags


def _path(name: str, below: CpuPath | None, needs: str, flags: str, library: str | None = None) -> CpuPath:
    needed = frozenset(needs.split()) | (below.needs if below else frozenset())
    return CpuPath(name, library or name, needed, tuple(flags.split()))


def paths_of(machine: str) -> tuple[CpuPath, ...]:
    """Return the paths for this machine type, the best one first. Every CPU of the type can run the last one."""
    if machine in ("x86_64", "AMD64"):
        # -O3 takes three times as long to compile and generates three times the code, and helps only CPUs without AVX2:
        # there, gemms of float32 weights are up to a quarter faster with it, and integer gemms twice as fast.
        portable = _path("portable", None, "", "-O2 -march=x86-64 -mtune=generic")
        avx2_flags = "-mavx2 -mfma -mf16c -mbmi -mbmi2"
        avx2 = _path("avx2", portable, "avx2 fma f16c bmi1 bmi2", f"{avx2_flags} -mtune=haswell")
        wide_flags = f"{avx2_flags} -mavx512f -mavx512cd -mavx512bw -mavx512dq -mavx512vl"
        wide_needs = "avx512f avx512cd avx512bw avx512dq avx512vl"
        avx512 = _path("avx512", avx2, wide_needs, f"{wide_flags} -mtune=skylake-avx512")
        vnni = _path("avx512_vnni", avx512, "avx512_vnni", f"{wide_flags} -mavx512vnni -mtune=cascadelake")
        tile_flags = "-mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8 -mtune=icelake-server"
        bf16 = _path("avx512_bf16", vnni, "avx512_bf16", f"{wide_flags} {tile_flags}")
        # Compilers emit AMX instructions only for AMX intrinsics, so a library with them also runs on CPUs without AMX.
        amx = _path("amx", bf16, "amx_tile amx_bf16 amx_int8", " ".join(bf16.flags), library=bf16.library)
        return (amx, bf16, vnni, avx512, avx2, portable)
    if machine in ("aarch64", "arm64"):
        portable = _path("portable", None, "", "-march=armv8-a -mno-outline-atomics")
        dotprod = _path("dotprod", portable, "crc32 atomics asimdrdm asimddp", "-march=armv8.2-a+dotprod")
        i8mm = _path("i8mm", dotprod, "i8mm bf16", "-march=armv8.2-a+dotprod+i8mm+bf16")
        return (i8mm, dotprod, portable)
    return (_path("portable", None, "", ""),)


PATHS = paths_of(platform.machine())


def digest_of_sources(folder: Path) -> str:
    """Return a digest of the sources and flags that the libraries are compiled from. Every library embeds the digest of
    its sources."""
    files = (folder / "quire_cpu.cpp", *sorted(folder.glob("*.h")), folder / "paths.py")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
