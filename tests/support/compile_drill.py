"""Compiles kernels for an H200 on any machine, ahead of their launch, and prints what happened as JSON.

A process of its own: the tests around it run kernels in Triton's interpreter, which is chosen when triton is imported.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import Any

import torch
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from h200 import H200
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton import compiling, norm
from quire.kernels.triton.activation import gate
from quire.kernels.triton.attention_hopper import hopper_prefill
from quire.kernels.triton.compiling import compiling_only, stop_background
from quire.kernels.triton.norm import rms_norm
from quire.kernels.triton.rotary import HeadNorms, QueryRotary


def step(rows: int, columns: int = 64) -> None:
    x, out = torch.ones(rows, columns, dtype=torch.bfloat16), torch.zeros(rows, columns, dtype=torch.bfloat16)
    rms_norm(x, x[0], 1e-6, out)
    gate(torch.ones(rows, 2 * columns, dtype=torch.bfloat16), "silu", out)
    assert not out.any(), "a kernel was launched"


def prompts(dim: int) -> None:
    """The attention of prompts that is written in Gluon, over a cache of 4 blocks."""
    cache, query = torch.zeros(4, 2, 16, dim, dtype=torch.bfloat16), torch.zeros(8, 4, dim, dtype=torch.bfloat16)
    tables, tiles = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 8, dtype=torch.int32)
    norms = HeadNorms(query[0, 0], query[0, 1], 1e-6) if dim == 64 else None  # an argument of nested tuples
    rotary = QueryRotary(torch.zeros(16, dim, dtype=torch.bfloat16), None, norms)
    rule = AttentionRule(0.125, window=9)
    hopper_prefill(query, cache, cache, tables, tiles, rule, query, rotary=rotary, dependent=True)


def launch_while_compiling(launch: Any, compiled: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Launch a kernel that a child process is compiling, another one that nothing compiles, the first once more, and
    one that was compiled soon. Returns what was compiled or read from the cache."""
    compiling.begin_early()
    compiled.clear()
    x, other, third = (torch.ones(3, columns, dtype=torch.bfloat16) for columns in (512, 2048, 4096))
    with compiling_only(wait=False) as compilations:
        rms_norm(x, x[0], 1e-6, torch.zeros_like(x))
    with compiling_only(wait=False, soon=True) as soon:
        rms_norm(third, third[0], 1e-6, torch.zeros_like(third))
    JITFunction.run = lambda self, *args, grid, warmup, **more: launch(self, *args, grid=grid, warmup=True, **more)
    for each in (x, other, x):
        rms_norm(each, each[0], 1e-6, torch.zeros_like(each))
    soon.wait()
    rms_norm(third, third[0], 1e-6, torch.zeros_like(third))
    assert compilations.are_done() and soon.are_done()  # noqa: PT018  (not a test)
    return compiled


def count_launchers(kernel: Any) -> int:
    """Return how many variants of a kernel have a launcher in Triton's cache."""

    def refuse(*_: Any) -> str:
        raise RuntimeError("it is not in the cache")

    knobs.build.impl = refuse
    found = 0
    for variant in kernel.device_caches[0][0].values():
        with suppress(RuntimeError, AssertionError):  # AssertionError: there is no libcuda
            CudaLauncher(variant.src, variant.metadata)
            found += 1
    return found


def main() -> None:
    driver.set_active(H200())
    compiled: list[str] = []
    later: list[tuple[str, bool]] = []  # kernels compiled in the background, and whether they were in the cache then
    asked: list[tuple[bool, bool]] = []  # of every launch: is it the main thread's, is it only compiled
    knobs.compilation.listener = lambda *, src, **_: compiled.append(src.name)
    run = JITFunction.run

    def watch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        asked.append((threading.current_thread() is threading.main_thread(), warmup))
        return run(self, *args, grid=grid, warmup=True, **kwargs) if warmup else None

    JITFunction.run = watch
    with compiling_only():
        step(3)
        other = threading.Thread(target=step, args=(3,))
        other.start()
        other.join()
    ahead = len(compiled)
    with compiling_only():
        step(3)
    again = len(compiled) - ahead
    knobs.compilation.listener = lambda *, src, cache_hit, **_: later.append((src.name, cache_hit))
    with compiling_only(wait=False):
        step(1, columns=256)
        for dim in (64, 80, 96):
            prompts(dim)
    for future in list(compiling._begun.values()):
        future.result()
    found = {"later": list(later), "ahead": ahead, "again": again, "asked": list(asked)}
    found["restored"] = JITFunction.run is watch
    found["joined"] = launch_while_compiling(run, later)
    found["launchers"] = count_launchers(norm._rms_norm_kernel)
    found["variants"] = len(norm._rms_norm_kernel.device_caches[0][0])
    stop_background()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
