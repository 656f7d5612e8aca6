"""Parses what the choice of a replica depends on: the model, the prompt as a chain of chunk keys, and the session."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from quire.serving.router.native import NUM_FOUND, NativeReader, Unavailable

CHUNK_BYTES = 512  # smallest chunk of a prompt; each chunk has one key
MAX_PROMPT_BYTES = 2 * 2**20  # of one prompt; the rest has no keys
_GROWTH = 8  # a chunk has 1/8 of the bytes before it, at least CHUNK_BYTES: long prompts need few keys
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user", "cache_salt")
_ANSWER_FIELDS = ("previous_response_id", "input_file_id")
_PROMPT_FIELDS = ("prompt", "input", "input_ids", "text", "texts", "query", "documents", "content", "input_prefix")
_PREAMBLE = ("system", "instructions", "tools", "functions", "documents", "template")  # rendered before the messages
_MESSAGES = ("messages", "input")
_NAMING_FIELDS, _ANY_PREAMBLE = frozenset((*_SESSION_FIELDS, *_ANSWER_FIELDS)), frozenset(_PREAMBLE)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class Prompt:
    """The routing data of a request. `keys` are those of the prompt's whole chunks, from the first."""

    model: str = ""
    keys: Sequence[int] = ()
    num_bytes: int = 0  # of the prompt text as `_parts` builds it
    session: str = ""  # from X-Session-Id, session_id, prompt_cache_key, user or cache_salt
    answer_id: str = ""  # of a stored response, file or request that this request names


def _chunk_ends() -> list[int]:
    """Return a list whose item i is the number of bytes in the first i chunks of a prompt."""
    ends = [0]
    while ends[-1] < MAX_PROMPT_BYTES:
        ends.append(ends[-1] + max(ends[-1] // _GROWTH // CHUNK_BYTES, 1) * CHUNK_BYTES)
    return ends


CHUNK_ENDS = _chunk_ends()
_CHUNKS = [slice(*ends) for ends in pairwise(CHUNK_ENDS)]


def num_chunks(num_bytes: int) -> int:
    """Return the number of whole chunks in the first `num_bytes` bytes of a prompt."""
    return bisect_right(CHUNK_ENDS, num_bytes) - 1


def _open_reader() -> NativeReader | str:
    try:
        return NativeReader(CHUNK_ENDS)
    except Unavailable as reason:
        return str(reason)


_READER = _open_reader()  # a str is the reason why there is none


def why_not_compiled() -> str | None:
    """Return the reason, in one line, why bodies are parsed by msgspec alone; None if the compiled reader parses
    them."""
    return _READER if isinstance(_READER, str) else None


def read_prompt(body: bytes, headers: Mapping[bytes, bytes], tenant: bytes, *, is_fork: bool = False) -> Prompt:
    """Parse a JSON body. Invalid JSON gives a prompt without keys: the replica reports the error. `is_fork`:
    `request_id` names an earlier request at a replica; on other paths it is the client's id for this request and is
    ignored."""
    session = headers[b"x-session-id"].decode("latin-1") if b"x-session-id" in headers else ""
    if not isinstance(_READER, str) and (found := _READER.read(body, tenant, is_fork=is_fork)):
        model_at, model_end, session_at, session_end, answer_at, answer_end, num_bytes = found[:NUM_FOUND]
        return Prompt(
            _decode(body[model_at:model_end]) if model_end else "",
            found[NUM_FOUND:],
            num_bytes,
            session or (_decode(body[session_at:session_end]) if session_end else ""),
            _decode(body[answer_at:answer_end]) if answer_end else "",
        )
    return read_by_msgspec(body, session, tenant, is_fork=is_fork)


def read_by_msgspec(body: bytes, session: str, tenant: bytes, *, is_fork: bool) -> Prompt:
    """Parse any JSON body like `read_prompt`, without the compiled reader. `session`: that of the headers, or empty."""
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return Prompt(session=session)
    if not isinstance(fields, dict):
        return Prompt(session=session)
    text = b"\0".join(_parts(fields))
    model = _text(fields.get("model")) or _text(fields.get("lora_path"))
    if not is_fork and _NAMING_FIELDS.isdisjoint(fields):  # the usual case
        return Prompt(model, chunk_keys(_root(tenant, "", model), text), len(text), session)
    root = _root(tenant, _text(fields.get("cache_salt")), model)
    session = session or _first_text(fields, _SESSION_FIELDS)
    answer_id = _first_text(fields, ("request_id",) if is_fork else _ANSWER_FIELDS)
    return Prompt(model, chunk_keys(root, text), len(text), session, answer_id)


def _root(tenant: bytes, salt: str, model: str) -> int:
    if isinstance(_READER, str):
        return hash((tenant, salt, model))
    return _READER.root(tenant, salt.encode("utf-8", "surrogatepass"), model.encode("utf-8", "surrogatepass"))


def chunk_keys(root: int, text: bytes) -> Sequence[int]:
    """Return the keys of the whole chunks of `text`; the rest, shorter than a chunk, has none. `root` separates prompts
    that cannot share a cache: those of different models, tenants and salts.

    A keyed hash of 64 bits is enough: a collision only sends a prompt to a replica that does not have its prefix.
    """
    if not isinstance(_READER, str):
        return _READER.chunk_keys(root, text)
    key = root
    return [key := hash((key, text[chunk])) for chunk in _CHUNKS[: num_chunks(len(text))]]


def _parts(fields: dict[str, Any]) -> list[bytes]:
    """Return the parts of the prompt in the order in which chat templates render them: strings as text, other values as
    compact JSON."""
    parts = [] if _ANY_PREAMBLE.isdisjoint(fields) else [_bytes(fields[name]) for name in _PREAMBLE if name in fields]
    for name in _MESSAGES:
        value = fields.get(name)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for message in value:
                _add_message(message, parts)
            return parts
    return [*parts, *(_bytes(fields[name]) for name in _PROMPT_FIELDS if name in fields)]


def _add_message(message: Any, parts: list[bytes]) -> None:
    if not isinstance(message, dict):
        parts.append(_bytes(message))
        return
    content = message.get("content")
    parts.append(_bytes(message.get("role", "")))
    if isinstance(content, str):
        parts.append(content.encode("utf-8", "surrogatepass"))
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            parts.append(_bytes(part if text is None else text))
    elif content is not None:
        parts.append(_bytes(content))
    if len(message) > 2:
        parts += [_bytes(message[name]) for name in ("reasoning_content", "tool_calls", "images") if message.get(name)]


def _bytes(value: Any) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else _encode(value)


def _first_text(fields: dict[str, Any], names: Sequence[str]) -> str:
    for name in names:
        if name in fields and isinstance(value := fields[name], str) and value:
            return value
    return ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
