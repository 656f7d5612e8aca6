"""Makes the import of torch faster in a process that only serves models. Imports nothing heavy itself."""

from __future__ import annotations

import ctypes
import inspect
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType

META_KERNELS = "torch._meta_registrations"  # for tracing and compiling models, and for torch.Generator
_DEFERRED = (  # besides the meta kernels: packages that no server needs, and a parser of operators' schemas
    META_KERNELS, "torch.export", "torch.utils.data", "torch.distributions", "torch.masked", "torch.quantization",
    "torch.nn.intrinsic", "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized", "torchgen.model",
)  # fmt: skip
_loading = threading.RLock()  # re-entrant: the module looks up its own names while it is loaded
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def may_have_gpu() -> bool:
    """Whether the system has the devices of a GPU's driver. Only torch knows whether it can use one."""
    return any(map(os.path.exists, _GPU_DEVICES))


def import_extensions() -> None:
    """Import the extension modules that an engine needs besides torch's. The system opens one library at a time: after
    `open_libraries`, each of them would wait until torch's library is open."""
    import binascii  # noqa: F401
    import hashlib  # noqa: F401
    import heapq  # noqa: F401
    import json  # noqa: F401
    import queue  # noqa: F401

    import msgspec  # noqa: F401
    import numpy as np  # noqa: F401
    import zmq  # noqa: F401


def open_libraries() -> threading.Thread | None:
    """Open torch's largest library in a thread, without the GIL. That takes as long as importing much of the rest.
    Returns the thread, or None if there is nothing to open. If a library cannot be opened, torch's own import reports
    it."""
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
    """Release the pages of torch's code from this process's memory. Two thirds of them are only read during the import:
    symbols, relocations, registrations. Pages that are needed again are mapped again from the file."""
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


def defer_modules() -> None:
    """Let the next `import torch` skip modules that serving does not need, on machines without a GPU: the Python
    kernels for meta tensors, which take a quarter of the import time, and some that take a fifth. Each is loaded when
    an attribute of it is accessed."""
    if "torch" not in sys.modules and not may_have_gpu():
        sys.meta_path.insert(0, _Finder())


@contextmanager
def find_modules_of_frames() -> Iterator[None]:
    """Let `inspect.getmodule` find the module of a stack frame by the name in the frame's globals. While torch is
    imported, it registers operators and asks for the source line of each call; `inspect` would resolve the file names
    of all modules for that."""
    search: Callable[..., ModuleType | None] = inspect.getmodule

    def getmodule(object: object, _filename: str | None = None) -> ModuleType | None:  # noqa: A002  as in inspect
        if isinstance(object, FrameType):
            found = sys.modules.get(object.f_globals.get("__name__", ""))
            if found is not None:
                return found
        return search(object, _filename)

    inspect.getmodule = getmodule
    try:
        yield
    finally:
        inspect.getmodule = search


def load_meta_kernels() -> None:
    """Load the meta kernels, if `defer_modules` deferred them."""
    module = sys.modules.get(META_KERNELS)
    if isinstance(module, _Deferred):
        module.load()


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if isinstance(parent, _Deferred):  # it imports its submodules itself, in the order that they need
            parent.load()
            loaded = sys.modules.get(fullname)
            return None if loaded is None else ModuleSpec(fullname, _Loaded(loaded))
        if fullname not in _DEFERRED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Deferring(spec.loader)
        return spec


class _Deferring(Loader):
    """A loader whose module is executed when one of its attributes is first accessed."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: _Deferred executes the module later."""


class _Loaded(Loader):
    """A loader that gives a module that is loaded already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


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
            if isinstance(deferring, _Deferring):  # no other thread has loaded it
                self.__spec__.loader = deferring.loader
                self.__class__ = ModuleType  # type: ignore[assignment]
                deferring.loader.exec_module(self)
