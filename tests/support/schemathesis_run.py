"""Schemathesis against a server's /openapi.json."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# The document of a strict server, which refuses what breaks the schema.
_SETTINGS = """
[parameters]
"query.strict" = "1"
"header.X-Quire-Strict" = "1"
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it. `failures` is empty, or what Schemathesis says of them."""

    num_cases: int
    failures: str
    summary: str


def run_schemathesis(url: str, folder: Path, examples: int, *flags: str) -> Report:
    """`examples` for every operation that has something to vary.

    A request may fit its schema and still be refused (parameters that contradict each other, token ids the model
    lacks), so acceptance of all that fits is not demanded.
    """
    (folder / "schemathesis.toml").write_text(_SETTINGS, encoding="utf-8")
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--max-examples", str(examples)]
    command += ["--exclude-checks", "positive_data_acceptance", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    cases = re.search(r"(\d+) generated", done.stdout)
    failures = "" if done.returncode == 0 else done.stdout[-8_000:] + done.stderr[-2_000:]
    return Report(int(cases[1]) if cases else 0, failures, done.stdout.partition("SUMMARY")[2])
