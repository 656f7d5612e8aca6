"""A server of stub edges and a fake engine, in processes (`python -m stub_server MODEL SETTINGS`), and its client."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from quire.config.arguments import EngineArguments
from quire.config.server import ModelSource, ServerConfig
from quire.serving.process.supervisor import Programs, Supervisor
from quire.types.errors import QuireError

PATIENCE = 120.0  # seconds a test waits for what must come
_READY = re.compile(r"Quire serves (\S+) on http://127\.0\.0\.1:(\d+) \(ready in \d+\.\d s\)")


class StubServer:
    """The server in a process of its own, and a client of its line protocol."""

    def __init__(self, model: Path, **settings: object) -> None:
        model.touch()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stub_server", str(model), json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = 0

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self) -> None:
        self.wait(lambda: _READY.search(self.output))
        match = _READY.search(self.output)
        assert match is not None
        self.port = int(match[2])

    def wait(self, found: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not found():
            assert time.monotonic() < deadline, f"it never came; the server said:\n{self.output}"
            time.sleep(0.01)

    def wait_exit(self) -> int:
        code = self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def children(self, module: str = "") -> list[int]:
        """Process ids of the supervisor's children that run a module."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes().decode()
            except (OSError, ValueError):
                continue
            if parent == self.pid and module in command:
                found.append(int(entry.name))
        return found

    def engine_pid(self) -> int:
        (pid,) = self.children("fake_engine_main")
        return pid

    def ask(self, **question: object) -> dict[str, object]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
            connection.sendall(json.dumps(question).encode() + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline()
        assert line, f"the edge hung up; the server said:\n{self.output}"
        found: dict[str, object] = json.loads(line)
        return found

    def generation(self) -> int | None:
        """Of the engine that the edge asked has; None while it is down."""
        ready = self.ask(ask="state")["ready"]
        assert ready is None or isinstance(ready, dict)
        return None if ready is None else int(ready["generation"])

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait_exit()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Asking(threading.Thread):
    """A question asked in the background. `answer` is there once it was joined."""

    def __init__(self, server: StubServer, **question: object) -> None:
        super().__init__(daemon=True)
        self._server, self._question = server, question
        self.answer: dict[str, object] = {}
        self.start()

    def run(self) -> None:
        self.answer = self._server.ask(**self._question)

    def result(self) -> dict[str, object]:
        self.join(PATIENCE)
        return self.answer


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main(model: str, settings: dict[str, object]) -> int:
    programs = Programs("fake_engine_main", "stub_edge", check_model=lambda config: None)
    config = ServerConfig(source=ModelSource(model=model), engine=EngineArguments(), **{"port": 0, **settings})  # type: ignore[arg-type]
    try:
        return Supervisor(config, admin_key="KEY", programs=programs).run()
    except QuireError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
