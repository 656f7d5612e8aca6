"""Renders logprobs in the formats of OpenAI's chat completions and completions, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import msgspec

from quire.serving.dispatch.in_flight_request import RenderLogprobs
from quire.serving.text.tokenizer import Tokenizer
from quire.types.step import LogprobTable, TokenLogprobs

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have
_encode = msgspec.json.encode
_Line = tuple[list[int], list[float], int]  # of one prompt token: token ids, their logprobs, and the rank of the first


@dataclass(frozen=True, slots=True)
class TokenName:
    """The JSON names of one token."""

    text: bytes  # encoded, as in chat completions: U+FFFD for bytes that are not a character
    key: str  # as in completions: `bytes:\xe2\x80` for such bytes
    head: bytes  # {"token":...,"logprob":
    tail: bytes  # ,"bytes":[...]


class TokenNames:
    """The JSON names of tokens. Each is made once and kept, so there is at most one per token of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._names: dict[int, TokenName] = {}

    def __getitem__(self, token_id: int) -> TokenName:
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = self._name(token_id)
        return name

    def _name(self, token_id: int) -> TokenName:
        raw = self._tokenizer.token_bytes(token_id)
        text = raw.decode(errors="replace")
        key = text
        if self._as_ids:
            text = key = f"token_id:{token_id}"
        elif text.encode() != raw:
            key = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        shown = _encode(text)
        tail = b',"bytes":' + _encode(list(raw))
        return TokenName(shown, key, b'{"token":' + shown + b',"logprob":', tail)


def number(value: float) -> bytes:
    """Return a logprob as JSON."""
    return repr(max(value, LOWEST)).encode()


def render_chat(names: TokenNames, *, lists_chosen: bool = False) -> RenderLogprobs:
    """Return a renderer of one column: {"token", "logprob", "bytes", "top_logprobs"}. With `lists_chosen`, the chosen
    token is always among the top ones."""

    def render(entry: TokenLogprobs, offset: int) -> tuple[bytes, ...]:  # noqa: ARG001 - the format has no offsets
        ids, values = entry.token_ids.tolist(), entry.logprobs.tolist()
        chosen = names[ids[0]]
        top = []
        start = 0 if lists_chosen and ids[0] not in ids[1:] else 1
        for token, value in zip(ids[start:], values[start:], strict=True):
            name = names[token]
            top.append(name.head + number(value) + name.tail + b"}")
        parts = (chosen.head, number(values[0]), chosen.tail, b',"top_logprobs":[', b",".join(top), b"]}")
        return (b"".join(parts),)

    return render


def render_completion(names: TokenNames) -> RenderLogprobs:
    """Return a renderer of four columns: the token, its logprob, an object of the top tokens, and the character
    offset."""

    def render(entry: TokenLogprobs, offset: int) -> tuple[bytes, ...]:
        return _completion_columns(names, entry.token_ids.tolist(), entry.logprobs.tolist(), offset)

    return render


def _completion_columns(
    names: TokenNames, ids: Sequence[int], values: Sequence[float], offset: int
) -> tuple[bytes, ...]:
    top: dict[str, float] = {}
    for token, value in zip(ids, values, strict=True):
        top.setdefault(names[token].key, max(value, LOWEST))
    return _encode(names[ids[0]].key), number(values[0]), _encode(top), str(offset).encode()


def echoed_columns(
    table: LogprobTable | None, token_ids: Sequence[int], offsets: Sequence[int], names: TokenNames, num_top: int
) -> tuple[bytes, ...]:
    """Return the four columns of an echoed prompt, each joined by commas, with the `num_top` most probable tokens (-1:
    all). A token without logprobs has null."""
    lines: Iterable[_Line | None] = repeat(None) if table is None else _lines(table, num_top)
    columns = [
        (_encode(names[token].key), b"null", b"null", str(offset).encode())
        if line is None
        else _completion_columns(names, line[0], line[1], offset)
        for token, offset, line in zip(token_ids, offsets, lines, strict=table is not None)
    ]
    return tuple(map(b",".join, zip(*columns, strict=True)))


def chat_logprobs(columns: Sequence[tuple[bytes, ...]]) -> bytes:
    """Return the `logprobs` of a chat choice, from the rendered columns of its tokens."""
    return b'{"content":[' + b",".join([column[0] for column in columns]) + b'],"refusal":null}'


def completion_logprobs(columns: Sequence[tuple[bytes, ...]]) -> bytes:
    """Return the `logprobs` of a completions choice, from the rendered columns of its tokens."""
    tokens, values, tops, offsets = zip(*columns, strict=True) if columns else ((), (), (), ())
    return (
        b'{"tokens":[' + b",".join(tokens)
        + b'],"token_logprobs":[' + b",".join(values)
        + b'],"top_logprobs":[' + b",".join(tops)
        + b'],"text_offset":[' + b",".join(offsets) + b"]}"
    )  # fmt: skip


def _lines(table: LogprobTable, num_top: int) -> Iterator[_Line | None]:
    """Yield the lines of a table, each cut to the `num_top` most probable tokens (-1: all). An echo and
    `prompt_logprobs` share the table and may ask for different numbers."""
    end = None if num_top == -1 else 1 + num_top
    return (line and (line[0][:end], line[1][:end], line[2]) for line in table.lines())


def prompt_logprobs(table: LogprobTable | None, names: TokenNames, num_top: int) -> bytes:
    """Return a JSON list with one object per prompt token, whose keys are token ids: the token itself and the `num_top`
    most probable ones (-1: all). The first prompt token has null."""
    lines: Iterable[_Line | None] = () if table is None else _lines(table, num_top)
    return b"[" + b",".join([b"null" if line is None else _prompt_entry(*line, names) for line in lines]) + b"]"


def _prompt_entry(ids: Sequence[int], values: Sequence[float], rank: int, names: TokenNames) -> bytes:
    found: dict[int, bytes] = {}
    for token, value, place in zip(ids, values, (rank, *range(1, len(ids))), strict=True):
        if token not in found:  # the prompt's token may also be among the most probable
            parts = (token, _encode(max(value, LOWEST)), place, names[token].text)
            found[token] = b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}' % parts
    return b"{" + b",".join(found.values()) + b"}"
