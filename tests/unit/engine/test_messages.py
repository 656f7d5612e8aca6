"""What crosses between edges and engine arrives as it was sent, or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from quire.engine import messages
from quire.engine.messages import (
    BadMessage,
    CacheReset,
    FromEngine,
    Goodbye,
    Refused,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from quire.types import sampling as sampling_module
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.extra_samplers import ExtraSamplers
from quire.types.output import TokensOut
from quire.types.pooling import PoolingParams
from quire.types.request import Abort, Submit, TokenIds, pack_tokens
from quire.types.sampling import RepetitionDetection, SamplingParams
from quire.types.step import TokenLogprobs
from quire.types.vllm_sampling import RequestOutputKind

TOKEN_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=4)
WORDS = st.lists(st.text(min_size=1), max_size=3)
STRUCTURES = st.one_of(
    st.fixed_dictionaries({"json": st.dictionaries(st.text(), st.integers(), max_size=3)}),
    st.fixed_dictionaries({"regex": st.text(min_size=1)}),
    st.fixed_dictionaries({"choice": WORDS.filter(bool)}),
    st.just({"json_object": True}),
)
SAMPLING_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 4),
    "temperature": st.floats(0, 100),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "seed": st.none() | st.integers(-1, 2**64 - 1),
    "stop": WORDS,
    "stop_token_ids": TOKEN_IDS,
    "bad_words": WORDS,
    "allowed_token_ids": st.none() | TOKEN_IDS.filter(bool),
    "logit_bias": st.none() | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
    "ignore_eos": st.booleans(),
    "max_tokens": st.none() | st.integers(16, 2**31 - 1),
    "min_tokens": st.integers(0, 16),
    "logprobs": st.none() | st.integers(-1, 1_000),
    "prompt_logprobs": st.none() | st.integers(-1, 1_000),
    "prompt_logprobs_start": st.none() | st.integers(0, 1_000),
    "logprob_token_ids": TOKEN_IDS,
    "detokenize": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "repetition_detection": st.none() | st.builds(RepetitionDetection, st.integers(2, 9), st.integers(1, 2)),
    "best_of": st.none() | st.integers(4, 16_384),
    "rank_by": st.sampled_from(["mean", "sum"]),
    "structured_outputs": st.none() | STRUCTURES,
    "extra": st.none()
    | st.builds(
        ExtraSamplers, typical_p=st.floats(0.01, 1), dry_multiplier=st.floats(0, 9), dry_sequence_breakers=WORDS
    ),
    "output_kind": st.sampled_from(RequestOutputKind),
}


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    given = draw(st.fixed_dictionaries({}, optional=SAMPLING_FIELDS))
    try:
        return SamplingParams(**given)
    except InvalidRequest:
        assume(False)
        raise


LIMITED: dict[type, st.SearchStrategy[Any]] = {
    SamplingParams: sampling_params(),
    PoolingParams: st.builds(
        PoolingParams, st.none() | st.integers(1, 2**31), st.none() | st.booleans(), st.booleans()
    ),
    BeamRules: st.builds(
        BeamRules,
        st.integers(1, 256),
        st.floats(-100, 100),
        st.sampled_from([True, False, "never"]),
        stream_best=st.booleans(),
    ),
}
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(),
    bool: st.booleans(),
    bytes: st.binary(max_size=16),
    type(None): st.none(),
    TokenIds: st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(pack_tokens),
}


def values_of(hint: Any, within: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Any values of a type, by its annotation: a field that is added to a message is drawn, sent and compared too.

    `within`: the types of which this one is a part. A type within itself is drawn two levels deep.
    """
    inner = partial(values_of, within=within)
    origin, args = get_origin(hint), get_args(hint)
    if hint in LIMITED:
        return LIMITED[hint]
    if hint in PLAIN:
        return PLAIN[hint]
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, UnionType):
        return st.one_of(*(inner(arg) for arg in args if within.count(arg) <= 1))
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.just(()) if within.count(args[0]) > 1 else st.lists(inner(args[0]), max_size=3).map(tuple)
        return st.tuples(*map(inner, args))
    if origin is dict:
        return st.dictionaries(*map(inner, args), max_size=3)
    if origin is np.ndarray:
        dtype = np.dtype(get_args(args[1])[0])
        bits = st.binary(max_size=5 * dtype.itemsize).map(
            lambda raw: raw[: len(raw) // dtype.itemsize * dtype.itemsize]
        )
        return bits.map(lambda raw: np.frombuffer(raw, dtype))
    parts = get_type_hints(hint).items()
    return st.builds(hint, **{name: values_of(kind, (*within, hint)) for name, kind in parts})


def same(one: Any, other: Any) -> bool:
    """Equality that looks into dataclasses and arrays, and does not take a list for a tuple."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if dataclasses.is_dataclass(one) or isinstance(one, msgspec.Struct):
        return all(same(getattr(one, name), getattr(other, name)) for name in get_type_hints(type(one)))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def decoder_of(kind: type) -> Callable[[bytes], Any]:
    return decode_to_engine if kind in get_args(ToEngine) else decode_from_engine


def test_every_field_of_sampling_is_drawn() -> None:
    assert list(SAMPLING_FIELDS) == [item.name for item in dataclasses.fields(SamplingParams)]


@pytest.mark.parametrize("kind", [*get_args(ToEngine), *get_args(FromEngine)])
def test_every_field_of_every_message_arrives_as_it_was_sent(kind: type) -> None:
    @given(values_of(kind))
    def check(message: Any) -> None:
        assert same(decoder_of(kind)(encode(message)), message)

    check()


def test_sampling_that_arrives_was_not_validated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(
        temperature=0.5,
        repetition_detection={"max_pattern_size": 4},
        structured_outputs={"json": {"type": "object"}},
        extra={"top_a": 0.5},
    )
    frame = encode(Submit("a", (1,), params))
    monkeypatch.setattr(sampling_module, "_fill", None)  # would fail if called
    for kind in (RepetitionDetection, ExtraSamplers, sampling_module.StructuredOutputsParams):
        monkeypatch.setattr(kind, "__post_init__", None)
    message = decode_to_engine(frame)
    assert isinstance(message, Submit)
    assert message.sampling == params


def test_only_the_sampling_fields_that_were_set_travel() -> None:
    frame = msgspec.msgpack.decode(encode(Submit("a", (1,), SamplingParams(top_k=5, temperature=1.0))))
    assert frame["sampling"] == {"top_k": 5}


def test_a_prompt_travels_as_little_endian_bytes_and_arrives_as_a_tuple() -> None:
    frame = encode(Submit("a", (1, 2**31 - 1), SamplingParams()))
    assert msgspec.msgpack.decode(frame)["prompt_token_ids"] == b"\1\0\0\0\xff\xff\xff\x7f"
    message = decode_to_engine(frame)
    assert isinstance(message, Submit)
    assert message.prompt_token_ids.tolist() == [1, 2**31 - 1]


def test_an_array_of_the_other_byte_order_arrives_with_its_values() -> None:
    logprobs = TokenLogprobs(np.array([5], dtype=">i4"), np.array([-0.5], dtype=">f4"), 1)
    out = TokensOut(1, np.array([2**40, 3], dtype=">i8"), np.array([7, 8], dtype=">i4"), ((3, logprobs),))
    message = decode_from_engine(encode(out))
    assert isinstance(message, TokensOut)
    assert (message.samples.tolist(), message.token_ids.tolist()) == ([2**40, 3], [7, 8])
    assert message.logprobs[0][1].logprobs.tolist() == [-0.5]


def test_a_refusal_becomes_the_same_error_on_the_other_side() -> None:
    error = InvalidRequest("n", "is 9, above 8", "lower it")
    refused = Refused("a", error.field, error.reason, error.fix).error()
    assert (str(refused), refused.field, refused.fix) == (str(error), "n", "lower it")


@given(st.binary(max_size=200))
@example(encode(Goodbye()))
@example(encode(CacheReset(5, 0)))
def test_bytes_are_a_message_of_that_direction_or_told_apart(frame: bytes) -> None:
    for decode, kinds in ((decode_to_engine, ToEngine), (decode_from_engine, FromEngine)):
        try:
            message = decode(frame)
        except BadMessage:
            continue
        assert isinstance(message, kinds)


SUBMIT: dict[str, Any] = {"type": "submit", "request_id": "a", "prompt_token_ids": b"\1\0\0\0", "sampling": {}}


@pytest.mark.parametrize(
    "value",
    [
        {**SUBMIT, "request_id": 5},
        {"type": "abort", "message": {"request_id": "a", "index": "all"}},
        {"type": "ask", "number": 1, "question": "secrets"},
        {"type": "tokens"},
        {"type": "unheard of"},
        [],
        None,
    ],
)
def test_a_message_of_the_wrong_shape_is_bad(value: object) -> None:
    with pytest.raises(BadMessage, match="not a message of an edge") as caught:
        decode_to_engine(msgspec.msgpack.encode(value))
    assert caught.value.submit_id is None


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"prompt_token_ids": [1, 2]}, "prompt"),
        ({"prompt_token_ids": b"\1\0\0"}, "prompt"),
        ({"sampling": {"beam_width": 2}}, "beam_width"),
        ({"sampling": {"temperature": "hot"}}, "temperature"),
        ({"sampling": {"stop": "end"}}, "stop"),
        ({"sampling": {"structured_outputs": {"xml": "a"}}}, "structured_outputs.xml"),
        ({"rules": {"end_ids": ["a"]}}, "rules.end_ids[0]"),
        ({"beam": {"width": 0}}, "beam"),
        ({"favourite": 1}, "favourite"),
    ],
)
def test_a_submit_of_the_wrong_shape_is_bad_and_says_whose_it_was_and_where(
    wrong: dict[str, object], field: str
) -> None:
    decode_to_engine(msgspec.msgpack.encode(SUBMIT))
    with pytest.raises(BadMessage, match="not a message of an edge") as caught:
        decode_to_engine(msgspec.msgpack.encode({**SUBMIT, **wrong}))
    assert caught.value.submit_id == "a"
    assert caught.value.field == field


@pytest.mark.parametrize("samples", ["text", b"123", 5])
def test_an_array_of_the_wrong_length_or_kind_is_bad(samples: object) -> None:
    out = {"step": 1, "samples": samples, "token_ids": b""}
    with pytest.raises(BadMessage, match="not a message of the engine"):
        decode_from_engine(msgspec.msgpack.encode({"type": "tokens", "message": out}))


@pytest.mark.parametrize(
    "message",
    [
        Abort("\ud800"),
        Abort("a", 2**70),
        Submit("a", pack_tokens((1,)), SamplingParams(), priority=2**70),
    ],
)
def test_what_cannot_travel_is_bad_before_it_leaves(message: Abort | Submit) -> None:
    with pytest.raises(BadMessage, match="cannot be encoded"):
        encode(message)


@pytest.mark.parametrize("token", [1.5, 2**31, "a", None])
def test_a_token_that_is_no_int32_is_refused_when_a_request_is_made(token: object) -> None:
    with pytest.raises(InvalidRequest, match="prompt: holds a token id that is no int32"):
        Submit("a", (1, token), SamplingParams())  # type: ignore[arg-type]


def test_a_message_above_the_limit_is_bad_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(Abort("a" * 100))
    monkeypatch.setattr(messages, "MAX_MESSAGE", 64)
    for attempt in (lambda: encode(Abort("a" * 100)), lambda: decode_to_engine(frame)):
        with pytest.raises(BadMessage, match="above the limit of 64"):
            attempt()
