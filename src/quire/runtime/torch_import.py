"""Makes the import of torch shorter in a process that serves models alone. Imports nothing heavy itself."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

META_KERNELS = "torch._meta_registrations"
_loading = threading.RLock()  # two threads may ask for the first name; the module asks for its own names too
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def open_libraries() -> threading.Thread | None:
    """Open torch's largest library on a thread, without the GIL: it takes as long as importing much of the rest.
    Returns the thread; None where there is nothing to open. A library that cannot be opened is left to torch."""
    found = find_spec("torch")
    if sys.platform != "linux" or found is None or found.origin is None:
        return None
    folder, system = Path(found.origin).parent / "lib", ctypes.CDLL(None)
    system.dlopen.argtypes, system.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p

    def open_all() -> None:  # in torch's order and modes
        system.dlopen(bytes(folder / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL)
        system.dlopen(bytes(folder / "libtorch_cpu.so"), os.RTLD_NOW)

    thread = threading.Thread(target=open_all, name="libraries", daemon=True)
    thread.start()
    return thread


def forget_library_pages() -> None:
    """Let the pages of torch's code go from this process's memory, two thirds of which only its import reads: symbols,
    relocations, registrations. What is needed again is mapped again from the file."""
    if sys.platform != "linux":
        return
    system = ctypes.CDLL(None)
    system.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    maps = ""
    with suppress(OSError):  # a sandbox may have no /proc
        maps = Path("/proc/self/maps").read_text()
    for line in maps.splitlines():
        span, access, *_, file = line.split()
        if access == "r-xp" and Path(file).name.startswith("libtorch_"):  # never written: nothing is lost
            begin, end = (int(each, 16) for each in span.split("-"))
            system.madvise(begin, end - begin, mmap.MADV_DONTNEED)


def defer_meta_kernels() -> None:
    """Let the next `import torch` leave out the kernels that it writes in Python for tensors without memory, a quarter
    of its time, on machines without a GPU: tracing and compiling models need them, and torch.Generator does. They are
    loaded when something asks their module for a name."""
    if "torch" not in sys.modules and not any(map(os.path.exists, _GPU_DEVICES)):
        sys.meta_path.insert(0, _Finder())


def load_meta_kernels() -> None:
    """Load what `defer_meta_kernels` left out, if it did."""
    module = sys.modules.get(META_KERNELS)
    if isinstance(module, _Deferred):
        module.load()


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != META_KERNELS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Deferring(spec.loader)
        return spec


class _Deferring(Loader):
    """Makes a module that is executed when it is first asked for a name."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Later, see _Deferred."""


class _Deferred(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        self.load()
        return getattr(self, name)

    def load(self) -> None:
        with _loading:
            assert self.__spec__ is not None
            deferring = self.__spec__.loader
            if isinstance(deferring, _Deferring):  # nobody else was faster
                self.__spec__.loader = deferring.loader
                self.__class__ = ModuleType  # type: ignore[assignment]
                deferring.loader.exec_module(self)
