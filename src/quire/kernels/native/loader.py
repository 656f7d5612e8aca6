"""Finds and opens the compiled CPU kernels, if they were built and this CPU can run them."""

from __future__ import annotations

import ctypes
import hashlib
import sysconfig
from ctypes import c_char_p, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).parent
TYPES = {torch.float32: 0, torch.bfloat16: 1}
_SIGNATURES: dict[str, list[Any]] = {  # what it returns, then what it takes
    "quire_rms_norm": [None, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_double],
    "quire_layer_norm": [None, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_double],
    "quire_activate": [None, c_int64, c_int64, c_void_p, c_int64],
    "quire_rotate": [None, c_int64, c_void_p, c_int64, c_void_p, c_void_p, *[c_int64] * 5],
    "quire_panel_outputs": [c_int64],
    "quire_level_panels_pay": [c_int64],
    "quire_multiply_rows": [None, *[c_void_p] * 3, *[c_int64] * 3],
    "quire_pack_low_rank": [None, c_int64, c_int64, c_void_p, *[c_int64] * 5, c_void_p],
    "quire_low_rank_add": [None, c_int64, *[c_void_p] * 3, c_int64, c_void_p, c_int64, c_int64],
    "quire_give_and_meet": [None, c_void_p, c_void_p, c_int64],
    "quire_all_reduce": [None, c_int64, c_void_p, c_void_p, c_int64],
    "quire_start_beating": [c_int64, c_void_p, c_int64, c_double],
    "quire_has_tile_units": [c_int64],
    "quire_multiply": [c_int64, c_int64, c_int64, *[c_void_p] * 4, *[c_int64] * 3],
    "quire_can_run": [c_int64, c_int64, c_void_p, c_int64],
    "quire_run": [None, c_int64, c_void_p, c_int64, c_void_p],
    "quire_gate": [None, c_int64, c_int64, *[c_void_p] * 3, c_int64, c_int64],
    "quire_write_cache": [None, c_int64, c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 3],
    "quire_write_quantized": [
        None, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, *[c_int64] * 5,
    ],
    "quire_paged_attention": [
        None, c_int64, c_void_p, c_int64, *[c_void_p] * 4, c_int64, c_void_p, *[c_int64] * 8, c_double, c_double,
        c_int64, c_void_p,
    ],
}  # fmt: skip


class Unavailable(Exception):
    """Why the compiled kernels cannot be used here; one line."""


@cache
def open_library() -> ctypes.CDLL:
    """The compiled kernels with their signatures set. Raises Unavailable with the reason."""
    built = _HERE / f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not built.is_file():
        raise Unavailable("the native CPU kernels were not built; install a C++ compiler and reinstall Quire")
    _share_openmp()
    try:
        library = ctypes.CDLL(str(built))
    except OSError as error:
        raise Unavailable(f"the native CPU kernels do not load: {error}") from None
    _check_origin(library)
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def _check_origin(library: ctypes.CDLL) -> None:
    """Refuse a library of other sources than the file beside it, or of another kind of CPU."""
    for name in ("quire_source", "quire_isa"):
        if not hasattr(library, name):
            raise Unavailable("the native CPU kernels were built from other sources; reinstall Quire")
        getattr(library, name).restype = c_char_p
    sources = (_HERE / "quire_cpu.cpp", *sorted(_HERE.glob("*.h")))
    if library.quire_source().decode() != hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest():
        raise Unavailable("the native CPU kernels were built from other sources; reinstall Quire")
    if missing := set(library.quire_isa().decode().split()) - _cpu_flags():
        lacking = ", ".join(sorted(missing))
        raise Unavailable(f"the native CPU kernels were built for a CPU with {lacking}; reinstall Quire here")


def why_not_native(dtype: torch.dtype, device: torch.device) -> str | None:
    """One line saying why the compiled kernels cannot serve `dtype` on `device`; None when they can."""
    if device.type != "cpu":
        return f"the native CPU kernels do not run on {device.type}"
    if dtype not in TYPES:
        return f"the native CPU kernels do not know {str(dtype).removeprefix('torch.')}"
    try:
        open_library()
    except Unavailable as reason:
        return str(reason)
    return None


def _share_openmp() -> None:
    """Make torch's OpenMP runtime visible, so that both use one pool of threads and never wait for each other."""
    torch.get_num_threads()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()
