"""Builds the CPU kernels for the machine it runs on. Without a C++ compiler Quire installs all the same, on torch."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/quire/kernels/native")
SOURCE, HEADERS = FOLDER / "quire_cpu.cpp", sorted(FOLDER.glob("*.h"))
DIGEST = hashlib.sha256(b"".join(file.read_bytes() for file in (SOURCE, *HEADERS))).hexdigest()

setup(
    ext_modules=[
        Extension(
            "quire.kernels.native._cpu",
            [str(SOURCE)],
            depends=[str(header) for header in HEADERS],
            language="c++",
            optional=True,
            define_macros=[("QUIRE_SOURCE", f'"{DIGEST}"')],
            extra_compile_args=[
                "-O3",
                "-march=native",
                "-std=c++17",
                "-fopenmp",
                "-ffp-contract=off",  # a sum has the same bits wherever it is written: see add_product in simd.h
                "-fno-math-errno",
                "-fno-trapping-math",
                "-Wno-psabi",
            ],
            extra_link_args=["-Wl,-z,lazy"],  # OpenMP comes from torch's own library when it is loaded
        )
    ]
)
