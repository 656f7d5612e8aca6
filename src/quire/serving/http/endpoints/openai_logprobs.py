"""Renders log-probabilities in the two formats of OpenAI, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import msgspec

from quire.serving.dispatch.in_flight_request import RenderLogprobs
from quire.serving.text.tokenizer import Tokenizer
from quire.types.step import LogprobTable, TokenLogprobs

LOWEST = -9999.0  # JSON has no minus infinity
_encode = msgspec.json.encode
_Line = tuple[list[int], list[float], int]  # of one prompt token: ids, logprobs and its rank


@dataclass(frozen=True, slots=True)
class TokenName:
    """One token in JSON."""

    text: bytes  # as chat writes it: U+FFFD for bytes that are no character alone
    key: str  # as completions write it: `bytes:\\xE2\\x80` for those
    head: bytes  # {"token":...,"logprob":
    tail: bytes  # ,"bytes":[...]


class TokenNames:
    """The names of tokens in JSON. Keeps every name that it made: at most one per token of the vocabulary."""

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
    return repr(max(value, LOWEST)).encode()


def render_chat(names: TokenNames, *, lists_chosen: bool = False) -> RenderLogprobs:
    """One column: {"token", "logprob", "bytes", "top_logprobs"}. With `lists_chosen`, the chosen token is among the top
    ones, wherever it ranks."""

    def render(entry: TokenLogprobs, offset: int) -> tuple[bytes, ...]:  # noqa: ARG001 - chat has no offsets
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
    """Four columns: the token, its logprob, an object of the top ones, and where it begins in the text."""

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
    """The columns of an echoed prompt, each joined, with the `num_top` likeliest tokens, -1 for all. A token without
    logprobs has null in their place."""
    lines: Iterable[_Line | None] = repeat(None) if table is None else _lines(table, num_top)
    columns = [
        (_encode(names[token].key), b"null", b"null", str(offset).encode())
        if line is None
        else _completion_columns(names, line[0], line[1], offset)
        for token, offset, line in zip(token_ids, offsets, lines, strict=table is not None)
    ]
    return tuple(map(b",".join, zip(*columns, strict=True)))


def chat_logprobs(columns: Sequence[tuple[bytes, ...]]) -> bytes:
    """The `logprobs` of a chat choice, from what was rendered for its tokens."""
    return b'{"content":[' + b",".join([column[0] for column in columns]) + b'],"refusal":null}'


def completion_logprobs(columns: Sequence[tuple[bytes, ...]]) -> bytes:
    """The `logprobs` of a completions choice."""
    tokens, values, tops, offsets = zip(*columns, strict=True) if columns else ((), (), (), ())
    return (
        b'{"tokens":[' + b",".join(tokens)
        + b'],"token_logprobs":[' + b",".join(values)
        + b'],"top_logprobs":[' + b",".join(tops)
        + b'],"text_offset":[' + b",".join(offsets) + b"]}"
    )  # fmt: skip


def _lines(table: LogprobTable, num_top: int) -> Iterator[_Line | None]:
    """The lines of a table with the `num_top` likeliest tokens alone, -1 for all: an echo and `prompt_logprobs` share
    the table, and may ask for different numbers."""
    end = None if num_top == -1 else 1 + num_top
    return (line and (line[0][:end], line[1][:end], line[2]) for line in table.lines())


def prompt_logprobs(table: LogprobTable | None, names: TokenNames, num_top: int) -> bytes:
    """A list with an object by token id for every prompt token: the token and the `num_top` likeliest ones, -1 for all.
    The first prompt token has null."""
    lines: Iterable[_Line | None] = () if table is None else _lines(table, num_top)
    return b"[" + b",".join([b"null" if line is None else _prompt_entry(*line, names) for line in lines]) + b"]"


def _prompt_entry(ids: Sequence[int], values: Sequence[float], rank: int, names: TokenNames) -> bytes:
    found: dict[int, bytes] = {}
    for token, value, place in zip(ids, values, (rank, *range(1, len(ids))), strict=True):
        if token not in found:  # the prompt's token may also be among the likeliest
            parts = (token, _encode(max(value, LOWEST)), place, names[token].text)
            found[token] = b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}' % parts
    return b"{" + b",".join(found.values()) + b"}"
