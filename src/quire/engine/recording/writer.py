"""Writes the file of a recording, one JSON object per line, in a separate thread."""

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
from quire.engine.recording.encoder import EventEncoder
from quire.engine.recording.events import Event
from quire.engine.recording.plans import Record
from quire.engine.recording.tokens import make_encoding
from quire.types.errors import ConfigError

logger = logging.getLogger("quire.engine")

FORMAT = 2
MAX_PENDING = 16_384  # events that may be queued
MAX_FILES = 10_000  # files with the same path and different numbers, one per restarted engine
_FLUSH_SECONDS, _FLUSH_BYTES = 1.0, 2**18
_POLL_SECONDS = 0.02  # interval of polling for new events


def header(config: EngineConfig, vocab_size: int, depth: int) -> Record:
    """Return the first record of a recording: the engine's version and configuration."""
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


class RecordingWriter:
    """Queues events for its thread, which encodes and writes them. `put` never waits.

    The recording stops, with a last record that gives the reason, when the file has reached its limit, cannot be
    written, or cannot be written as fast as events come.
    """

    def __init__(self, path: Path, first: Record, encoder: EventEncoder, limit: int) -> None:
        """Create the file `path`, or if it exists, a new one with a number after its name. Raises ConfigError if it
        cannot be created."""
        self.path, self._file = _create(path)
        self._encoder, self._limit = encoder, limit
        self._events: deque[Event] = deque()  # the engine's thread appends, this one polls: neither waits for the other
        self._has_stopped, self._reason, self._closing = False, "closed", threading.Event()
        self._size = self._num_pending = 0
        self._lines: list[str] = []
        self._ended: list[Record] = []
        self._write([_to_line(first)])
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        logger.info("recording to %s", self.path)

    @classmethod
    def from_config(cls, config: EngineConfig, vocab_size: int, depth: int) -> RecordingWriter:
        """Create the writer that an engine's configuration requests."""
        recording = config.recording
        assert isinstance(recording, RecordingConfig)
        encoder = EventEncoder(config.scheduler.num_rows, make_encoding(recording.tokens, vocab_size))
        return cls(Path(recording.path), header(config, vocab_size, depth), encoder, recording.limit)

    def put(self, event: Event) -> None:
        """Queue an event. Costs one append to a list."""
        if self._has_stopped:
            return
        if len(self._events) >= MAX_PENDING:
            self._stop(f"more than {MAX_PENDING} events were waiting to be written")
        else:
            self._events.append(event)

    def close(self) -> None:
        """Write the queued events and the last record. Idempotent."""
        atexit.unregister(self.close)
        self._has_stopped = True
        self._closing.set()
        self._thread.join()

    def _stop(self, reason: str) -> None:
        self._has_stopped, self._reason = True, reason
        logger.warning("the recording %s ends here: %s", self.path, reason)

    # ------------------------------------------------------------------------------------------ the writer's thread
    def _run(self) -> None:
        try:
            self._write_events()
            self._flush()
            self._write([_to_line({"is": "over", "reason": self._reason})])
        except Exception as error:  # noqa: BLE001 - a recording must not stop the engine
            self._stop(repr(error))
        finally:
            self._events.clear()  # drops events queued after the recording stopped
            os.close(self._file)

    def _write_events(self) -> None:
        """Write events until the recording has stopped or the file is full."""
        due = time.monotonic() + _FLUSH_SECONDS
        while True:
            has_stopped = self._has_stopped  # read before the queue: all events before the stop are written
            while self._events:
                self._encode(self._events.popleft())
                if time.monotonic() >= due or self._num_pending >= _FLUSH_BYTES:
                    self._flush()
                    due = time.monotonic() + _FLUSH_SECONDS
                    if self._size >= self._limit:
                        self._stop(f"the file has the {self._limit} bytes it may have")
                        return
            if has_stopped:
                return
            if time.monotonic() >= due:
                self._flush()
                due = time.monotonic() + _FLUSH_SECONDS
            self._closing.wait(_POLL_SECONDS)

    def _encode(self, event: Event) -> None:
        for record in self._encoder.encode(event):
            line = _to_line(record)
            self._lines.append(line)
            self._num_pending += len(line)
            if record["is"] == "end":
                self._ended.append(record)
            time.sleep(0)  # give up the interpreter lock

    def _flush(self) -> None:
        """Write tokens before steps, so that a truncated file contains the tokens of all steps in it."""
        tokens = []
        for record in self._encoder.take_tokens():
            tokens.append(_to_line(record))
            time.sleep(0)  # give up the interpreter lock
        lines, self._lines, self._num_pending = self._lines, [], 0
        self._write([*tokens, *lines])
        self._encoder.forget(self._ended)
        self._ended = []

    def _write(self, lines: list[str]) -> None:
        data = "".join(lines).encode()
        self._size += len(data)
        while data:
            data = data[os.write(self._file, data) :]


def _to_line(record: Record) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"


def _create(path: Path) -> tuple[Path, int]:
    """Create a file that only its owner can read: `path`, or if it exists, `path` with the first free number. Raises
    ConfigError."""
    others = (path.with_name(f"{path.name}.{number}") for number in range(2, MAX_FILES))
    for name in chain([path], others):
        try:
            return name, os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError("record", f"{name} cannot be made: {error.strerror}", "name a file in a folder") from None
    raise ConfigError("record", f"{path} and {MAX_FILES} files after it are there already", "choose another name")
