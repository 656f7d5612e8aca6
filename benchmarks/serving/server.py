"""A server under test: starts it by a command line, waits until it is ready, measures its memory, and stops it with all
its processes."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

POLL_SECONDS = 0.02
SETTLE_SECONDS = 3.0  # from ready to measuring its memory
STOP_SECONDS = 60.0
_KIB = 1_024


class ServerFailed(Exception):
    """The server ended, or was not ready in time. The message is one line."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A command line with `{port}` in it, its environment variables, and the path that returns 200 when it is ready."""

    name: str
    command: str
    variables: dict[str, str] = field(default_factory=dict)
    ready_path: str = "/health"


@dataclass(frozen=True, slots=True)
class Started:
    """A server that is ready: its address, its first process, and when (monotonic) that was started."""

    url: str
    pid: int
    started_at: float
    boot_seconds: float  # from the start until it was ready


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready: its address, the time from the start of its process, and its idle memory."""

    url: str
    boot_seconds: float
    idle_rss_bytes: int  # summed over the process tree; shared pages count for each process
    idle_pss_bytes: int  # the same with shared pages divided among processes; 0 if the kernel does not report it


@contextmanager
def running(contestant: Contestant, time_limit: float) -> Iterator[Running]:
    """Start the server on a free port and measure its memory. Raises ServerFailed. At the end all its processes are
    stopped."""
    with started(contestant, time_limit) as server:
        time.sleep(SETTLE_SECONDS)
        pids = tree(server.pid)
        yield Running(server.url, server.boot_seconds, sum(map(rss_bytes, pids)), sum(map(pss_bytes, pids)))


@contextmanager
def started(contestant: Contestant, time_limit: float) -> Iterator[Started]:
    """Start the server on a free port. Raises ServerFailed. At the end all its processes are stopped."""
    port = free_port()
    command = shlex.split(contestant.command.replace("{port}", str(port)))
    with tempfile.TemporaryFile() as log:
        started_at = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **contestant.variables},
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            while not _answers(url + contestant.ready_path):
                if process.poll() is not None:
                    raise ServerFailed(f"it ended with code {process.returncode}: {_last_line(log)}")
                if time.monotonic() - started_at > time_limit:
                    raise ServerFailed(f"it was not ready after {time_limit:.0f} s: {_last_line(log)}")
                time.sleep(POLL_SECONDS)
            yield Started(url, process.pid, started_at, time.monotonic() - started_at)
        finally:
            _stop(process)


def tree(root: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def rss_bytes(pid: int) -> int:
    return _memory(Path(f"/proc/{pid}/status"), "VmRSS:")


def peak_rss_bytes(pid: int) -> int:
    return _memory(Path(f"/proc/{pid}/status"), "VmHWM:")


def cpu_seconds(pid: int) -> float:
    """Return the user and system CPU time of a process, without its children; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def pss_bytes(pid: int) -> int:
    return _memory(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")


def _memory(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * _KIB for line in lines if line.startswith(name))


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM and wait, then SIGKILL to the session's whole group and to processes that left it."""
    pids = tree(process.pid)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    deadline = time.monotonic() + STOP_SECONDS
    for pid in pids[1:]:
        while _kill(pid) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def _kill(pid: int) -> bool:
    """Kill a process. Returns whether it was still running."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # a zombie holds nothing but its pid


def free_port() -> int:
    """Return a port on which a server may listen a moment later. The system assigns ports of this range only to
    programs that request them by number."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _last_line(log: object) -> str:
    log.seek(0)  # type: ignore[attr-defined]
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]  # type: ignore[attr-defined]
    return lines[-1].strip()[:300] if lines else "it said nothing"
