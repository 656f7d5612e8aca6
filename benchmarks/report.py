"""The output that all benchmarks share: the machine's facts, a table, a JSON file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("quire", "torch", "numpy", "transformers")


def facts() -> dict[str, Any]:
    """Return the machine, its current load, the versions and the commit. Call it before measuring."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def commit() -> str:
    """Return the checked-out commit, marked if the tree differs from it; "unknown" outside a repository."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def cpu_name() -> str:
    try:
        listing = subprocess.run(["lscpu"], capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in listing.splitlines() if line.startswith("Model name")]
    return names[0] if names else platform.machine()


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table with aligned columns; the first column is text, the others are values."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| "
        + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def publish(title: str, header: Sequence[str], rows: Sequence[Sequence[object]], where: dict[str, Any]) -> None:
    """Print the facts, which were collected before the measurements, and the table."""
    print(f"# {title}")
    machine = f"{where['cpu']} x {where['cores']} (load {where['load_before']} before)"
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    print(f"{where['date']}, commit {where['commit']}, {machine}, Python {where['python']}, {versions}")
    print(table(header, rows))


def save(out: Path | None, title: str, where: dict[str, Any], data: dict[str, Any]) -> None:
    """Write everything to `out`, if it is given."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"title": title, "facts": where, **data}, indent=1))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
