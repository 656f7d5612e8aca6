from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from interpreter import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
SUPPORT = Path(__file__).parents[3] / "support"


def test_a_first_request_finds_every_kernel_compiled(tmp_path: Path) -> None:
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(tmp_path), "QUIRE_TEST_DEVICE": "cpu"}
    command = [sys.executable, str(SUPPORT / "prepare_drill.py")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=1_200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"_prefill", "_split_attention", "_vector_kernel", "_skinny_kernel"} <= set(found["prepared"])
    assert found["later"] == []
