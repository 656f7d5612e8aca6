"""Builds the CPU kernels, a library for each instruction set, and the router's compiled code. Without a C++
compiler Quire installs too, on torch and msgspec."""

import copy
import ctypes
import os
import runpy
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import OptionError

FOLDER = Path("src/quire/kernels/native")
SOURCE, FEATURES = FOLDER / "quire_cpu.cpp", FOLDER / "cpu_features.cpp"
MODULE = runpy.run_path(str(FOLDER / "paths.py"))
PATHS, COMPILE, DIGEST = MODULE["PATHS"], list(MODULE["COMPILE"]), MODULE["digest_of_sources"](FOLDER)
ROUTER = Path("src/quire/serving/router")
NATIVE = runpy.run_path(str(ROUTER / "native.py"))


def _is_clang() -> bool:
    compiler = shlex.split(os.environ.get("CXX") or os.environ.get("CC") or sysconfig.get_config_var("CXX") or "c++")
    try:
        return b"clang" in subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    except OSError:
        return False


class BuildPaths(build_ext):
    """Builds the libraries of the paths that `--paths` names, side by side. By default a checkout gets `here`, a wheel
    `all`. A library that holds the digest of the present sources is not built again, except with `--force`. With
    `--sanitize` libraries report memory errors; they load only where the sanitizers' runtime is preloaded."""

    user_options: ClassVar = [
        *build_ext.user_options,
        ("paths=", None, "names by commas; all; or here: the best one for this CPU and the portable one"),
        ("sanitize=", None, "build for this sanitizer of the compiler: address or undefined; not in place"),
    ]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.paths = self.sanitize = None

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        self.paths = self.paths or ("here" if self.inplace else "all")
        self._is_in_place = bool(self.inplace)  # `run` builds elsewhere, and copies
        known = {"here", "all", *(path.library for path in PATHS)}
        if unknown := sorted(set(self.paths.split(",")) - known):
            raise OptionError(f"--paths: {', '.join(unknown)} is none of {', '.join(sorted(known))}")
        if self.sanitize not in (None, *SANITIZE):
            raise OptionError(f"--sanitize: {self.sanitize} is none of {', '.join(SANITIZE)}")
        if self.sanitize and self.inplace:
            raise OptionError("--sanitize: such a library needs a preloaded runtime; use --build-lib, not --inplace")

    def build_extensions(self) -> None:
        features, router, *libraries = self.extensions
        self.extensions = [features, router]
        super().build_extensions()
        chosen = self._choose(Path(self.get_ext_fullpath(features.name)))
        needed = [each for each in libraries if _library(each) in chosen]
        self.extensions = [each for each in needed if self.force or not self._is_built(each)]
        super().build_extensions()
        if not self._is_in_place:  # in place, only what is new is copied
            self.extensions = needed
        self.extensions += [features, router]

    def build_extension(self, ext: Extension) -> None:
        own = copy.copy(self)  # all are made of one source: each needs a folder of its own for its object
        own.build_temp = str(Path(self.build_temp) / ext.name)
        own.force = True
        if self.sanitize and (_library(ext) in LIBRARIES or ext.name.endswith(f".{NATIVE['NAME']}")):
            ext.extra_compile_args += SANITIZE[self.sanitize]
            ext.extra_link_args.append(f"-fsanitize={self.sanitize}")
        build_ext.build_extension(own, ext)

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        for file in FOLDER.glob("_cpu_*.so"):
            if not _holds_digest(file):
                file.unlink()  # the loader would refuse it

    def _choose(self, features: Path) -> set[str]:
        """The libraries to build. `features`: the library that asks the CPU; without it the loader opens no other."""
        libraries = [path.library for path in PATHS]
        if not features.is_file():
            return set()
        if self.paths == "all":
            return set(libraries)
        if self.paths != "here":
            return set(self.paths.split(","))
        ask = ctypes.CDLL(str(features.resolve())).quire_cpu_features
        ask.restype = ctypes.c_char_p
        has = set(ask().decode().split())
        return {next(path.library for path in PATHS if path.needs <= has), libraries[-1]}

    def _is_built(self, ext: Extension) -> bool:
        file = Path(self.get_ext_fullpath(ext.name))
        return _holds_digest(FOLDER / file.name if self._is_in_place else file)


def _library(ext: Extension) -> str:
    return ext.name.rpartition("._cpu_")[2]


def _holds_digest(library: Path) -> bool:
    return library.is_file() and DIGEST.encode() in library.read_bytes()


def _extension(
    name: str, source: Path, compile_args: list[str], link_args: list[str], digest: str = DIGEST
) -> Extension:
    return Extension(
        ".".join((*source.parent.parts[1:], name)),
        [str(source)],
        language="c++",
        optional=True,
        define_macros=[("QUIRE_SOURCE", f'"{digest}"')],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )


IS_CLANG = _is_clang()
if not IS_CLANG:
    COMPILE.append("-Wno-maybe-uninitialized")  # of GCC's own headers
LINK = ["-Wl,-z,lazy", "-pthread"]
# without optimization: with it, GCC takes many minutes for a path
_REPORTS = ["-O0", "-g1", "-fno-omit-frame-pointer"]
SANITIZE = {
    "address": [*_REPORTS, "-fsanitize=address"],
    # checks of null and of sizes of objects double the code, and the other sanitizer finds what they find
    "undefined": [*_REPORTS, "-fsanitize=undefined", "-fno-sanitize=null,vptr,object-size"],
}
LIBRARIES = {path.library: path.flags for path in PATHS}

setup(
    cmdclass={"build_ext": BuildPaths},
    ext_modules=[
        _extension("_features", FEATURES, ["-O1", "-g0", "-std=c++17"], []),
        _extension(
            NATIVE["NAME"],
            ROUTER / "native.cpp",
            list(NATIVE["COMPILE"]),
            [],
            NATIVE["digest_of_sources"](ROUTER),
        ),
        *(_extension(f"_cpu_{name}", SOURCE, [*COMPILE, *flags], LINK) for name, flags in LIBRARIES.items()),
    ],
)
