"""Compiles kernels before they are launched, in parallel.

Triton compiles a kernel at its first launch, for the types, alignments and constants of that launch. So a step is run
once without launching anything, and exactly the kernels that it would have launched are compiled. Threads share the
compilations that a caller waits for. The others run in child processes, so that their Python code does not contend with
the requests that are served. The thread of a compilation also loads the kernel onto the device. A launch of a kernel
that is being compiled waits for that compilation, and does not begin a second one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any, Self

import torch
from triton import AsyncCompileMode, knobs
from triton.runtime import build
from triton.runtime._async_compile import FutureKernel, active_mode
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from quire.kernels.triton.compile_process import CompileProcesses, describe
from quire.kernels.triton.launch import INTERPRETED

logger = logging.getLogger("quire.kernels")
MOST_THREADS, MOST_PROCESSES = 16, 8
_lock = threading.RLock()
_begun: dict[str, Future[Any]] = {}  # by device and Triton's key of a compilation
_background_compile_lock = threading.Lock()  # held by the one background thread that compiles in this process
_here = threading.local()  # .inside: this thread is inside `compiling_only`
_module_lock = threading.Lock()  # held while Python loads one of Triton's libraries


def begin_early() -> None:
    """Start what the first compilations depend on, in the background: Triton hashes its own files once per process, and
    the child processes import Triton. From now on, launches wait for compilations that have begun."""
    if not INTERPRETED:
        _pool().submit(triton_key)
        _processes().start()
        _join_at_launch()


class Compilations:
    """The compilations that one `compiling_only` began."""

    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        self._futures = futures

    def are_done(self) -> bool:
        """Whether a launch of these kernels would not wait. Also true for those that failed."""
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        """Wait until they are done."""
        wait_for(self._futures)


@contextmanager
def compiling_only(*, wait: bool = True, soon: bool = False) -> Iterator[Compilations]:
    """Within this context, a kernel launch in this thread only compiles the kernel; its outputs are not written.

    On exit, waits for the compilations; with `wait=False`, child processes do them in the background. `soon`: without
    `wait`, threads of this process compile what no idle child can, as for a caller that waits. A compilation that fails
    is repeated at the kernel's first launch, which raises its error. Does nothing under the interpreter, which compiles
    nothing, nor when nested in the same thread, where the outer context decides whether to wait.
    """
    if INTERPRETED or is_compiling_only():
        yield Compilations(())
        return
    with _compile_only_launches(), _Mode(wait=wait, soon=soon) as mode:
        yield Compilations(mode.begun)


def is_compiling_only() -> bool:
    """Whether this thread is inside `compiling_only`. Kernels then write nothing, so their outputs contain whatever was
    in memory."""
    return getattr(_here, "inside", False)


def is_compiling() -> bool:
    """Whether kernels are being compiled in the background, or are queued."""
    return bool(_begun)


def report_compilations(report: Callable[[], None]) -> None:
    """Call `report` before and after every compilation from now on, so that a step that compiles kernels is seen to
    make progress although it takes long."""

    def hook(**_: object) -> None:
        report()

    knobs.runtime.jit_cache_hook = knobs.runtime.jit_post_compile_hook = hook


def stop_background() -> None:
    """Cancel queued compilations and end the child processes, so that this process can exit without finishing them."""
    for future in list(_begun.values()):
        future.cancel()
    _processes().close()


class _Mode(AsyncCompileMode):  # type: ignore[misc]
    """Compiles each kernel once, even if several contexts ask for it."""

    def __init__(self, *, wait: bool, soon: bool = False) -> None:
        self._wait, self._soon = wait, wait or soon
        self._pool = _pool() if self._soon else _background()
        super().__init__(self._pool, ignore_errors=True)
        self.begun: list[Future[Any]] = []  # not emptied on exit, unlike Triton's own list

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        device = _current_device()
        key = f"{device} {key}"  # the result is loaded onto one device
        if key not in self.future_kernels:
            future = _begun.get(key)
            if future is None or (self._soon and future.cancel()):  # one that has not begun is moved to this pool
                how = partial(_compile_and_load, compile_fn, device, wait=not self._soon)
                future = _begin(self._pool, key, how, finalize_fn)
            self.raw_futures.append(future)
            self.begun.append(future)
            self.future_kernels[key] = FutureKernel(finalize_fn, future)
        return self.future_kernels[key]

    def __exit__(self, *error: object) -> None:
        if not self._wait:
            self.raw_futures.clear()
        super().__exit__(*error)


def _begin(
    pool: ThreadPoolExecutor, key: str, compile_fn: Callable[[], Any], finalize: Callable[[Any], None]
) -> Future[Any]:
    """Start a compilation. The thread that compiled the kernel also registers it for launches, so that no other thread
    has to wait for it."""

    def keep(future: Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None:
            finalize(future.result())
        if _begun.get(key) is future:
            del _begun[key]

    future = pool.submit(compile_fn)
    future._key = key  # type: ignore[attr-defined]  # by which Triton finds the kernel of a future
    _begun[key] = future
    future.add_done_callback(keep)
    return future


@contextmanager
def _compile_only_launches() -> Iterator[None]:
    """Make launches of this thread compile only; other threads launch normally."""
    with _lock:
        launch = JITFunction.run

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            only = getattr(_here, "inside", False)
            return launch(self, *args, grid=grid, warmup=warmup or only, **kwargs)

        JITFunction.run, _here.inside = run, True
        try:
            yield
        finally:
            JITFunction.run, _here.inside = launch, False


@cache
def _join_at_launch() -> None:
    """Have every launch that misses Triton's table of kernels wait for the compilation of its kernel, if one has begun.
    Triton alone would compile the kernel a second time, in the thread of the launch. Costs nothing otherwise."""
    compile_at_launch = JITFunction._do_compile

    def compile_once(self: Any, *task: Any, **more: Any) -> Any:
        if active_mode.get() is not None:
            return compile_at_launch(self, *task, **more)
        with _Mode(wait=True):
            kernel = compile_at_launch(self, *task, **more)
        return kernel.result() if isinstance(kernel, FutureKernel) else kernel

    JITFunction._do_compile = compile_once


def _load_module(load: Callable[[str, str], ModuleType], name: str, path: str) -> ModuleType:
    """Load one of Triton's libraries into a module that nothing else changes.

    The libraries that launch kernels all have one name. When Python loads one of them again, it takes the module that
    was loaded last under this name, and replaces the functions in it. So another thread, between loading its library
    and reading `launch` from it, would get the launcher of a kernel with other arguments.
    """
    with _module_lock:
        loaded = load(name, path)
        own = ModuleType(name, loaded.__doc__)
        vars(own).update(vars(loaded))
    return own


if hasattr(build, "_load_module_from_path"):  # other versions of Triton have one launcher for all kernels
    build._load_module_from_path = partial(_load_module, build._load_module_from_path)


def _current_device() -> int | None:
    """Return the CUDA device of this thread, or None if there is none."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _compile_and_load(compile_here: Callable[[], Any], device: int | None, *, wait: bool) -> Any:
    """Compile a kernel, and load it onto the device of the thread that asked for it."""
    kernel = _compile_outside(compile_here, wait=wait)
    if device is not None:
        torch.cuda.set_device(device)
        _load(kernel)
    return kernel


