"""The page for users of other engines: its snippets run, and its tables agree with what the code accepts."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from quire.runtime.loading.resolve import resolve_model
from quire.serving.cli import _parser
from quire.serving.cli.suggestions import COMMANDS, FLAGS, closest_command
from quire.serving.cli.vllm_flags import OF_SERVERS
from quire.serving.llm import LLM
from quire.serving.vllm_arguments import NO_EFFECT, RENAMED
from quire.types.errors import QuireError

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/guides/coming_from.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def table(title: str) -> list[list[list[str]]]:
    """The rows of the first table of a section; of each cell, what stands in backticks."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[re.findall(r"`([^`]+)`", cell) for cell in row] for row in rows[2:]]


COMMAND_LINES = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("quire ")]


@pytest.mark.parametrize("line", [*COMMAND_LINES, *(row[1][0] for row in table("Commands"))])
def test_every_command_line_parses(line: str) -> None:
    assert _parser().parse_args(shlex.split(line)[1:]).command


def test_every_flag_of_the_table_is_known_and_the_others_lead_to_it() -> None:
    known = {flag for name in ("serve", "chat") for flag in _commands()[name]._option_string_actions}
    rows = table("Flags")
    assert len(rows) > 15
    for (own,), vllm, *others in rows:
        assert own in known
        for flag in vllm:
            name = flag.removeprefix("--").replace("-", "_")
            target = RENAMED.get(name, "").replace("_", "-")
            assert flag in known or f"--{target}" == own or FLAGS.get(flag) == own, flag
        for flag in (flag for cell in others for flag in cell):
            assert flag in known or FLAGS[flag] == own, flag


def test_commands_of_other_engines_lead_to_the_ones_of_the_table() -> None:
    for row in table("Commands"):
        own = row[1][0].split()[1]
        for line in (line for cell in row[2:] for line in cell if line.startswith(("ollama", "vllm"))):
            name = line.split()[1]
            assert name in (own, "ps") or closest_command(name, _names()) == own, line
    assert set(COMMANDS.values()) <= set(_names())


def _commands() -> dict[str, argparse.ArgumentParser]:
    found = next(action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


def _names() -> list[str]:
    return list(_commands())


def test_every_python_name_that_is_the_same_is_there() -> None:
    section = PAGE.partition("## Python\n")[2]
    same = [line.split("|")[1] for line in section.splitlines() if line.startswith("|") and "| the same" in line]
    names = [name for cell in same for name in re.findall(r"`(?:LLM\.)?(\w+)`", cell)]
    assert len(names) > 15
    for name in names:
        assert hasattr(quire, name) or hasattr(LLM, name), name
    for row in table("Python"):
        for name in (name for text in row[1] for name in re.findall(r"^(?:llm|LLM)\.(\w+)", text)):
            assert hasattr(LLM, name), name


def test_flags_that_the_page_calls_without_effect_are() -> None:
    text = PAGE.partition("flags of vLLM that have no effect")[2].partition("\n## ")[0]
    named = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)", text)}
    assert named
    assert named <= NO_EFFECT.keys() | OF_SERVERS.keys()


@pytest.mark.model
@pytest.mark.parametrize("program", blocks("python"), ids=lambda text: re.sub(r"\W+", " ", text)[:40])
def test_every_python_snippet_runs(program: str) -> None:
    try:
        resolve_model(None, offline=True)
    except QuireError as error:
        pytest.skip(f"the default model is not here: {error}")
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=ROOT,
        env={**_environment(), "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def _environment() -> dict[str, str]:
    from quire.config.environment import child_environment

    return child_environment()
