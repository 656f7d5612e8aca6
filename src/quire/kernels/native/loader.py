"""Finds and opens the compiled CPU kernels: the best instruction-set path that was built and that this CPU can run."""

from __future__ import annotations

import ctypes
import logging
import os
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_char_p, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quire.kernels.native.paths import PATHS, CpuPath, digest_of_sources

logger = logging.getLogger("quire.kernels")

_HERE = Path(__file__).parent
CGROUP = Path("/sys/fs/cgroup")
TYPES = {torch.float32: 0, torch.bfloat16: 1}
_NOT_BUILT = "the native CPU kernels were not built; install a C++ compiler and reinstall Quire"
_OTHER_SOURCES = "the native CPU kernels were built from other sources; reinstall Quire"
_SIGNATURES: dict[str, list[Any]] = {  # result type, then argument types
    "quire_prepare": [None, c_int64, c_int64],
    "quire_pin_threads": [None, c_void_p, c_int64],
    "quire_interleave_memory": [c_int64, c_int64],
    "quire_rms_norm": [None, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_double],
    "quire_layer_norm": [None, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_double],
    "quire_log_sum_exp": [None, c_void_p, c_void_p, c_void_p, c_int64, c_int64],
    "quire_activate": [None, c_int64, c_int64, c_void_p, c_int64],
    "quire_rotate": [None, c_int64, c_void_p, c_int64, c_void_p, c_void_p, *[c_int64] * 5],
    "quire_panel_outputs": [c_int64],
    "quire_dot_inputs": [c_int64],
    "quire_level_panels_pay": [c_int64],
    "quire_multiply_rows": [None, *[c_void_p] * 3, *[c_int64] * 3],
    "quire_read_blocks": [c_int64, c_int64, c_void_p, c_int64, c_void_p],
    "quire_find_levels": [None, c_void_p, c_int64, c_void_p],
    "quire_find_super_blocks": [c_int64, c_void_p, *[c_int64] * 3, c_void_p, c_void_p],
    "quire_pack_int8": [None, c_int64, c_void_p, c_int64, *[c_void_p] * 4, c_int64, c_int64, c_void_p],
    "quire_read_int8_rows": [c_int64, c_int64, *[c_void_p] * 3, *[c_int64] * 3],
    "quire_pack_low_rank": [None, c_int64, c_int64, c_void_p, *[c_int64] * 5, c_void_p],
    "quire_low_rank_add": [None, c_int64, *[c_void_p] * 3, c_int64, c_void_p, c_int64, c_int64],
    "quire_give_and_meet": [None, c_void_p, c_void_p, c_int64],
    "quire_all_reduce": [None, c_int64, c_void_p, c_void_p, c_int64],
    "quire_start_beating": [c_int64, c_void_p, c_int64, c_double],
    "quire_stop_beating": [None],
    "quire_has_tile_units": [c_int64],
    "quire_multiply": [c_int64, c_int64, c_int64, *[c_void_p] * 4, *[c_int64] * 3],
    "quire_can_run": [c_int64, c_int64, c_void_p, c_int64],
    "quire_run": [None, c_int64, c_void_p, c_int64, c_void_p],
    "quire_gate": [None, c_int64, c_int64, *[c_void_p] * 3, c_int64, c_int64],
    "quire_write_cache": [None, c_int64, c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 3],
    "quire_write_quantized": [
        None, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, *[c_int64] * 5,
    ],
    "quire_choose": [None, c_void_p, c_int64, c_int64, *[c_void_p] * 5],
    "quire_choose_by_head": [
        c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, *[c_void_p] * 5,
    ],
    "quire_mask_logits": [None, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64],
    "quire_paged_attention": [
        None, c_int64, c_void_p, c_int64, *[c_void_p] * 4, c_int64, c_void_p, *[c_int64] * 8, c_double, c_double,
        c_int64, c_void_p, c_void_p,
    ],
}  # fmt: skip


class Unavailable(Exception):
    """The compiled kernels cannot be used here. The message is one line with the reason."""


class LacksPath(ValueError):
    """The CPU or this build lacks the path that was asked for. The message is one line that says what is missing."""


class _Choice:
    asked: str | None = None  # the path to use instead of the best one; None: the best


def ask_for_path(name: str | None) -> None:
    """Select the path of this name, or the best one (None). Call this before the kernels are opened."""
    if name != _Choice.asked:
        _Choice.asked = name
        open_library.cache_clear()
        choose_path.cache_clear()


@cache
def choose_path() -> CpuPath:
    """Return the best path that was built and that this CPU can run, or the one that was asked for. Raises Unavailable
    or LacksPath."""
    features = _cpu_features()
    built = [path for path in PATHS if path.needs <= features and _is_built(path)]
    if _Choice.asked is not None:
        return _path_asked_for(_Choice.asked, built, features)
    if not built:
        raise Unavailable(_NOT_BUILT)
    return built[0]


