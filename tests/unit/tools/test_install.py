"""What `make` installs and shows while it does."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools/install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_extra_brings_the_packages_of_the_extras_it_names(install: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = set(install.requirements(project, ["dev"]))
    assert {*project["dependencies"], *project["optional-dependencies"]["server"]} <= found
    assert "pytest>=8.3" in found
    assert not [each for each in found if each.startswith("quire")]
    assert "pytest>=8.3" not in set(install.requirements(project, ["server"]))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch<2.14,>=2.11", "torch"),
        ("/wheels/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", "torch"),
        ("prometheus_client-0.26.0-py3-none-any.whl", "prometheus-client"),
        ("uvicorn[standard]", "uvicorn"),
    ],
)
def test_a_package_is_shown_by_its_name(install: ModuleType, text: str, name: str) -> None:
    assert install.package_name(text) == name


def test_a_command_that_fails_is_shown_with_its_output(install: ModuleType) -> None:
    with pytest.raises(install.InstallFailed, match="no such package"):
        install.Task([sys.executable, "-c", "print('no such package'); raise SystemExit(1)"]).wait()


def test_bytecode_is_written_whatever_the_environment_says(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    answer = tmp_path / "answer"
    program = f"import sys; open({str(answer)!r}, 'w').write(str(sys.dont_write_bytecode))"
    install.Task([sys.executable, "-c", program]).wait()
    assert answer.read_text() == "False"


def test_an_installation_that_fails_says_why_and_exits_with_1(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/install.py"), "server", "--no-index", "--target", str(tmp_path)]
    ended = subprocess.run(
        [*command, "--find-links", str(tmp_path)],
        check=False,
        env={"PATH": "/usr/bin", "PIP_CONFIG_FILE": "/dev/null"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("preparing ...\n")
    assert "ERROR: No matching distribution found for setuptools" in ended.stderr
