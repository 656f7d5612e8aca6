"""What processes share, in C++ with threads in their place, as tools/sanitize.py runs it under sanitizers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.kernels.native import loader

COMPILER = shutil.which("c++")
HEADERS = Path(loader.__file__).parent
CHECKS = Path(__file__).parents[3] / "support" / "shared_memory_checks.cpp"


@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="no C++ compiler for Linux")
def test_messages_sums_and_heartbeats_reach_every_thread(tmp_path: Path) -> None:
    program = tmp_path / "shared_memory_checks"
    subprocess.run(
        [COMPILER or "", "-std=c++17", "-O1", "-pthread", f"-I{HEADERS}", str(CHECKS), "-o", str(program)], check=True
    )
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
