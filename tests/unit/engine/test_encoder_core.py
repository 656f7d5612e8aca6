"""The core of an encoder engine: which texts make a batch, and that every request gets its own rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.config.engine import SchedulerConfig
from quire.engine.encoder_core import EncoderCore
from quire.types.pooling import PoolingParams, PoolingWork
from quire.types.request import Abort, Submit, pack_tokens
from quire.types.sampling import SamplingParams

NO_NUMBER = 13


def numbers(request: Submit) -> bytes:
    return (
        np.where(np.asarray(request.prompt_token_ids) == NO_NUMBER, np.nan, request.prompt_token_ids)
        .astype(np.float32)
        .tobytes()
    )


class Echo:
    """A BatchEncoder whose rows are the tokens themselves. `batches` has the request ids of every batch."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def encode(self, requests: Sequence[Submit]) -> list[bytes]:
        self.batches.append([request.request_id for request in requests])
        return [numbers(request) for request in requests]

    def close(self) -> None: ...


def request(name: str, *lengths: int, token: int = 1) -> Submit:
    tokens = pack_tokens([token] * sum(lengths))
    sampling = SamplingParams(max_tokens=1)
    return Submit(name, tokens, sampling, tenant=name, pooling=PoolingWork(PoolingParams(), lengths))


def make(max_tokens: int = 64, max_texts: int = 64) -> tuple[EncoderCore, Echo]:
    echo = Echo()
    return EncoderCore(echo, SchedulerConfig(max_texts, max_tokens, 64), 100, check=lambda _: None), echo


def test_a_batch_is_bounded_in_tokens_and_in_texts() -> None:
    core, echo = make(max_tokens=20, max_texts=4)
    for each in (request("a", 1, 1, 1), request("b", 1), request("c", 1), request("d", 9), request("e", 11)):
        core.submit(each)
    core.submit(request("f", *[1] * 5))  # alone, any number fits
    while core.has_work:
        core.step()
    assert echo.batches == [["a", "b"], ["c", "d"], ["e"], ["f"]]


def test_an_id_that_is_aborted_and_used_again_answers_for_its_last_text() -> None:
    core, echo = make()
    for token in (1, 2, 3):
        core.submit(request("a", 2, token=token))
        if token < 3:
            core.abort(Abort("a"))
    ends = core.step().finished
    assert [(end.samples[0].finish_reason, end.pooled) for end in ends] == [
        ("abort", b""), ("abort", b""), ("stop", np.float32([3, 3]).tobytes())
    ]  # fmt: skip
    assert echo.batches == [["a"]]
    assert not core.has_work


def test_a_request_whose_row_is_not_finite_fails_alone() -> None:
    core, _ = make()
    for each in (request("a", 2), request("b", 1, 1, token=NO_NUMBER), request("c", 2)):
        core.submit(each)
    ends = {end.request_id: end for end in core.step().finished}
    assert [ends[name].error is None for name in "abc"] == [True, False, True]
    assert "NaN or infinite" in (ends["b"].error or "")
    assert ends["b"].pooled == b""
    assert core.dead is None
