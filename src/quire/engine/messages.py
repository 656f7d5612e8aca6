"""The messages between edges and the engine process: typed msgpack, one message per frame, checked when decoded.

An edge sends Submit, Abort, Ask, Unpin, LoadAdapter, UnloadAdapter, RunCommand and Goodbye. The engine sends
TokensOut and the answers below. The wire forms of dataclasses in `types` are derived from their fields.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, reduce
from operator import attrgetter, or_
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from quire.engine.command_messages import CommandAnswer, RunCommand
from quire.types.adapters import AdapterInfo
from quire.types.errors import InvalidRequest, QuireError
from quire.types.output import TokensOut
from quire.types.prefix import PinnedPrefix
from quire.types.request import Abort, Submit, TokenIds
from quire.types.sampling import SamplingParams
from quire.types.stats import BlockMap, EngineStats

MAX_MESSAGE = 64 * 2**20  # bytes
# Field names in the decoder's error messages:
_PATH, _NAME = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*?)(?:\[\.\.\.\])?`$"), re.compile(r"field `([^`]+)`")

Question = Literal["stats", "block_map", "reset_cache", "pins", "adapters"]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question of an edge. The answer carries the same number."""

    number: int
    question: Question


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """Release a pinned prefix. The engine answers with Unpinned of the same number."""

    number: int
    salt: str
    name: str


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Load a LoRA adapter from a folder under a name. The engine answers with an AdapterAnswer of the same number;
    steps continue while it reads."""

    number: int
    name: str
    folder: str
    in_place: bool = False  # it may replace an adapter of the same name


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Remove the name of a LoRA adapter. The engine answers with an AdapterAnswer of the same number."""

    number: int
    name: str


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The edge disconnects. The engine aborts all requests of that edge."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """A Submit was accepted. Tokens of its sample i carry the handle `handle + i`. Sent before the first of them."""

    request_id: str
    handle: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A Submit was refused: the parts of the InvalidRequest."""

    request_id: str
    field: str
    reason: str
    fix: str = ""

    def error(self) -> InvalidRequest:
        return InvalidRequest(self.field, self.reason, self.fix)


class StatsAnswer(msgspec.Struct, frozen=True, tag="stats"):
    number: int
    stats: EngineStats


class BlockMapAnswer(msgspec.Struct, frozen=True, tag="block_map"):
    number: int
    block_map: BlockMap


class CacheReset(msgspec.Struct, frozen=True, tag="cache_reset"):
    number: int
    num_freed: int  # blocks


class PinsAnswer(msgspec.Struct, frozen=True, tag="pins"):
    number: int
    pins: tuple[PinnedPrefix, ...]


class Unpinned(msgspec.Struct, frozen=True, tag="unpinned"):
    number: int
    was_there: bool


class AdapterAnswer(msgspec.Struct, frozen=True, tag="adapter"):
    """The adapter that was loaded or unloaded, or the parts of the InvalidRequest that refuses it."""

    number: int
    info: AdapterInfo | None
    field: str = ""
    reason: str = ""
    fix: str = ""

    def result(self) -> AdapterInfo | InvalidRequest:
        return InvalidRequest(self.field, self.reason, self.fix) if self.info is None else self.info


class AdaptersAnswer(msgspec.Struct, frozen=True, tag="adapters"):
    number: int
    adapters: tuple[AdapterInfo, ...]


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """The last message of an engine whose executor failed. Requests that have not finished by now never will."""

    reason: str


ToEngine = Submit | Abort | Ask | Unpin | LoadAdapter | UnloadAdapter | RunCommand | Goodbye
Answer = (
    StatsAnswer | BlockMapAnswer | CacheReset | PinsAnswer | Unpinned | AdapterAnswer | AdaptersAnswer | CommandAnswer
)
FromEngine = Accepted | Refused | TokensOut | Answer | Lost


class BadMessage(QuireError):
    """A frame is not a message, or is too large. The receiver logs and drops it.

    `submit_id` is set if the frame is a Submit whose request id can be read, because its sender waits for an answer.
    `field` is the field that cannot be decoded, if the decoder names it.
    """

    def __init__(self, reason: str, submit_id: str | None = None, field: str = "request") -> None:
        super().__init__(reason)
        self.submit_id, self.field = submit_id, field