def find_unbuilt_path() -> CpuPath | None:
    """Return the best path that this CPU can run if it was not built, so that a slower one is used; else None. Raises
    Unavailable."""
    best = next(path for path in PATHS if path.needs <= _cpu_features())
    return None if _is_built(best) else best


def _path_asked_for(name: str, built: Sequence[CpuPath], features: frozenset[str]) -> CpuPath:
    names = " ".join(path.name for path in built) or "none"
    path = next((path for path in PATHS if path.name == name), None)
    if path is None:
        known = " ".join(each.name for each in PATHS)
        raise LacksPath(f"unknown path {name!r} of the CPU kernels; paths for this kind of CPU: {known}")
    if missing := sorted(path.needs - features):
        raise LacksPath(f"the path {name} needs a CPU with {', '.join(missing)}; paths that run here: {names}")
    if path not in built:
        raise LacksPath(f"the path {name} was not built; paths that run here: {names}")
    return path


@cache
def open_library() -> ctypes.CDLL:
    """Open the compiled kernels and set their signatures. Raises Unavailable with the reason, or LacksPath."""
    path = choose_path()
    try:
        library = ctypes.CDLL(str(_file_of(f"_cpu_{path.library}")))
    except OSError as error:
        raise Unavailable(f"the native CPU kernels do not load: {error}") from None
    _check_origin(library)
    failures = _Failures(library)
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
        function.errcheck = failures.check
    library.quire_prepare(path.name == "amx", kernel_threads())
    return library


class _Threads:
    asked: int | None = None  # by `set_threads`
    is_forked = False  # torch's threads stayed in the parent process: its parallel loops would wait for them forever


def _after_fork() -> None:
    if _Threads.asked is not None:  # a model was run
        _Threads.is_forked = True
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_after_fork)


def set_threads(count: int | None) -> None:
    """Set the number of threads of torch and of the compiled kernels; the kernels use at most as many as this process
    has cores. None: as many as torch uses now, but at most as many as there are cores. The kernels do not follow
    `torch.set_num_threads`.

    In a process that was forked after this was called, torch gets one thread; the kernels are not limited.
    """
    if _Threads.is_forked:
        logger.warning(
            "this process was forked from one that has run a model: torch computes with one thread here; use "
            "multiprocessing's start method spawn for all of them"
        )
    count = count or (_Threads.is_forked and _Threads.asked) or _capped_threads(torch.get_num_threads())
    torch.set_num_threads(1 if _Threads.is_forked else count)
    _Threads.asked = count
    if open_library.cache_info().currsize:
        open_library().quire_prepare(choose_path().name == "amx", kernel_threads())


def kernel_threads() -> int:
    """Return the number of threads that the compiled kernels use."""
    return _capped_threads(_Threads.asked or torch.get_num_threads())


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity mask and its cgroup quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError):
        quota = (CGROUP / "cpu.max").read_text().split()
        if len(quota) == 2 and quota[0].isdigit():
            cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def _capped_threads(count: int) -> int:
    """Cap a thread count at the usable cores: more threads would only compete for them."""
    return min(count, usable_cores())


class _Failures:
    """Raises RuntimeError with the reason if a call of the kernels failed in any thread, in practice for lack of
    memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._take = library.quire_take_failure
        self._take.argtypes, self._take.restype = [], c_char_p

    def check(self, result: Any, _function: Any, _arguments: Any) -> Any:
        if (reason := self._take()) is not None:
            raise RuntimeError(f"the native CPU kernels failed: {reason.decode(errors='replace')}")
        return result


@cache
def _features() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(_file_of("_features")))
    except OSError:
        raise Unavailable(_NOT_BUILT) from None
    library.quire_cpu_features.restype = c_char_p
    return library


def _cpu_features() -> frozenset[str]:
    return frozenset(_features().quire_cpu_features().decode().split())


def _file_of(name: str) -> Path:
    return _HERE / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _is_built(path: CpuPath) -> bool:
    return _file_of(f"_cpu_{path.library}").is_file()


def _check_origin(library: ctypes.CDLL) -> None:
    """Raise Unavailable if the library was built from other sources than those beside it."""
    if not hasattr(library, "quire_source"):
        raise Unavailable(_OTHER_SOURCES)
    library.quire_source.restype = c_char_p
    if library.quire_source().decode() != digest_of_sources(_HERE):
        raise Unavailable(_OTHER_SOURCES)


def why_not_native(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return one line that says why the compiled kernels cannot serve `dtype` on `device`; None if they can."""
    if device.type != "cpu":
        return f"the native CPU kernels do not run on {device.type}"
    if dtype not in TYPES:
        return f"the native CPU kernels do not support {str(dtype).removeprefix('torch.')}"
    try:
        open_library()
    except Unavailable as reason:
        return str(reason)
    return None
