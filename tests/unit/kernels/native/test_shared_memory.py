"""What processes share, in C++ with threads in their place, as tools/sanitize.py runs it under sanitizers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from native_checks import COMPILER, run_checks


@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="no C++ compiler for Linux")
def test_messages_sums_and_heartbeats_reach_every_thread(tmp_path: Path) -> None:
    run_checks("shared_memory_checks", tmp_path)
