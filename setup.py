"""Builds the CPU kernels for the machine it runs on. Without a C++ compiler Quire installs all the same, on torch."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "quire.kernels.native._cpu",
            ["src/quire/kernels/native/quire_cpu.cpp"],
            language="c++",
            optional=True,
            extra_compile_args=[
                "-O3",
                "-march=native",
                "-std=c++17",
                "-fopenmp",
                "-fno-math-errno",
                "-Wno-psabi",
                "-fno-trapping-math",
            ],
            extra_link_args=["-Wl,-z,lazy"],  # OpenMP comes from torch's own library when it is loaded
        )
    ]
)
