"""Schemathesis against /openapi.json: a short run; tests/soak has the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemathesis_run import run_schemathesis
from tests.http.conftest import Serve


def test_no_server_error_and_no_answer_that_breaks_its_schema(serve: Serve, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    server = serve(lambda prompt, index: " ok and some more", limits={"max_tokens": 64})
    report = run_schemathesis(server.url, tmp_path, 36, "--phases", "fuzzing", "--generation-deterministic")
    assert report.failures == ""
    assert report.num_cases >= 120
    server.wait(server.is_idle)
