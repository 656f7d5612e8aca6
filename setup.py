"""Builds the CPU kernels for the machine it runs on. Without a C++ compiler Quire installs all the same, on torch."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "src/quire/kernels/native/quire_cpu.cpp"
DIGEST = hashlib.sha256(Path(SOURCE).read_bytes()).hexdigest()

setup(
    ext_modules=[
        Extension(
            "quire.kernels.native._cpu",
            [SOURCE],
            language="c++",
            optional=True,
            define_macros=[("QUIRE_SOURCE", f'"{DIGEST}"')],
            extra_compile_args=[
                "-O3",
                "-march=native",
                "-std=c++17",
                "-fopenmp",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-Wno-psabi",
            ],
            extra_link_args=["-Wl,-z,lazy"],  # OpenMP comes from torch's own library when it is loaded
        )
    ]
)
