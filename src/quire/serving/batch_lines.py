"""Reads and writes the lines of batch files in OpenAI's format: one request for each line of the input, one result for
each line of the output.

Used by `/v1/batches` and `quire run-batch`. An input line that cannot be read gets a result line with an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, Self

from quire.types.errors import InvalidRequest

MAX_ID_CHARACTERS = 512
_MEMBERS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch file."""

    number: int  # of the line in its file, from 1
    custom_id: str
    url: str  # path of the endpoint
    body: dict[str, Any]


def read_line(number: int, text: bytes, urls: Collection[str]) -> BatchLine:
    """Parse and check a line of an input file. `urls` are the endpoints that it may name. Raises InvalidRequest."""
    where = f"line {number}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(where, "is not JSON", 'write {"custom_id", "method", "url", "body"}') from None
    if not isinstance(value, dict):
        raise InvalidRequest(where, "must be a JSON object", 'write {"custom_id", "method", "url", "body"}')
    if missing := [name for name in _MEMBERS if value.get(name) is None and name != "method"]:
        raise InvalidRequest(f"{where}: {missing[0]}", "is missing", "add it")
    name, url, body = value["custom_id"], value["url"], value["body"]
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARACTERS:
        raise InvalidRequest(f"{where}: custom_id", f"must be text of 1 to {MAX_ID_CHARACTERS} characters")
    if not _is_whole(name):
        raise InvalidRequest(f"{where}: custom_id", "has a lone surrogate", "send valid Unicode")
    if value.get("method", "POST") != "POST":
        raise InvalidRequest(f"{where}: method", "must be POST")
    if url not in urls:
        raise InvalidRequest(f"{where}: url", f"must be one of {', '.join(sorted(urls))}")
    if not isinstance(body, dict):
        raise InvalidRequest(f"{where}: body", "must be a JSON object")
    if body.get("stream"):
        raise InvalidRequest(f"{where}: body.stream", "cannot be true in a batch", "leave it out")
    return BatchLine(number, name, url, body)


def _is_whole(text: str) -> bool:
    """Whether a text can be encoded as UTF-8. JSON escapes may contain half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def custom_id_of(text: bytes) -> str | None:
    """Return the custom_id of an input line that is otherwise invalid, or None if it has none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = value.get("custom_id") if isinstance(value, dict) else None
    return name[:MAX_ID_CHARACTERS] if isinstance(name, str) else None


def result_line(custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    """Return a line of the output file with the response of an endpoint, whatever its status. `body` is JSON and is
    inserted unchanged, except that line breaks become spaces."""
    head = _line({"id": f"batch_req_{token_hex(12)}", "custom_id": custom_id})[:-2]
    status_fields = json.dumps({"status_code": status, "request_id": request_id}).encode()[:-1]
    return head + b',"response":' + status_fields + b',"body":' + body.replace(b"\n", b" ") + b'},"error":null}\n'


def error_line(custom_id: str | None, code: str, message: str, number: int) -> bytes:
    """Return a line of the output file for a request that was not sent."""
    error = {"code": code, "message": message, "line": number}
    return _line({"id": f"batch_req_{token_hex(12)}", "custom_id": custom_id, "response": None, "error": error})


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def is_asleep(status: int, body: bytes) -> bool:
    """Whether a response says that the engine sleeps or has no weights: its request can wait until that is over."""
    if status != 503:
        return False
    try:
        return bool(json.loads(body)["error"]["code"] == "engine_asleep")
    except (ValueError, TypeError, KeyError):
        return False


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines of an input file that are not blank, with their numbers from 1. A line longer than `max_bytes` is
    yielded as None."""
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes and not line.endswith(b"\n"):
            while (rest := file.readline(max_bytes)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip():
            yield number, line


def error_key(number: int) -> str:
    """Return the key of an input line that was not sent. Its number identifies it, since its custom_id may be missing
    or that of another line."""
    return f"\0line {number}"


def answered_keys(output: Path, *, keeps_failures: bool) -> set[str]:
    """Return which input lines an output file answers, as custom_ids and error keys. Removes duplicate lines, and a
    last line that was not written completely.

    Without `keeps_failures`, results of failed requests are removed too, so that these requests are sent again.
    """
    if not output.exists():
        return set()
    found: set[str] = set()
    kept = output.with_name(output.name + ".kept")
    with output.open("rb") as old, kept.open("wb") as new:
        for line in old:
            key = _answered_key(line, keeps_failures=keeps_failures)
            if key is not None and key not in found:
                found.add(key)
                new.write(line)
    kept.replace(output)
    return found


def is_result(line: bytes) -> bool:
    """Whether a line of a file is the result of a request, or the incomplete last line of such a file."""
    if not line.endswith(b"\n"):
        return line.startswith(b"{")
    try:
        value = json.loads(line)
    except ValueError:
        return False
    return isinstance(value, dict) and {"custom_id", "response", "error"} <= value.keys()


class ResultFile:
    """A file to which whole lines are appended. A context manager that closes it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, line: bytes) -> None:
        """Append a line. Raises OSError, and appends nothing, if there is no room for all of it."""
        end = os.fstat(self._file.fileno()).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _answered_key(line: bytes, *, keeps_failures: bool) -> str | None:
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    response, error = value.get("response"), value.get("error")
    if isinstance(response, dict) and isinstance(value.get("custom_id"), str):
        return str(value["custom_id"]) if response.get("status_code") == 200 or keeps_failures else None
    return error_key(error["line"]) if isinstance(error, dict) and "line" in error and keeps_failures else None
