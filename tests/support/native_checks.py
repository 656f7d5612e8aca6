"""Programs in C++ that check compiled sources of Quire by themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from quire.kernels.native import loader

COMPILER = shutil.which("c++")
HEADERS = Path(loader.__file__).parent
PACKAGE = HEADERS.parents[1]


def run_checks(name: str, folder: Path, *more_flags: str) -> None:
    """Compile tests/support/NAME.cpp into a folder and run it; what it says fails the test."""
    source, program = Path(__file__).with_name(f"{name}.cpp"), folder / name
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{HEADERS}", f"-I{PACKAGE}", *more_flags]
    subprocess.run([COMPILER or "", *flags, str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
