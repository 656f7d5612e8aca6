from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.dispatch.mailbox import Delta
from quire.serving.dispatch.observer import RequestRecord
from quire.serving.outputs import RequestFollower, request_fault
from quire.types.output import Finished, SampleEnd
from quire.types.request import Submit
from quire.types.sampling import SamplingParams
from tests.unit.serving.scripted import TOKENIZER, ids


def test_a_request_that_asked_for_what_cannot_be_is_told_the_field_once() -> None:
    fault = request_fault(Finished("r", (), error="structured_outputs: too costly", refused="structured_outputs"))
    assert str(fault) == "structured_outputs: too costly"


def test_a_reason_without_a_field_gets_it() -> None:
    assert str(request_fault(Finished("r", (), error="too costly", refused="prompt"))) == "prompt: too costly"


def test_a_failure_of_the_engine_is_nobodys_fault() -> None:
    assert request_fault(Finished("r", (), error="structured_outputs: looks like a field")) is None


SAID = "one two STOP three"


def stopping(**more: Any) -> Submit:
    return Submit("r", (1, 2), SamplingParams(stop="STOP", **more))


def whole(num_samples: int = 1) -> Finished:
    samples = (SampleEnd(index, tuple(ids(SAID)), "length") for index in range(num_samples))
    return Finished("r", tuple(samples))


@pytest.mark.parametrize("more", [{}, {"best_of": 2}])
def test_a_request_ends_the_same_whether_its_text_goes_to_outputs_or_to_a_stream(more: dict[str, Any]) -> None:
    submit, finished, deltas = stopping(**more), whole(), list[Delta]()
    offline = RequestFollower(submit, TOKENIZER, wants_all=True)
    record = RequestRecord("r", "completions", 2, submit.sampling, True, 0.0)
    mailbox: Any = SimpleNamespace(put=deltas.append, put_bytes=0)
    served = InFlightRequest(submit, record, mailbox, streams=True)
    shown = ""
    for follower in served.follow(TOKENIZER, 0):  # none where samples are ranked
        for token in ids(SAID):
            shown += offline.texts[0].push(token)
            if not follower.is_over:
                follower.hold(follower.push(token, None))
    shown += offline.finish(finished)[0]
    served.finish(finished, TOKENIZER)
    for follower in served.followers:
        follower.release()
    assert shown == "".join(delta.text for delta in deltas) == "one two "
    ((end, text),) = offline.ends(finished)
    assert (end.finish_reason, end.stop_reason) == ("stop", "STOP")
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "STOP")
    assert [(one, None if found is None else found.text) for one, found in served.ends()] == [(end, "one two ")]
    assert text is not None
    assert len(end.token_ids) == len(ids("one two STOP"))


def test_only_requests_that_may_end_by_their_text_are_followed_unless_all_are_wanted() -> None:
    plain = Submit("r", (1, 2), SamplingParams(n=2))
    assert not RequestFollower(plain, TOKENIZER, wants_all=False).is_followed
    assert list(RequestFollower(plain, TOKENIZER, wants_all=True).texts) == [0, 1]
    assert RequestFollower(stopping(), TOKENIZER, wants_all=False).is_followed
    assert RequestFollower(plain, None, wants_all=True).texts == {}
