"""The file of a recording, written by a thread of its own: one JSON object a line."""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import threading
import time
from collections import deque
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from quire import __version__
from quire.config.engine import EngineConfig
from quire.config.recording import RecordingConfig
from quire.engine.recording.items import Item
from quire.engine.recording.plans import Record
from quire.engine.recording.scribe import Scribe
from quire.engine.recording.tokens import make_names
from quire.types.errors import ConfigError

logger = logging.getLogger("quire.engine")

FORMAT = 1
MAX_PENDING = 16_384  # things that happened and are not written yet
MAX_FILES = 10_000  # that begin alike, of engines that were started again
_FLUSH_SECONDS, _FLUSH_BYTES = 1.0, 2**18
_REST_SECONDS = 0.02  # between two looks at what has happened


def header(config: EngineConfig, vocab_size: int, depth: int) -> Record:
    """A recording's first record: what it is of."""
    return {
        "is": "quire recording",
        "format": FORMAT,
        "quire": __version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "tokens": "exact" if config.recording is None else config.recording.tokens,
        "vocab_size": vocab_size,
        "depth": depth,
        "cache": asdict(config.cache),
        "scheduler": asdict(config.scheduler),
        "speculation": None if config.speculation is None else _without_model(asdict(config.speculation)),
    }


def _without_model(speculation: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in speculation.items() if name != "draft"}


class Tape:
    """Takes what happened from one thread, at once, and writes it with another. Ends by itself, with a last record that
    says why, when the file is as large as it may be, cannot be written, or cannot be written as fast as things happen.
    """

    def __init__(self, path: Path, first: Record, scribe: Scribe, limit: int) -> None:
        """Raises ConfigError if the file cannot be made. One that is there already is left alone: see `path`."""
        self.path, self._file = _create(path)
        self._scribe, self._limit = scribe, limit
        self._items: deque[Item] = deque()  # one thread appends, the other takes: neither wakes or waits for the other
        self._is_over, self._reason, self._closing = False, "closed", threading.Event()
        self._size = self._num_pending = 0
        self._lines: list[str] = []
        self._ended: list[Record] = []
        self._write([_encode(first)])
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        logger.info("recording to %s", self.path)

    @classmethod
    def of(cls, config: EngineConfig, vocab_size: int, depth: int) -> Tape:
        """The tape of an engine, as its configuration asks for."""
        recording = config.recording
        assert isinstance(recording, RecordingConfig)
        scribe = Scribe(config.scheduler.num_rows, make_names(recording.tokens, vocab_size))
        return cls(Path(recording.path), header(config, vocab_size, depth), scribe, recording.limit)

    def put(self, item: Item) -> None:
        """Something happened. Costs an entry of a list."""
        if self._is_over:
            return
        if len(self._items) >= MAX_PENDING:
            self._end(f"{MAX_PENDING} things had happened that were not written yet")
        else:
            self._items.append(item)

    def close(self) -> None:
        """Write what is left and the end. Idempotent."""
        atexit.unregister(self.close)
        self._is_over = True
        self._closing.set()
        self._thread.join()

    def _end(self, reason: str) -> None:
        self._is_over, self._reason = True, reason
        logger.warning("the recording %s ends here: %s", self.path, reason)

    # ------------------------------------------------------------------------------------------ the tape's thread
    def _run(self) -> None:
        try:
            self._follow()
            self._flush()
            self._write([_encode({"is": "over", "reason": self._reason})])
        except Exception as error:  # noqa: BLE001 - a recording must not be what an engine dies of
            self._end(repr(error))
        finally:
            self._items.clear()  # what came after the end
            os.close(self._file)

    def _follow(self) -> None:
        """Write until there is nothing more to come, or until the file is full."""
        due = time.monotonic() + _FLUSH_SECONDS
        while True:
            is_over = self._is_over  # looked at first: what came before it is taken
            while self._items:
                self._take(self._items.popleft())
                if time.monotonic() >= due or self._num_pending >= _FLUSH_BYTES:
                    self._flush()
                    due = time.monotonic() + _FLUSH_SECONDS
                    if self._size >= self._limit:
                        self._end(f"the file has the {self._limit} bytes it may have")
                        return
            if is_over:
                return
            if time.monotonic() >= due:
                self._flush()
                due = time.monotonic() + _FLUSH_SECONDS
            self._closing.wait(_REST_SECONDS)

    def _take(self, item: Item) -> None:
        for record in self._scribe.write(item):
            line = _encode(record)
            self._lines.append(line)
            self._num_pending += len(line)
            if record["is"] == "end":
                self._ended.append(record)
            time.sleep(0)  # whoever waits for the interpreter goes first

    def _flush(self) -> None:
        """Generated tokens first: a file that breaks off holds those of every step it has."""
        tokens = []
        for record in self._scribe.tokens():
            tokens.append(_encode(record))
            time.sleep(0)  # whoever waits for the interpreter goes first
        lines, self._lines, self._num_pending = self._lines, [], 0
        self._write([*tokens, *lines])
        self._scribe.forget(self._ended)
        self._ended = []

    def _write(self, lines: list[str]) -> None:
        data = "".join(lines).encode()
        self._size += len(data)
        while data:
            data = data[os.write(self._file, data) :]


def _encode(record: Record) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"


def _create(path: Path) -> tuple[Path, int]:
    """A new file, for its owner alone; `path` itself, or with the first number behind it that is free."""
    others = (path.with_name(f"{path.name}.{number}") for number in range(2, MAX_FILES))
    for name in chain([path], others):
        try:
            return name, os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError("record", f"{name} cannot be made: {error.strerror}", "name a file in a folder") from None
    raise ConfigError("record", f"{path} and {MAX_FILES} files after it are there already", "choose another name")
