"""`quire serve` as a user starts it, in processes of its own, seen from outside: HTTP, /proc and its output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tiny_served import FLAGS, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
ADMIN_KEY = "admin-of-this-test"
PATIENCE = 300.0  # seconds; only there to end a broken test
_READY = re.compile(r"Quire serves \S+ on (\S+) \(ready in [\d.]+ s\)")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class RealServer:
    """Started and ready once made; `close` ends it and demands that it ends well, leaving no process."""

    def __init__(self, model: Path, flags: Sequence[str] = (), module: str = "quire") -> None:
        """`module` is run in place of the `quire` command."""
        command = [sys.executable, "-m", module, "serve", str(model), "--port", "0", "--admin-key", ADMIN_KEY, *flags]
        support = str(Path(__file__).parent)
        path = os.pathsep.join([str(ROOT / "src"), support, os.environ.get("PYTHONPATH", "")])
        started = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.wait(lambda: _READY.search(self.output))
        except AssertionError:
            self._end_now()
            raise
        self.boot_seconds = time.monotonic() - started
        match = _READY.search(self.output)
        assert match is not None
        self.url = match[1]
        port = re.search(r"127\.0\.0\.1:(\d+)", self.url)
        self.port = 0 if port is None else int(port[1])
        self._admin = self.client(headers={"Authorization": f"Bearer {ADMIN_KEY}"})

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def pid(self) -> int:
        return self._process.pid

    # ------------------------------------------------------------------------------------------------------- looks
    def wait(self, found: Callable[[], object], seconds: float = PATIENCE) -> float:
        """Until something is there; returns how long it took."""
        started = time.monotonic()
        while not found():
            waited = time.monotonic() - started
            assert waited < seconds, f"it never came; the server said:\n{self.output[-8_000:]}"
            assert self._process.poll() is None, f"the server ended; it said:\n{self.output[-8_000:]}"
            time.sleep(0.005)
        return time.monotonic() - started

    def processes(self, module: str = "") -> list[int]:
        """The children of the supervisor that run a module."""
        return [pid for pid in children_of(self.pid) if module in command_of(pid)]

    def engine_pid(self) -> int:
        (pid,) = self.processes("engine_main")
        return pid

    def kill_engine(self) -> None:
        os.kill(self.engine_pid(), signal.SIGKILL)

    def is_ready(self) -> bool:
        try:
            return self._admin.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def stats(self) -> dict[str, Any]:
        """The engine's, from /admin/stats, which says 503 while a step takes longer than a second."""
        answers: list[httpx.Response] = []

        def is_told() -> bool:
            answers.append(self._admin.get("/admin/stats"))
            return answers[-1].status_code == 200

        self.wait(is_told)
        found: dict[str, Any] = answers[-1].json()
        return found

    def metrics(self) -> str:
        return self._admin.get("/metrics").raise_for_status().text

    def requests(self) -> dict[str, str]:
        """The live requests, from /admin/requests: their ids with their states."""
        rows = self._admin.get("/admin/requests").raise_for_status().json()["requests"]
        return {row["request_id"]: row["state"] for row in rows}

    def is_idle(self) -> bool:
        """Nothing runs or waits, and no block is held."""
        stats = self.stats()
        engine, edge = (stats["running"], stats["waiting"], stats["blocks"]["used"]), stats["edge"]
        return not any((*engine, edge["waiting"], edge["in_engine"]))

    # ----------------------------------------------------------------------------------------------------- clients
    def client(self, url: str = "", **options: Any) -> httpx.Client:
        """Of the server, or of another address of it; `unix:PATH` is a UNIX socket."""
        url = url or self.url
        if url.startswith("unix:"):
            options["transport"] = httpx.HTTPTransport(uds=url.removeprefix("unix:"))
            url = "http://localhost"
        return httpx.Client(base_url=url, timeout=PATIENCE, verify=False, **options)  # no certificates to load

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    # --------------------------------------------------------------------------------------------------------- end
    def close(self) -> None:
        """SIGTERM: it must drain, exit with 0 and take every process with it. Closing twice is allowed."""
        self._admin.close()
        processes = self.processes()
        try:
            self._process.send_signal(signal.SIGTERM)
            assert self._process.wait(60) == 0, self.output[-8_000:]
            assert not [pid for pid in processes if is_alive(pid)]
        finally:
            self._end_now()

    def _end_now(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(10)
        if self._process.stdout is not None:
            self._process.stdout.close()


def children_of(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _fields(int(entry.name))[1:2] == [str(parent)]:
            found.append(int(entry.name))
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return _fields(pid)[:1] not in ([], ["Z"])


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def num_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - counts only


def num_threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - counts only


def _fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on; none when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


@contextmanager
def tiny_server(folder: Path, *flags: str) -> Iterator[RealServer]:
    """A server of a tiny model, written to `folder`."""
    one = RealServer(write_tiny_model(folder), [*FLAGS, *flags])
    try:
        yield one
    finally:
        one.close()
