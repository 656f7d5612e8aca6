"""Commands in the documents that post JSON say so: the server refuses other bodies with 415."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
REFUSED_ON_PURPOSE = {("troubleshooting.md", "curl -s http://127.0.0.1:8000/v1/completions -d '")}
TAKES_ANY_TYPE = "/router/"  # the router's own pages


def test_every_curl_command_that_posts_json_to_the_server_names_its_type() -> None:
    wrong = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        commands = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
        for found in re.finditer(r"^curl .*? (?:-d|--data)\s*'", commands, re.MULTILINE):
            if "Content-Type: application/json" not in found[0] and TAKES_ANY_TYPE not in found[0]:
                wrong.add((page.name, found[0]))
    assert wrong == REFUSED_ON_PURPOSE
