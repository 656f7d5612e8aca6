"""Schemathesis against /openapi.json: a short run; tests/soak has the long one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.http.conftest import Serve

EXAMPLES = 30  # for each operation that has something to vary


def test_no_server_error_and_no_answer_that_breaks_its_schema(serve: Serve, tmp_path: Path) -> None:
    """A request may fit its schema and still be refused: parameters that contradict each other, ids the model lacks."""
    pytest.importorskip("schemathesis")
    server = serve(lambda prompt, index: " ok and some more", limits={"max_tokens": 64})
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--max-examples",
               str(EXAMPLES), "--phases", "fuzzing", "--exclude-checks", "positive_data_acceptance",
               "--generation-deterministic"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-2_000:]
    cases = re.search(r"(\d+) generated", done.stdout)
    assert cases is not None
    assert int(cases[1]) >= 100
