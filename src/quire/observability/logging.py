"""Logs of every process of the server: a line per event on stderr, as text or JSON. Never a prompt, never a key."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

from quire.observability.flood import FloodGuard
from quire.types.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
LogFormat = Literal["text", "json"]
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}
_MAX_FIELD = 2_000  # characters; a longer text is cut


def set_up_logging(level: str, kind: LogFormat, process: str, stream: TextIO | None = None) -> None:
    """Send this process's logs to `stream` (stderr), replacing what was set up before. `process` names their source.

    Lines that clients can cause at will are bounded: see FloodGuard.
    """
    if level not in LEVELS:
        raise ConfigError("log_level", f"{level!r} is unknown", f"use one of {', '.join(LEVELS)}")
    if kind not in ("text", "json"):
        raise ConfigError("log_format", f"{kind!r} is unknown", "use text or json")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(process) if kind == "json" else TextLines(process))
    handler.addFilter(FloodGuard())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for noisy in ("uvicorn", "uvicorn.access", "uvicorn.error", "asyncio", "urllib3"):
        logging.getLogger(noisy).setLevel(max(root.level, logging.WARNING))


class JsonLines(logging.Formatter):
    """One JSON object per event: time, level, process, logger, message, what `extra` gave, and the error if any."""

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
        return json.dumps(event, default=str, ensure_ascii=False)


class TextLines(logging.Formatter):
    """`time LEVEL process: message key=value`; a traceback follows on lines of its own."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _extra(record).items())
        message = _cut(record.getMessage()).replace("\n", "\\n")
        line = f"{_time(record)} {record.levelname:<7} {self._process}: {message}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _extra(record: logging.LogRecord) -> dict[str, object]:
    found = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {name: _cut(value) if isinstance(value, str) else value for name, value in found.items()}


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_FIELD else f"{text[: _MAX_FIELD - 3]}..."
