"""Install Quire from its checkout beside the Python that runs this: `python tools/install.py EXTRAS [PIP ARGUMENTS]`.

It does what `pip install -c constraints.txt -e '.[EXTRAS]'` does, in less time: a C++ compiler builds the CPU kernels
while pip fetches the other packages. One line on the terminal shows the progress. Needs only the standard library.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "--progress-bar", "off")
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
_SELF = re.compile(r"quire-llm\[([\w,]+)\]")
_STEP = re.compile(r"\s*(Collecting|Downloading|Processing|Using cached|Installing collected packages)[: ]+(\S+)")
_TICK_SECONDS = 0.5
# modules of packages and of Quire that Python compiles slowly at their first import
WARM_UP = "import torch, tokenizers, jinja2"
WARM_UP_OWN = "import quire.serving.llm, quire.serving.edge_main, quire.serving.process.engine_main"


class InstallFailed(Exception):
    """A command failed. Its text is the command's output."""


def requirements(project: dict[str, object], extras: Sequence[str]) -> Iterator[str]:
    """Yield the packages that the project and some of its extras need."""
    dependencies, optional = project["dependencies"], project["optional-dependencies"]
    assert isinstance(dependencies, list)
    assert isinstance(optional, dict)
    yield from dependencies
    for extra in extras:
        for requirement in optional[extra]:
            nested = _SELF.fullmatch(requirement)
            if nested is None:
                yield requirement
            else:
                yield from requirements({"dependencies": [], "optional-dependencies": optional}, nested[1].split(","))


def package_name(text: str) -> str:
    """Return the name of a package from a requirement, a file name or a path: `/a/torch-2.1-cp311.whl` is torch."""
    return re.split(r"[-<>=!~\[;]", Path(text).name, maxsplit=1)[0].lower().replace("_", "-")


class Screen:
    """Shows the current step and its seconds: on a terminal in one line that is rewritten, elsewhere once per step."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._step, self._detail, self._started_at = "", "", time.monotonic()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()

    def begin(self, step: str) -> None:
        with self._lock:
            self._end_line()
            self._step, self._detail, self._started_at = step, "", time.monotonic()
            if not self._is_terminal:
                print(f"{step} ...", file=sys.stderr, flush=True)
        self._draw()

    def show(self, detail: str) -> None:
        self._detail = detail

    def close(self) -> None:
        self._stop.set()
        self._ticker.join()
        with self._lock:
            self._end_line()

    def _tick(self) -> None:
        while not self._stop.wait(_TICK_SECONDS):
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            if self._is_terminal and self._step:
                self._write(f"{self._step} {time.monotonic() - self._started_at:.0f} s {self._detail}")

    def _end_line(self) -> None:
        if self._is_terminal and self._step:
            self._write(f"{self._step} {time.monotonic() - self._started_at:.0f} s")
            sys.stderr.write("\n")
        self._step = ""

    @staticmethod
    def _write(line: str) -> None:
        sys.stderr.write(f"\r\x1b[K{line[:78]}")
        sys.stderr.flush()


class Task:
    """A command that runs in the background; its output is kept in case it fails."""

    def __init__(self, command: Sequence[str], screen: Screen | None = None, *, python_path: str = "") -> None:
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path, "PYTHONDONTWRITEBYTECODE": ""},
        )
        self._screen, self._lines = screen, list[str]()
        self._packages, self._shown = set[str](), ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if self._screen is not None:
                self._screen.show(self._detail(line))

    def _detail(self, line: str) -> str:
        """Return what to show after a line of pip's output."""
        found = _STEP.match(line)
        if found is not None and found[1].startswith("Installing"):
            self._shown = "unpacking"
        elif found is not None:
            name = package_name(found[2])
            self._packages.add(name)
            self._shown = f"{len(self._packages)} fetched, now {name}"
        return self._shown

    def wait(self) -> None:
        """Wait for the command. Raises InstallFailed."""
        code = self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if code:
            raise InstallFailed("".join(self._lines))


def install(extras: Sequence[str], pip_arguments: Sequence[str], screen: Screen) -> None:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pip = (*PIP, *CONSTRAINTS, *pip_arguments)
    # Tools for the build, which must not be replaced by other packages meanwhile.
    with tempfile.TemporaryDirectory() as tools:
        screen.begin("preparing")
        Task([*pip, "--target", tools, *described["build-system"]["requires"]]).wait()
        paths = "all" if "dev" in extras else "here"  # tests run every path of the CPU kernels
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--paths", paths]
        kernels = Task(build, python_path=tools)
        screen.begin("installing packages")
        Task([*pip, *dict.fromkeys(requirements(described["project"], extras))], screen).wait()
        # In parallel to the compiler, to speed up the first start of the server.
        warm_up = Task([sys.executable, "-c", WARM_UP])
        screen.begin("compiling the CPU kernels")
        kernels.wait()
        Task([*pip, "--no-build-isolation", "--no-deps", "-e", "."], python_path=tools).wait()
        warm_up.wait()
        if not {"server", "dev"}.isdisjoint(extras):
            Task([sys.executable, "-c", WARM_UP_OWN]).wait()


def main(arguments: Sequence[str]) -> int:
    extras, *pip_arguments = arguments
    screen = Screen()
    try:
        install(extras.split(","), pip_arguments, screen)
    except InstallFailed as error:
        screen.close()
        print(error, file=sys.stderr)
        return 1
    screen.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
