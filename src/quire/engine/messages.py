"""What edges and the engine process say to each other: typed msgpack, one message per frame, checked when decoded.

Dataclasses of `types` cross as they are; arrays travel as raw little-endian bytes. SamplingParams travel as the fields
that differ from the defaults and are validated again where they arrive.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest, QuireError
from quire.types.output import TokensOut
from quire.types.prefix import PinnedPrefix
from quire.types.request import Abort, Branch, Submit
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.stats import BlockMap, EngineStats

MAX_MESSAGE = 64 * 2**20  # bytes
_DEFAULTS = {item.name: item.default for item in fields(SamplingParams) if item.default is not MISSING}

Question = Literal["stats", "block_map", "reset_cache", "pins"]


class SubmitRequest(msgspec.Struct, frozen=True, tag="submit"):
    """A Submit on its way. Answered by Accepted or Refused."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: dict[str, Any]
    rules: TokenRules
    priority: int = 0
    cache_salt: str = ""
    beam: BeamRules | None = None
    source: Branch | None = None
    tenant: str = ""
    pin: str = ""

    @classmethod
    def of(cls, request: Submit) -> SubmitRequest:
        return cls(
            request.request_id,
            request.prompt_token_ids,
            _changed_fields(request.sampling),
            request.rules,
            request.priority,
            request.cache_salt,
            request.beam,
            request.source,
            request.tenant,
            request.pin,
        )

    def request(self) -> Submit:
        """The Submit again. Raises InvalidRequest, as making it by hand would."""
        unknown = [name for name in self.sampling if name not in _DEFAULTS]
        if unknown:
            raise InvalidRequest(unknown[0], "is no sampling parameter", "leave it out")
        sampling = SamplingParams(**self.sampling)
        return Submit(
            self.request_id,
            self.prompt_token_ids,
            sampling,
            self.rules,
            self.priority,
            self.cache_salt,
            self.beam,
            self.source,
            self.tenant,
            self.pin,
        )


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    abort: Abort


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question; its answer carries the same number."""

    number: int
    question: Question


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """Let go of a resident prompt. Answered by Unpinned of the same number."""

    number: int
    salt: str
    name: str


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """An edge leaves: whatever it has in the engine is to be aborted."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """Sample i of the request answers to handle + i. Comes before its first tokens."""

    request_id: str
    handle: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The parts of the InvalidRequest that a Submit met."""

    request_id: str
    field: str
    reason: str
    fix: str = ""

    def error(self) -> InvalidRequest:
        return InvalidRequest(self.field, self.reason, self.fix)


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """What one step had to say to one edge."""

    out: TokensOut


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


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """The last word of an engine whose executor failed: all that it has not said is over will not be."""

    reason: str


ToEngine = SubmitRequest | AbortRequest | Ask | Unpin | Goodbye
FromEngine = Accepted | Refused | Tokens | StatsAnswer | BlockMapAnswer | CacheReset | PinsAnswer | Unpinned | Lost


class BadMessage(QuireError):
    """A peer sent what is no message, or one that is too large. To be logged and dropped."""


def encode(message: ToEngine | FromEngine) -> bytes:
    """Raises BadMessage for what cannot travel: too large, a number beyond 64 bits, text that is no Unicode."""
    try:
        frame = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadMessage(f"a message cannot be encoded: {error}") from None
    if len(frame) > MAX_MESSAGE:
        raise BadMessage(f"a message of {len(frame)} bytes is above the limit of {MAX_MESSAGE}")
    return frame


def decode_to_engine(frame: bytes) -> ToEngine:
    """What an edge said. Raises BadMessage."""
    _check_size(frame)
    try:
        return _TO_ENGINE.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(f"not a message of an edge: {error}") from None


def decode_from_engine(frame: bytes) -> FromEngine:
    """What the engine said. Raises BadMessage."""
    _check_size(frame)
    try:
        return _FROM_ENGINE.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(f"not a message of the engine: {error}") from None


def _check_size(frame: bytes) -> None:
    if len(frame) > MAX_MESSAGE:
        raise BadMessage(f"a message of {len(frame)} bytes is above the limit of {MAX_MESSAGE}")


def _changed_fields(sampling: SamplingParams) -> dict[str, Any]:
    values = ((name, getattr(sampling, name), default) for name, default in _DEFAULTS.items())
    return {name: value for name, value, default in values if value != default}


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
    """The little-endian dtype of an annotation like NDArray[np.int32]."""
    _, dtype = get_args(kind)
    wire: np.dtype[Any] = np.dtype(get_args(dtype)[0]).newbyteorder("<")
    return wire


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_from_array)
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine, dec_hook=_to_array)