def _load(kernel: Any) -> None:
    """Build a kernel's launcher and load its code, as Triton does at the first launch. If that fails, it is repeated
    there and raises its error."""
    try:
        kernel._init_handles()
    except Exception as error:  # noqa: BLE001  (the driver and the C compiler raise arbitrary exceptions)
        logger.debug("a kernel cannot be loaded ahead: %s", error)
        kernel._run = None


def _compile_outside(compile_here: Callable[[], Any], *, wait: bool) -> Any:
    """Have a child process compile a kernel, then load it from Triton's cache. Compile it in this process if that fails
    or, without `wait`, if no child is idle."""
    task = describe(compile_here)
    if wait:
        _processes().start()
    if (task is not None and _processes().compile(task, wait=wait)) or not wait:
        return compile_here()
    with _background_compile_lock:
        return compile_here()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_processes() -> int:
    return max(1, min(_num_cores() // 2, MOST_PROCESSES))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_num_cores(), MOST_THREADS), thread_name_prefix="quire-compile")


@cache
def _processes() -> CompileProcesses:
    return CompileProcesses(_num_processes())


@cache
def _background() -> ThreadPoolExecutor:
    """One thread per child process, which only waits for the child."""
    return ThreadPoolExecutor(_num_processes(), thread_name_prefix="quire-compile-later")
