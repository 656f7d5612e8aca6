"""Compiles CUDA C++ at run time by NVRTC, which comes with torch, and caches the machine code in Triton's cache
folder."""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

Argument = ctypes.c_uint64 | ctypes.Structure | ctypes.Array[ctypes.c_uint64]
_FOLDER = Path(__file__).parent
_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_TENSOR_MAP_DTYPES = {  # CUtensorMapDataType: bytes are bytes
    torch.int8: 0, torch.float8_e4m3fn: 0, torch.float16: 6, torch.bfloat16: 9,
}  # fmt: skip
_NOT_INTERLEAVED, _SWIZZLE_128_BYTES, _L2_128_BYTES, _ZEROS_OUTSIDE = 0, 3, 2, 0
_DEPENDENT_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class CudaError(RuntimeError):
    """An error of NVRTC or of the CUDA driver."""


@cache
def why_no_nvrtc() -> str | None:
    """Return why sources cannot be compiled; None if they can."""
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    try:
        _nvrtc()
    except OSError as error:
        return f"NVRTC was not found: {error}"
    return None


class _Attribute(ctypes.Structure):
    """Mirrors CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint64 * 8))


class _Launch(ctypes.Structure):
    """Mirrors CUlaunchConfig."""

    _fields_ = (
        ("programs", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


_dependent = _Attribute(_DEPENDENT_LAUNCH, (1,))


class CudaKernel:
    """A function of a compiled source on the current device. Launches can be captured in a CUDA graph."""

    def __init__(self, code: bytes, name: str, shared_bytes: int) -> None:
        driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.current_stream()  # makes sure that the device's context exists
        _check(driver.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
        _check(driver.cuFuncSetAttribute(function, _DYNAMIC_SHARED_BYTES, shared_bytes), "cuFuncSetAttribute")
        self._function, self._shared_bytes = function, shared_bytes

    def launch(
        self, programs: int, threads: int, arguments: Sequence[Argument], *, dependent: bool = False
    ) -> None:  # fmt: skip
        """Launch on the current stream. `dependent`: programmatic dependent launch; the kernel then starts while the
        previous one still runs, and must wait for it by itself."""
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        stream = torch.cuda.current_stream().cuda_stream
        launch = _Launch(
            (programs, 1, 1), (threads, 1, 1), self._shared_bytes, stream, ctypes.pointer(_dependent), dependent
        )
        _check(_driver().cuLaunchKernelEx(ctypes.byref(launch), self._function, addresses, None), "cuLaunchKernelEx")


def compile_source(
    files: Sequence[str], constants: dict[str, int], capability: tuple[int, int], *, before: str = ""
) -> bytes:
    """Compile files of this folder, concatenated, with constants and the text `before` prepended, to machine code. Uses
    the disk cache, whose key includes the version of NVRTC."""
    lines = [f"constexpr int {name} = {value};\n" for name, value in constants.items()]
    source = "".join((*lines, before, *((_FOLDER / name).read_text() for name in files)))
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}a", "--std=c++17"]
    key = hashlib.sha256("\0".join((source, *options, str(_version()))).encode()).hexdigest()
    place = _cache_folder() / f"{key}.cubin"
    if place.is_file():
        return place.read_bytes()
    code = _compile(source, options)
    _keep(place, code)
    return code


def _cache_folder() -> Path:
    import triton

    return Path(triton.knobs.cache.dir) / "quire"


def _compile(source: str, options: Sequence[str]) -> bytes:
    library, program = _nvrtc(), ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"quire.cu", 0, None, None), "NVRTC")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given) != 0:
            log = _read(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise CudaError(f"the source did not compile:\n{log.decode(errors='replace')}")
        return _read(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(get_size: Callable[..., int], get: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(get_size(program, ctypes.byref(size)), "NVRTC")
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer), "NVRTC")
    return buffer.raw


def _keep(place: Path, code: bytes) -> None:
    """Write code to the disk cache. If that fails (full disk, read-only folder), the next start compiles again."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            try:
                file.write(code)
                file.flush()
            except OSError:
                Path(file.name).unlink()
                raise
        Path(file.name).replace(place)
    except OSError:
        return


def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "NVRTC")
    return major.value, minor.value


@cache
def _nvrtc() -> ctypes.CDLL:
    major = str(torch.version.cuda).split(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"]
    spec = find_spec("nvidia")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    names += [str(found) for folder in folders for found in sorted(folder.glob(f"*/lib/libnvrtc.so.{major}"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(f"none of {', '.join(names)} can be loaded")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class TensorMap(ctypes.Structure):
    """CUtensorMap: describes TMA copies of boxes of a tensor of elements of 8 or 16 bits, with rows of 128 bytes,
    swizzled. Elements outside of the tensor are copied as zeros."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)
    _align_ = 64  # alignment of its address; ctypes honours it only from Python 3.13 on

    @classmethod
    def make(
        cls, address: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
    ) -> TensorMap:
        """Make a map. Sizes, strides and box are in elements, from the innermost dimension on; strides start at the
        second dimension."""
        memory, number = (ctypes.c_uint8 * (ctypes.sizeof(cls) + cls._align_))(), len(sizes)
        made = cls.from_buffer(memory, -ctypes.addressof(memory) % cls._align_)
        steps = (ctypes.c_uint64 * (number - 1))(*(dtype.itemsize * stride for stride in strides))
        status = _driver().cuTensorMapEncodeTiled(
            ctypes.byref(made), _TENSOR_MAP_DTYPES[dtype], number, ctypes.c_void_p(address),
            (ctypes.c_uint64 * number)(*sizes), steps,
            (ctypes.c_uint32 * number)(*box), (ctypes.c_uint32 * number)(*[1] * number),
            _NOT_INTERLEAVED, _SWIZZLE_128_BYTES, _L2_128_BYTES, _ZEROS_OUTSIDE,
        )  # fmt: skip
        _check(status, "cuTensorMapEncodeTiled")
        return made


def _check(status: int, what: str) -> None:
    if status != 0:
        raise CudaError(f"{what} failed with error {status}")
