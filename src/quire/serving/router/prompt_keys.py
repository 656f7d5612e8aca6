"""Reads of a request what decides where it goes: its model, its prompt as a chain of keys, and its session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

CHUNK_BYTES = 512  # of a prompt: what one key names, after all before it
MAX_CHUNKS = 4_096  # of one prompt; what lies behind them is not looked at
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user", "cache_salt")
_ANSWER_FIELDS = ("previous_response_id", "request_id", "input_file_id")
_PROMPT_FIELDS = ("prompt", "input", "text", "texts", "query", "documents", "content", "input_prefix")
_BEFORE = ("system", "instructions", "tools", "functions", "documents", "template")  # rendered before the messages
_MESSAGES = ("messages", "input")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the router knows of a request. `keys` name the chunks of its prompt, from the first."""

    model: str = ""
    keys: list[int] = field(default_factory=list)
    num_bytes: int = 0  # of the prompt, as the router renders it
    session: str = ""  # the client's name for its session or user, or its salt
    answer_id: str = ""  # of a stored answer or file that the request needs
    is_stream: bool = False


def read_prompt(body: bytes, headers: Mapping[bytes, bytes], tenant: bytes) -> Prompt:
    """Read a JSON body. A body that is none has no keys: the replica says what is wrong with it."""
    session = headers.get(b"x-session-id", b"").decode("latin-1")
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return Prompt(session=session)
    if not isinstance(fields, dict):
        return Prompt(session=session)
    text = b"\0".join(_parts(fields))
    root = hash((tenant, _text(fields.get("cache_salt")), _text(fields.get("model"))))
    session = session or next((name for key in _SESSION_FIELDS if (name := _text(fields.get(key)))), "")
    return Prompt(
        model=_text(fields.get("model")),
        keys=chunk_keys(root, text),
        num_bytes=len(text),
        session=session,
        answer_id=next((name for key in _ANSWER_FIELDS if (name := _text(fields.get(key)))), ""),
        is_stream=fields.get("stream") is True,
    )


def chunk_keys(root: int, text: bytes) -> list[int]:
    """The keys of whole chunks of `text`; the rest, shorter than a chunk, has none. `root` separates prompts that share
    no cache: of other models, tenants and salts.

    Python's keyed hash is enough: two prompts that collide are sent to the same replica, and nothing else.
    """
    end = min(len(text), MAX_CHUNKS * CHUNK_BYTES) - CHUNK_BYTES + 1
    key = root
    return [key := hash((key, text[start : start + CHUNK_BYTES])) for start in range(0, end, CHUNK_BYTES)]


def _parts(fields: dict[str, Any]) -> list[bytes]:
    """The prompt in pieces, in the order in which chat templates render it, each in one canonical form."""
    parts = [_bytes(fields[name]) for name in _BEFORE if name in fields]
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
        parts.append(_bytes(content))
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


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
