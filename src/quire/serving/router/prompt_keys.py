"""Reads of a request what decides where it goes: its model, its prompt as a chain of keys, and its session."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from quire.serving.router.native import NUM_FOUND, NativeReader, Unavailable

CHUNK_BYTES = 512  # of a prompt: the least that one key names, after all before it
MAX_PROMPT_BYTES = 2 * 2**20  # of one prompt; what lies behind them is not looked at
_GROWTH = 8  # a chunk is so small a part of what stands before it, or CHUNK_BYTES: long prompts need few keys
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user", "cache_salt")
_ANSWER_FIELDS = ("previous_response_id", "input_file_id")
_PROMPT_FIELDS = ("prompt", "input", "input_ids", "text", "texts", "query", "documents", "content", "input_prefix")
_BEFORE = ("system", "instructions", "tools", "functions", "documents", "template")  # rendered before the messages
_MESSAGES = ("messages", "input")
_NAMING, _ANY_BEFORE = frozenset((*_SESSION_FIELDS, *_ANSWER_FIELDS)), frozenset(_BEFORE)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class Prompt:
    """What the router knows of a request. `keys` name the chunks of its prompt, from the first."""

    model: str = ""
    keys: Sequence[int] = ()
    num_bytes: int = 0  # of the prompt, as the router renders it
    session: str = ""  # the client's name for its session or user, or its salt
    answer_id: str = ""  # of a stored answer or file that the request needs


def _chunk_ends() -> list[int]:
    """Where a prompt's first chunks end, as many bytes as that: 0 for no chunk, then for one, two and so on."""
    ends = [0]
    while ends[-1] < MAX_PROMPT_BYTES:
        ends.append(ends[-1] + max(ends[-1] // _GROWTH // CHUNK_BYTES, 1) * CHUNK_BYTES)
    return ends


CHUNK_ENDS = _chunk_ends()
_CHUNKS = [slice(*ends) for ends in pairwise(CHUNK_ENDS)]


def num_chunks(num_bytes: int) -> int:
    """The whole chunks in so many bytes."""
    return bisect_right(CHUNK_ENDS, num_bytes) - 1


def _open_reader() -> NativeReader | str:
    try:
        return NativeReader(CHUNK_ENDS)
    except Unavailable as reason:
        return str(reason)


_READER = _open_reader()  # or why there is none


def why_not_compiled() -> str | None:
    """Return one line saying why bodies are read by msgspec alone; None where they are read by the compiled reader."""
    return _READER if isinstance(_READER, str) else None


def read_prompt(body: bytes, headers: Mapping[bytes, bytes], tenant: bytes, *, is_fork: bool = False) -> Prompt:
    """Read a JSON body. A body that is none has no keys: the replica says what is wrong with it. `is_fork`: its
    request_id names a request that a replica has; elsewhere a client names its own request so."""
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
    """Do what `read_prompt` does, for every body. `session`: that of the headers."""
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return Prompt(session=session)
    if not isinstance(fields, dict):
        return Prompt(session=session)
    text = b"\0".join(_parts(fields))
    model = _text(fields.get("model")) or _text(fields.get("lora_path"))
    if not is_fork and _NAMING.isdisjoint(fields):  # as in most requests
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
    """The keys of whole chunks of `text`; the rest, shorter than a chunk, has none. `root` separates prompts that share
    no cache: of other models, tenants and salts.

    A keyed hash of 64 bits is enough: two prompts that collide are sent to the same replica, and nothing else.
    """
    if not isinstance(_READER, str):
        return _READER.chunk_keys(root, text)
    key = root
    return [key := hash((key, text[chunk])) for chunk in _CHUNKS[: num_chunks(len(text))]]


def _parts(fields: dict[str, Any]) -> list[bytes]:
    """The prompt in pieces, in the order in which chat templates render it, each in one canonical form."""
    parts = [] if _ANY_BEFORE.isdisjoint(fields) else [_bytes(fields[name]) for name in _BEFORE if name in fields]
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
