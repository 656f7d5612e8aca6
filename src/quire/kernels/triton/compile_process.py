"""Child processes that compile Triton kernels while this process serves requests.

Half of a compilation is Python code, which would contend with the requests for the GIL. A child compiles into Triton's
cache on disk, from which this process then loads the kernel, and builds the kernel's launcher there, a library in C
that a C compiler takes a third of a second for. A child needs no GPU. It ends when its parent does.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

_KERNELS = "quire.kernels."
_START = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from quire.kernels.triton.compile_process import main
main()"""  # the program of a child; it uses the sys.path of its parent
_NICE = 5  # niceness of children, so that they yield to the serving process


class CompileStopped(Exception):
    """`close` was called during a compilation, so its kernel is no longer needed."""


class CompileProcess:
    """One child process. Not thread-safe: one thread uses it at a time."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def wait_ready(self) -> bool:
        """Wait until the child has imported Triton. Returns False if it ended before."""
        assert self._child.stdout is not None
        try:
            return self._child.stdout.readline() == "ready\n"
        except ValueError:  # closed by another thread
            return False

    def compile(self, task: str) -> bool:
        """Compile what `describe` returned. Returns whether the kernel is in the cache now; False if the child has
        ended or could not compile it."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(task + "\n")
            self._child.stdin.flush()
            return self._child.stdout.readline() == "compiled\n"
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        """End the child now, whatever it compiles. Idempotent."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            with suppress(OSError):  # a task that was never sent
                if pipe is not None:
                    pipe.close()


class CompileProcesses:
    """Several children, started together. Any thread may compile; each child serves one thread at a time."""

    def __init__(self, count: int) -> None:
        self._all: list[CompileProcess] = []
        self._idle: queue.SimpleQueue[CompileProcess | None] = queue.SimpleQueue()  # None: a child that failed to start
        self._lock, self._count = threading.Lock(), count

    def start(self) -> None:
        """Start the children, if they were not started. They take some seconds to import Triton."""
        with self._lock, suppress(OSError):  # without children, kernels are compiled in this process
            while len(self._all) < self._count:
                child = CompileProcess()
                self._all.append(child)
                threading.Thread(target=self._admit, args=(child, self._idle), daemon=True).start()
        if not self._all:
            self._idle.put(None)

    def compile(self, task: str, *, wait: bool) -> bool:
        """Compile with an idle child; `wait` for one, or return False if there is none. Returns whether the kernel is
        in the cache now. Raises CompileStopped."""
        idle = self._idle
        try:
            child = idle.get(block=wait)
        except queue.Empty:
            return False
        try:
            compiled = child is not None and child.compile(task)
        finally:
            idle.put(child)
        if idle is not self._idle:
            raise CompileStopped
        return compiled

    @staticmethod
    def _admit(child: CompileProcess, idle: queue.SimpleQueue[CompileProcess | None]) -> None:
        idle.put(child if child.wait_ready() else None)

    def close(self) -> None:
        """End all children. `start` may start new ones."""
        with self._lock:
            children, idle = self._all, self._idle
            self._all, self._idle = [], queue.SimpleQueue()
        for child in children:
            child.close()
        idle.put(None)


def describe(compile_here: Callable[[], Any]) -> str | None:
    """Describe one of Triton's pending compilations in a line of text for a child. Returns None where this version of
    Triton, or the kernel's constants, cannot be described."""
    found = inspect.getclosurevars(compile_here).nonlocals
    try:
        source, target, options = found["src"], found["target"], found["options"]
        task = {
            "module": source.fn.fn.__module__,
            "function": source.fn.fn.__qualname__,
            "signature": source.signature,
            "constants": [[list(place), _constant(value)] for place, value in source.constants.items()],
            "attributes": [[list(place), value] for place, value in source.attrs.items()],
            "options": options.__dict__,
            "target": [target.backend, target.arch, target.warp_size],
        }
        return json.dumps(task)
    except (AttributeError, KeyError, TypeError):
        return None


def _constant(value: Any) -> Any:
    kind = type(value).__name__
    if kind == "dtype":
        return {"dtype": str(value)}
    return {"constexpr": value.value} if kind == "constexpr" else value


def _compile(task: dict[str, Any]) -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def constant(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return tl.dtype(value["dtype"]) if "dtype" in value else tl.constexpr(value["constexpr"])

    if not task["module"].startswith(_KERNELS):
        raise ValueError(f"{task['module']} is not one of our kernels' modules")
    function = importlib.import_module(task["module"])
    for name in task["function"].split("."):
        function = getattr(function, name)
    signature = {name: _tuples(kind) for name, kind in task["signature"].items()}
    constants = {tuple(place): constant(value) for place, value in task["constants"]}
    attributes = {tuple(place): value for place, value in task["attributes"]}
    make_source: Any = ASTSource
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        make_source = GluonASTSource
    source = make_source(function, signature, constants, attributes)
    options = {name: _tuples(value) for name, value in task["options"].items()}
    kernel = triton.compile(source, target=GPUTarget(*task["target"]), options=options)
    if task["target"][0] == "cuda":
        with suppress(Exception):  # the parent builds it then, and gets the error if that fails too
            _build_launcher(source, kernel.metadata)


def _build_launcher(source: Any, metadata: Any) -> None:
    """Build the library that launches a kernel, unless it is in Triton's cache."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(source, metadata)


def _tuples(value: Any) -> Any:
    """Convert JSON lists back to tuples, recursively."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _serve(tasks: IO[str], answers: IO[str]) -> None:
    for line in tasks:
        try:
            _compile(json.loads(line))
            answer = "compiled"
        except Exception as error:  # noqa: BLE001  the parent then compiles it itself and gets the error there
            answer = f"failed: {error!r}".replace("\n", " ")
        print(answer, file=answers, flush=True)


def main() -> None:
    """Run a child process: compile tasks from stdin until it closes, and answer on stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; the child ends when its stdin closes
    with suppress(OSError):
        os.nice(_NICE)
    answers, sys.stdout = sys.stdout, sys.stderr  # only answers go to the parent's pipe, whatever else prints
    import quire.kernels.triton.launch  # noqa: F401  imported before the first task arrives

    print("ready", file=answers, flush=True)
    _serve(sys.stdin, answers)
