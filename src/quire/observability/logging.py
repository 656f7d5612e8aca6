"""Logging of every process of the server: one line per event on stderr, as text or JSON.

Prompts, answers and keys are never logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TextIO

from quire.types.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
LogFormat = Literal["text", "json"]
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")  # and bidi marks
_MAX_FIELD = 2_000  # characters; a longer text is cut

CLIENT_LOGGERS = ("uvicorn", "asyncio", "quire.text", "quire.refusals")  # any client can cause their lines
MAX_LINES = 5  # of one kind that pass in WINDOW_SECONDS
WINDOW_SECONDS = 60.0
_MAX_KINDS = 256  # kinds counted at once; one more resets all counts
_KEY_CHARACTERS = 100  # the first characters of a message, which identify its kind


def set_up_logging(level: str, kind: LogFormat, process: str, stream: TextIO | None = None) -> None:
    """Send this process's logs to `stream` (default: stderr) and remove all handlers set up before.

    Every line carries `process` as the name of its source. LogRateLimit bounds the lines that clients can cause.
    """
    if level not in LEVELS:
        raise ConfigError("log_level", f"{level!r} is unknown", f"use one of {', '.join(LEVELS)}")
    if kind not in ("text", "json"):
        raise ConfigError("log_format", f"{kind!r} is unknown", "use text or json")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(process) if kind == "json" else TextLines(process))
    handler.addFilter(LogRateLimit())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for noisy in ("uvicorn", "uvicorn.access", "uvicorn.error", "asyncio", "urllib3"):
        logging.getLogger(noisy).setLevel(max(root.level, logging.WARNING))


class JsonLines(logging.Formatter):
    """Formats an event as one JSON object: time, level, process, logger, message, the fields of `extra`, and the
    error."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": _cut(record.getMessage()),
            **_extra(record),
        }
        if record.exc_info:
            event["error"] = self.formatException(record.exc_info)
        return escape_controls(json.dumps(event, default=str, ensure_ascii=False), is_json=True)


class TextLines(logging.Formatter):
    """Formats an event as `time LEVEL process: message key=value`, then a traceback if there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _extra(record).items())
        line = f"{_time(record)} {record.levelname:<7} {self._process}: {_cut(record.getMessage())}{fields}"
        if not record.exc_info:
            return escape_controls(line)
        traceback = self.formatException(record.exc_info).split("\n")
        return "\n    ".join(map(escape_controls, (line, *traceback)))  # indented: no line of it looks like an event


def escape_controls(text: str, *, is_json: bool = False) -> str:
    """Replace every control character (carriage return, ESC, line separators, ...) with an escape such as `\\x1b`.

    So no client can forge a log line, or send commands to the terminal in which the log is read.
    """
    return _CONTROLS.sub(lambda found: _escape(ord(found[0]), is_json), text)


def _escape(code: int, is_json: bool) -> str:
    if code == 0x0A and not is_json:
        return "\\n"
    return f"\\u{code:04x}" if is_json or code > 0xFF else f"\\x{code:02x}"


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _extra(record: logging.LogRecord) -> dict[str, object]:
    found = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {name: _cut(value) if isinstance(value, str) else value for name, value in found.items()}


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_FIELD else f"{text[: _MAX_FIELD - 3]}..."


@dataclass(slots=True)
class _Kind:
    """The lines of one kind in the current window."""

    started_at: float
    num_seen: int = 0


class LogRateLimit(logging.Filter):
    """Limits the log lines that clients can cause, so that they cannot fill a disk.

    `MAX_LINES` lines of a kind pass in `WINDOW_SECONDS`; the first line after that says how many were dropped. A kind
    is a logger and a message before its arguments are formatted. Only `CLIENT_LOGGERS` and their children are limited.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if not any(record.name == name or record.name.startswith(f"{name}.") for name in CLIENT_LOGGERS):
            return True
        with self._lock:
            passes, note = self._count((record.name, str(record.msg)[:_KEY_CHARACTERS]))
        if passes and note:
            record.msg, record.args = f"{record.getMessage()} ({note})", ()
        return passes

    def _count(self, key: tuple[str, str]) -> tuple[bool, str]:
        """Count a line of this kind. Returns whether it passes, and the note to append to it."""
        now = self._clock()
        kind = self._kinds.get(key)
        note = ""
        if kind is None or now - kind.started_at >= WINDOW_SECONDS:
            num_dropped = 0 if kind is None else kind.num_seen - MAX_LINES
            note = f"{num_dropped} more were left out before" if num_dropped > 0 else ""
            if kind is None and len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            kind = self._kinds[key] = _Kind(now)
        kind.num_seen += 1
        if kind.num_seen == MAX_LINES:
            note = f"more of these are left out for {WINDOW_SECONDS:g} s"
        return kind.num_seen <= MAX_LINES, note
