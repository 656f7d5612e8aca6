"""The files under deploy/ start the server with flags it has and probe routes it serves."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from quire.serving.cli import _parser

DEPLOY = Path(__file__).parents[4] / "deploy"


def _entry_point() -> list[str]:
    text = (DEPLOY / "docker/Dockerfile").read_text(encoding="utf-8")
    found = re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    assert found is not None
    command: list[str] = json.loads(found[1])
    return command


def test_the_unit_starts_the_server_with_flags_that_exist() -> None:
    text = (DEPLOY / "systemd/quire.service").read_text(encoding="utf-8")
    found = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert found is not None
    args = _parser().parse_args(shlex.split(found[1])[1:])
    stop = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert stop is not None
    assert args.drain_seconds < int(stop[1])


def test_the_image_starts_the_server_with_flags_that_exist() -> None:
    program, *words = _entry_point()
    assert program == "quire"
    assert _parser().parse_args(words).host == "0.0.0.0"


def test_the_manifest_gives_flags_that_exist_probes_liveness_and_leaves_time_to_drain() -> None:
    yaml = pytest.importorskip("yaml")
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes/quire.yaml").read_text()))
    pod = next(one for one in documents if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = _parser().parse_args([*_entry_point()[1:], *container["args"]])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert args.drain_seconds + pause < pod["terminationGracePeriodSeconds"]
    paths = {name: container[name]["httpGet"]["path"] for name in ("readinessProbe", "startupProbe", "livenessProbe")}
    assert paths == {"readinessProbe": "/ready", "startupProbe": "/ready", "livenessProbe": "/health"}
    (port,) = container["ports"]
    assert port["containerPort"] == args.port
