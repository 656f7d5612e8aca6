"""What crosses between edges and engine arrives as it was sent, or not at all."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.engine import messages
from quire.engine.messages import (
    AbortRequest,
    Accepted,
    Ask,
    BadMessage,
    BlockMapAnswer,
    CacheReset,
    FromEngine,
    Goodbye,
    Refused,
    StatsAnswer,
    SubmitRequest,
    ToEngine,
    Tokens,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.ledger import LedgerEntry
from quire.types.output import Finished, SampleEnd, TokensOut
from quire.types.request import Abort, Branch, Submit
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.stats import BlockMap, BlockStats, EngineStats, RequestBlocks
from quire.types.step import TokenLogprobs

STATS = EngineStats(1, 2, 3, 4, 5, 6, 7, 0.5, BlockStats(8, 4, 1, 4, 30, 64))


def entry(*ids: int) -> TokenLogprobs:
    return TokenLogprobs(np.array(ids, dtype=np.int32), np.array(ids, dtype=np.float32) / -7, rank=3)


def same(one: Any, other: Any) -> bool:
    """Equality that looks into dataclasses and arrays."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.tolist() == other.tolist()
    if dataclasses.is_dataclass(one):
        names = [item.name for item in dataclasses.fields(one)]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(n=3, temperature=0.0, max_tokens=None, seed=2**64 - 1, stop=["a", "é"], stop_token_ids=[5, 6]),
        SamplingParams(
            logit_bias={3: -1.5}, allowed_token_ids=[1, 2], bad_words=["x"], logprobs=-1, logprob_token_ids=[4]
        ),
        SamplingParams(best_of=4, rank_by="sum", structured_outputs={"json": {"type": "object"}}),
    ],
)
@pytest.mark.parametrize(
    ("beam", "source"), [(None, None), (BeamRules(4, 0.5, "never", stream_best=True), Branch("r-0", 1, 2))]
)
def test_a_request_arrives_as_it_was_sent(
    sampling: SamplingParams, beam: BeamRules | None, source: Branch | None
) -> None:
    rules = TokenRules((7,), ((1, 2), (3,)), (7,), "start: /a+/")
    request = Submit("r-1", (1, 2, 3), sampling, rules, -5, "salt", beam, source)
    message = decode_to_engine(encode(SubmitRequest.of(request)))
    assert isinstance(message, SubmitRequest)
    assert message.request() == request


def test_only_the_sampling_fields_that_were_set_travel() -> None:
    assert SubmitRequest.of(Submit("a", (1,), SamplingParams(top_k=5))).sampling == {"top_k": 5}


@pytest.mark.parametrize("message", [AbortRequest(Abort("a", 2, "stop")), Ask(7, "block_map"), Goodbye()])
def test_what_an_edge_says_arrives_as_it_was_sent(message: AbortRequest | Ask | Goodbye) -> None:
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Accepted("a", 12),
        Refused("a", "prompt", "is empty", "send one"),
        StatsAnswer(3, STATS),
        BlockMapAnswer(4, BlockMap(9, 16, (0, 2, 1), (RequestBlocks("a", "running", 20, (1, 2)),))),
        CacheReset(5, 0),
    ],
)
def test_what_the_engine_says_arrives_as_it_was_sent(message: Any) -> None:
    assert decode_from_engine(encode(message)) == message


def test_a_batch_of_tokens_arrives_with_its_arrays_logprobs_and_ends() -> None:
    ends = (
        SampleEnd(0, (5, 6), "stop", 6, (entry(5, 1), entry(6, 2))),
        SampleEnd(1, (), "stop", "\n\n"),
        SampleEnd(2, (9,), "length", cumulative_logprob=-1.5, score=-0.75),
    )
    ledger = (LedgerEntry("queued", 1.5), LedgerEntry("finished", 2.5, 3, "stop"))
    finished = Finished("a", ends, (None, entry(1)), "it broke", 4, 2, ledger, "structured_outputs")
    handles, ids = np.array([2**40, 3], dtype=np.int64), np.array([7, 8], dtype=np.int32)
    out = TokensOut(11, handles, ids, ((3, entry(8, 9)),), (finished,), ((3, np.array([7, 9], dtype=np.int32)),))
    message = decode_from_engine(encode(Tokens(out)))
    assert isinstance(message, Tokens)
    assert same(message.out, out)


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


@pytest.mark.parametrize(
    "value",
    [
        {"type": "submit", "request_id": 5, "prompt_token_ids": [], "sampling": {}, "rules": {}},
        {"type": "abort", "abort": {"request_id": "a", "index": "all"}},
        {"type": "ask", "number": 1, "question": "secrets"},
        {"type": "tokens"},
        {"type": "unheard of"},
        [],
        None,
    ],
)
def test_a_message_of_the_wrong_shape_is_bad(value: object) -> None:
    with pytest.raises(BadMessage, match="not a message of an edge"):
        decode_to_engine(msgspec.msgpack.encode(value))


@pytest.mark.parametrize("samples", ["text", b"123", 5])
def test_an_array_of_the_wrong_length_or_kind_is_bad(samples: object) -> None:
    out = {"step": 1, "samples": samples, "token_ids": b""}
    with pytest.raises(BadMessage, match="not a message of the engine"):
        decode_from_engine(msgspec.msgpack.encode({"type": "tokens", "out": out}))


def test_sampling_that_is_invalid_or_unknown_is_refused_where_it_arrives() -> None:
    rules = TokenRules()
    with pytest.raises(InvalidRequest, match="temperature"):
        SubmitRequest("a", (1,), {"temperature": float("nan")}, rules).request()
    with pytest.raises(InvalidRequest, match="beam_width: is no sampling parameter"):
        SubmitRequest("a", (1,), {"beam_width": 2}, rules).request()


@pytest.mark.parametrize("abort", [Abort("\ud800"), Abort("a", 2**70)])
def test_what_cannot_travel_is_bad_before_it_leaves(abort: Abort) -> None:
    with pytest.raises(BadMessage, match="cannot be encoded"):
        encode(AbortRequest(abort))


def test_a_message_above_the_limit_is_bad_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(AbortRequest(Abort("a" * 100)))
    monkeypatch.setattr(messages, "MAX_MESSAGE", 64)
    for attempt in (lambda: encode(AbortRequest(Abort("a" * 100))), lambda: decode_to_engine(frame)):
        with pytest.raises(BadMessage, match="above the limit of 64"):
            attempt()
