"""Builds the CPU kernels, a library for each instruction set. Without a C++ compiler Quire installs too, on torch."""

import copy
import hashlib
import os
import runpy
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/quire/kernels/native")
SOURCE, FEATURES, HEADERS = FOLDER / "quire_cpu.cpp", FOLDER / "cpu_features.cpp", sorted(FOLDER.glob("*.h"))
DIGEST = hashlib.sha256(b"".join(file.read_bytes() for file in (SOURCE, *HEADERS))).hexdigest()
LIBRARIES = {path.library: path.flags for path in runpy.run_path(str(FOLDER / "paths.py"))["PATHS"]}
COMPILE = [
    "-O3",
    "-g0",
    "-std=c++17",
    "-fopenmp",
    "-ffp-contract=off",  # a sum has the same bits wherever it is written: see add_product in simd.h
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
]


def _is_clang() -> bool:
    compiler = shlex.split(os.environ.get("CXX") or os.environ.get("CC") or sysconfig.get_config_var("CXX") or "c++")
    try:
        return b"clang" in subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    except OSError:
        return False


class BuildPaths(build_ext):
    """Builds the libraries side by side. `--paths avx2,portable` builds those alone, for a quick try of a change."""

    user_options: ClassVar = [
        *build_ext.user_options,
        ("paths=", None, "libraries to build, by commas; all when left out"),
    ]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.paths = None

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        if self.paths is not None:
            chosen = {"_features", *(f"_cpu_{name}" for name in self.paths.split(","))}
            self.extensions = [each for each in self.extensions if each.name.rpartition(".")[2] in chosen]

    def build_extension(self, ext: Extension) -> None:
        own = copy.copy(self)  # all are made of one source: each needs a folder of its own for its object
        own.build_temp = str(Path(self.build_temp) / ext.name)
        build_ext.build_extension(own, ext)


def _extension(name: str, source: Path, compile_args: list[str], link_args: list[str]) -> Extension:
    return Extension(
        f"quire.kernels.native.{name}",
        [str(source)],
        depends=[str(file) for file in (*HEADERS, FOLDER / "paths.py")] if source is SOURCE else [],
        language="c++",
        optional=True,
        define_macros=[("QUIRE_SOURCE", f'"{DIGEST}"')],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )


IS_CLANG = _is_clang()
if not IS_CLANG:
    COMPILE.append("-Wno-maybe-uninitialized")  # of GCC's own headers
# OpenMP: GCC's comes from torch's own library when it is loaded; of clang's, torch has none on most machines
LINK = ["-Wl,-z,lazy", *(["-fopenmp=libomp"] if IS_CLANG else [])]

setup(
    cmdclass={"build_ext": BuildPaths},
    ext_modules=[
        _extension("_features", FEATURES, ["-O1", "-g0", "-std=c++17"], []),
        *(_extension(f"_cpu_{name}", SOURCE, [*COMPILE, *flags], LINK) for name, flags in LIBRARIES.items()),
    ],
)
