"""Every text that tells a user what to install names a command that works."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from quire.types.install import install_extra

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOLDERS = ("src", "docs", "deploy", "examples", "benchmarks", ".ci")
TEXTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", "pyproject.toml")),
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.is_file()),
]
SUFFIXES = {".py", ".md", ".txt", ".toml", ".yaml", ".service", ".html", ".js", ".sh", ""}
FOREIGN_NAME = re.compile(r"\bquire\[|pip3? install [^\n`\"]*(?<![\w./-])quire(?![\w./-])|(?<![\w.])quire==")
CHECKOUT_EXTRA = re.compile(r"'\.\[([\w,]+)\]'")


def texts() -> list[tuple[Path, str]]:
    generated = re.compile(r"__pycache__|\.egg-info")
    chosen = [path for path in TEXTS if path.suffix in SUFFIXES and not generated.search(str(path))]
    return [(path.relative_to(ROOT), path.read_text(encoding="utf-8", errors="replace")) for path in chosen]


def test_no_text_suggests_to_install_the_package_that_somebody_else_owns() -> None:
    found = {str(path): match[0] for path, text in texts() if (match := FOREIGN_NAME.search(text))}
    assert found == {}


@pytest.mark.parametrize(
    "text", ["pip install 'quire[server]'", "pip install quire", "pip install -U quire", "needs quire[hub]"]
)
def test_the_pattern_of_the_test_above_finds_such_texts(text: str) -> None:
    assert FOREIGN_NAME.search(text)


def test_every_extra_that_a_text_names_exists() -> None:
    extras = set(PROJECT["optional-dependencies"])
    calls = re.compile(r"install_extra\([\"'](\w+)[\"']\)")
    named = {extra for _, text in texts() for group in CHECKOUT_EXTRA.findall(text) for extra in group.split(",")}
    named |= {extra for _, text in texts() for extra in calls.findall(text)}
    assert named - extras == set()
    assert "server" in named


def test_the_fix_for_a_missing_package_installs_from_a_checkout() -> None:
    assert install_extra("server") == "run pip install -c constraints.txt '.[server]' in a checkout of Quire"
    assert PROJECT["name"] == "quire-llm"
    assert PROJECT["scripts"] == {"quire": "quire.serving.cli:main"}