def encode(message: ToEngine | FromEngine) -> bytes:
    """Encode a message. Raises BadMessage if it is too large, or has an integer out of range or invalid Unicode."""
    form = _FORMS.get(type(message))
    try:
        frame = _ENCODER.encode(message if form is None else form.pack(message))
    except (TypeError, ValueError, OverflowError) as error:
        raise BadMessage(f"a message cannot be encoded: {error}") from None
    _check_size(frame)
    return frame


def decode_to_engine(frame: bytes) -> ToEngine:
    """Decode a message of an edge. Raises BadMessage."""
    _check_size(frame)
    try:
        message: ToEngine = _decode(_TO_ENGINE, frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        reason = f"not a message of an edge: {error}"
        raise BadMessage(reason, _read_submit_id(frame), _read_field(str(error))) from None
    return message


def decode_from_engine(frame: bytes) -> FromEngine:
    """Decode a message of an engine. Raises BadMessage."""
    _check_size(frame)
    try:
        message: FromEngine = _decode(_FROM_ENGINE, frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(f"not a message of the engine: {error}") from None
    return message


def _decode(decoder: msgspec.msgpack.Decoder[Any], frame: bytes) -> Any:
    message = decoder.decode(frame)
    form = _FORMS.get(type(message))
    return message if form is None else form.unpack(message)


def _check_size(frame: bytes) -> None:
    if len(frame) > MAX_MESSAGE:
        raise BadMessage(f"a message of {len(frame)} bytes is above the limit of {MAX_MESSAGE}")


class _SubmitId(msgspec.Struct, tag="submit"):
    """The only field of a Submit that a refusal needs."""

    request_id: str


def _read_submit_id(frame: bytes) -> str | None:
    try:
        return _SUBMIT_ID.decode(frame).request_id
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _read_field(reason: str) -> str:
    """Return the request field that the decoder's error message is about, as clients name it: fields of SamplingParams
    have no prefix."""
    path, name = _PATH.search(reason), _NAME.search(reason)
    parts = [path[1] if path else "", name[1] if name else ""]
    field = ".".join(filter(None, parts)).removeprefix("sampling.")
    return "prompt" if field == "prompt_token_ids" else field or "request"


# ------------------------------------------------------------------------------------------------------- wire forms
@dataclass(frozen=True, slots=True)
class _WireForm:
    """How values of one type are sent: the type on the wire, and the functions that convert to it and back."""

    wire: Any  # a type that msgspec encodes and decodes
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def _message_form(kind: type, tag: str) -> _WireForm:
    """Return the wire form of a message: a tagged struct. It has the fields of the dataclass if some of them are in
    `_PACKED`; otherwise it has one field, which holds the dataclass."""
    hints = get_type_hints(kind)
    packed = [(place, _PACKED[hint]) for place, hint in enumerate(hints.values()) if hint in _PACKED]
    if not packed:
        wrapped = msgspec.defstruct(kind.__name__, [("message", kind)], tag=tag, frozen=True)
        return _WireForm(wrapped, wrapped, attrgetter("message"))
    types = {name: _PACKED[hint].wire if hint in _PACKED else hint for name, hint in hints.items()}
    wire, read, names = _struct_of(kind, types, tag), attrgetter(*hints), tuple(hints)

    def pack(message: Any) -> Any:
        values = list(read(message))
        for place, form in packed:
            values[place] = form.pack(values[place])
        return wire(*values)

    def unpack(sent: Any) -> Any:
        values = list(read(sent))
        for place, form in packed:
            try:
                values[place] = form.unpack(values[place])
            except ValueError as error:
                raise ValueError(f"{error} - at `$.{names[place]}`") from None
        return kind(*values)

    return _WireForm(wire, pack, unpack)


def _struct_of(kind: Any, types: Mapping[str, Any], tag: str | None = None) -> type[msgspec.Struct]:
    """Make a struct with the fields and defaults of a dataclass. Fields that hold their default object are not sent."""
    wire_fields: list[Any] = []
    for item in fields(kind):
        default = [] if item.default is MISSING else [item.default]
        if item.default_factory is not MISSING:
            default = [msgspec.field(default_factory=item.default_factory)]
        wire_fields.append((item.name, types[item.name], *default))
    return msgspec.defstruct(
        kind.__name__, wire_fields, tag=tag, frozen=True, omit_defaults=True, forbid_unknown_fields=True
    )


def _sampling_form() -> _WireForm:
    """Return the wire form of SamplingParams: the fields that differ from their defaults. The edge has validated them,
    so `unpack` makes them and the dataclasses in them without checks. The decoder still checks names and types."""
    hints = get_type_hints(SamplingParams)
    wire = _struct_of(SamplingParams, {name: _validated_type(hint) for name, hint in hints.items()})
    parts = {name: kind for name, hint in hints.items() for kind in _alternatives(hint) if is_dataclass(kind)}

    def unpack(sent: Any) -> SamplingParams:
        values = msgspec.structs.asdict(sent)
        for name, kind in parts.items():
            if values[name] is not None:
                values[name] = _without_checks(kind, values[name])
        return SamplingParams.trusted(**values)

    return _WireForm(wire, lambda params: wire(**params.changed_fields()), unpack)


def _validated_type(hint: Any) -> Any:
    """Return the type of a field after validation. Its annotation is the type of what users may give: validation
    converts an Iterable to a tuple, a str to a tuple where an Iterable is allowed, and a Mapping to a dataclass where
    one is."""
    kinds = _alternatives(hint)
    if any(get_origin(kind) is Iterable for kind in kinds):
        kinds = [kind for kind in kinds if kind is not str]
    if any(map(is_dataclass, kinds)):
        kinds = [kind for kind in kinds if get_origin(kind) is not Mapping]
    return reduce(or_, map(_wire_type, kinds))


def _wire_type(kind: Any) -> Any:
    if is_dataclass(kind):
        return _struct_of(kind, {name: _validated_type(hint) for name, hint in get_type_hints(kind).items()})
    if get_origin(kind) is Iterable:
        return tuple[get_args(kind)[0], ...]  # type: ignore[misc]
    return dict[get_args(kind)] if get_origin(kind) is Mapping else kind  # type: ignore[misc]


def _alternatives(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]


def _without_checks(kind: Any, sent: Any) -> Any:
    """Make a dataclass with the values of its wire struct, without calling __post_init__."""
    made = object.__new__(kind)
    for item in fields(kind):
        object.__setattr__(made, item.name, getattr(sent, item.name))
    return made


def _pack_tokens(tokens: TokenIds) -> bytes:
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def _unpack_tokens(packed: bytes) -> TokenIds:
    tokens = array("i")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def _from_array(value: object) -> bytes:
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    raise TypeError(f"a {type(value).__name__} has no place in a message")


def _to_array(kind: type, value: object) -> object:
    if not isinstance(value, bytes):
        raise TypeError("an array travels as bytes")
    return np.frombuffer(value, _wire_dtype(kind))


@cache
def _wire_dtype(kind: Any) -> np.dtype[Any]:
    """Return the little-endian dtype of an annotation like NDArray[np.int32]."""
    _, dtype = get_args(kind)
    wire: np.dtype[Any] = np.dtype(get_args(dtype)[0]).newbyteorder("<")
    return wire


_PACKED: dict[Any, _WireForm] = {  # by the annotation of a message's field
    SamplingParams: _sampling_form(),
    TokenIds: _WireForm(bytes, _pack_tokens, _unpack_tokens),
}
_TAGS: dict[type, str] = {Submit: "submit", Abort: "abort", TokensOut: "tokens"}
_FORMS: dict[type, _WireForm] = {kind: _message_form(kind, tag) for kind, tag in _TAGS.items()}
_FORMS |= {form.wire: form for form in _FORMS.values()}  # so that decoded structs find their form too


def _wire_union(messages: Any) -> Any:
    return reduce(or_, (_FORMS[kind].wire if kind in _FORMS else kind for kind in get_args(messages)))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_from_array)
_TO_ENGINE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_wire_union(ToEngine))
_FROM_ENGINE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_wire_union(FromEngine), dec_hook=_to_array)
_SUBMIT_ID = msgspec.msgpack.Decoder(_SubmitId)
