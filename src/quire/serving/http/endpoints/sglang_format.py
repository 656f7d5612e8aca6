"""Responses in the format of SGLang's server: texts, token ids, and `meta_info` with counts and logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest, RenderLogprobs
from quire.serving.dispatch.mailbox import Delta
from quire.serving.http.endpoints.generate import SoFar
from quire.serving.http.endpoints.openai_format import DONE, Names, ServerSentEvents, extras
from quire.serving.http.endpoints.openai_logprobs import TokenNames, number
from quire.serving.http.generation.results import LogprobColumns, ResultReader
from quire.serving.http.generation.settings import ResponseOptions
from quire.serving.http.service import Service
from quire.types.step import TokenLogprobs

_encode = msgspec.json.encode


class Entries:
    """Writes a token's logprob in SGLang's format: `[logprob, token id, text or null]`."""

    def __init__(self, names: TokenNames, *, with_text: bool) -> None:
        self._names, self._with_text = names, with_text

    def one(self, token: int, value: float | None) -> bytes:
        text = self._names[token].text if self._with_text else b"null"
        return b"[%b,%d,%b]" % (b"null" if value is None else number(value), token, text)

    def many(self, ids: Iterable[int], values: Iterable[float]) -> bytes:
        return b"[" + b",".join(map(self.one, ids, values)) + b"]"

    def columns(self, entry: TokenLogprobs, offset: int) -> LogprobColumns:  # noqa: ARG002 - the format has no offsets
        """Render two columns: the chosen token, and the other tokens that were asked for. This is a RenderLogprobs."""
        ids, values = entry.token_ids.tolist(), entry.logprobs.tolist()
        return self.one(ids[0], values[0]), self.many(ids[1:], values[1:])


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer, complete or so far."""

    request: InFlightRequest
    token_ids: Sequence[int]
    columns: Sequence[LogprobColumns]
    finish_reason: str | None
    stop_reason: int | str | None


class SglangFormat:
    """A ResponseFormat: one object with `meta_info`; a list of them if the prompts were a list or there are several
    answers."""

    def __init__(self, service: Service) -> None:
        self._reader, self._names = ResultReader(service.texts.tokenizer), Names(service.texts.tokenizer)

    def logprobs_renderer(self, options: ResponseOptions) -> RenderLogprobs:
        return self._entries(options).columns

    def body(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> bytes:
        render = self.logprobs_renderer(options) if options.wants_logprobs else None
        entries, answers = self._entries(options), list[dict[str, Any]]()
        for result in self._reader.results(options, requests, render):
            ended = result.finish_reason, result.stop_reason
            sample = Sample(result.request, result.token_ids, result.logprobs, *ended)
            meta_info = _meta_info(options, sample) | _input_logprobs(options, sample, entries)
            answers.append({"text": result.content, "output_ids": result.token_ids, "meta_info": meta_info})
        answers[0] |= extras(options, requests, self._names)
        return _encode(answers if options.parameters["is_list"] or len(answers) > 1 else answers[0])

    def stream(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> SglangStream:
        return SglangStream(options, requests, self._names)

    def _entries(self, options: ResponseOptions) -> Entries:
        return Entries(self._names.of(options), with_text=options.parameters.get("return_text_in_logprobs", False))


@dataclass(slots=True)
class _AnswerSoFar(SoFar):
    """An answer so far, with its text."""

    texts: list[str] = field(default_factory=list)


class SglangStream(ServerSentEvents):
    """A StreamFormat: each event holds the whole answer so far and is sent when it has grown by 1/16. The last event
    also has warnings and ledger, because clients expect an answer in each event."""

    def __init__(self, options: ResponseOptions, requests: Sequence[InFlightRequest], names: Names) -> None:
        self._options, self._requests, self._names = options, requests, names
        self._so_far: dict[int, _AnswerSoFar] = {}  # by choice
        self._num_open = sum(request.n for request in requests)  # choices that are not finished
        self._has_many = options.parameters["is_list"] or self._num_open > 1
        self._last: tuple[int, Sample, str] | None = None  # choice, answer and text of the last event

    def opening(self) -> bytes:
        return b""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        ordered = sorted((delta for delta in deltas if delta.best is None), key=attrgetter("choice"))
        groups = groupby(ordered, key=attrgetter("choice"))
        return b"".join([self._choice(choice, list(group)) for choice, group in groups])

    def closing(self) -> bytes:
        more = extras(self._options, self._requests, self._names)
        return (b"" if self._last is None else self._event(*self._last, more)) + DONE

    def _choice(self, choice: int, deltas: list[Delta]) -> bytes:
        answer, last = self._so_far.setdefault(choice, _AnswerSoFar()), deltas[-1]
        new = [token for delta in deltas for token in delta.token_ids]
        if self._options.drops_answer:
            new = []
        else:
            answer.texts += [delta.text for delta in deltas]
        ids, columns = answer.extend(new, [delta.logprobs for delta in deltas if delta.logprobs])
        if last.finish_reason is None and not answer.is_due():
            return b""
        answer.texts = ["".join(answer.texts)]
        request = next(one for one in self._requests if choice < one.first_choice + one.n)
        ended = last.finish_reason, last.stop_reason
        if self._options.drops_answer and last.finish_reason is not None:
            ended = "length", None
        sample = Sample(request, ids, columns, *ended)
        self._num_open -= last.finish_reason is not None
        if not self._num_open:  # sent by `closing`: the engine may not have finished the request yet
            self._last = choice, sample, answer.texts[0]
            return b""
        return self._event(choice, sample, answer.texts[0], {})

    def _event(self, choice: int, sample: Sample, text: str, more: dict[str, Any]) -> bytes:
        answer = {"text": text, "output_ids": sample.token_ids, "meta_info": _meta_info(self._options, sample)}
        which = {"index": choice} if self._has_many else {}
        return b"data: " + _encode(answer | more | which) + b"\n\n"


def _meta_info(options: ResponseOptions, sample: Sample) -> dict[str, Any]:
    request, record = sample.request, sample.request.record
    found: dict[str, Any] = {
        "id": options.response_id,
        "finish_reason": _finish_reason(sample),
        "prompt_tokens": len(request.submit.prompt_token_ids),
        "completion_tokens": len(sample.token_ids),
        "cached_tokens": 0 if request.finished is None else request.finished.num_cached_tokens,
    }
    if record.finished_at is not None:
        found["e2e_latency"] = record.finished_at - record.received_at
    if not options.wants_logprobs:
        return found
    columns = [] if options.drops_answer else sample.columns
    found["input_token_logprobs"] = ()
    found["output_token_logprobs"] = [msgspec.Raw(column[0]) for column in columns]
    others = [msgspec.Raw(column[1]) for column in columns]
    if options.parameters.get("logprob_token_ids"):
        found["output_token_ids_logprobs"] = others
    elif options.parameters.get("logprobs"):
        found |= {"input_top_logprobs": (), "output_top_logprobs": others}
    return found


def _finish_reason(sample: Sample) -> dict[str, Any] | None:
    """Return why an answer ended. `matched` is the stop string, or the token at which it stopped."""
    reason = sample.finish_reason
    if reason is None:
        return None
    if reason == "length":
        return {"type": "length", "length": len(sample.token_ids)}
    if reason == "stop":
        last = sample.token_ids[-1] if sample.token_ids else None
        return {"type": "stop", "matched": last if sample.stop_reason is None else sample.stop_reason}
    return {"type": reason}


def _input_logprobs(options: ResponseOptions, sample: Sample, entries: Entries) -> dict[str, Any]:
    """Return the logprobs of the prompt tokens from `logprob_start_len` on, if asked for. The first of them has null,
    as in SGLang."""
    finished, num_top = sample.request.finished, options.prompt_logprobs
    start: int = options.parameters.get("prompt_logprobs_start", 0)
    if num_top is None or finished is None or finished.prompt_logprobs is None:
        return {}
    ids = sample.request.submit.prompt_token_ids.tolist()
    lines = list(islice(finished.prompt_logprobs.lines(), start + 1, None))
    rest = zip(ids[start + 1 :], lines, strict=True)
    first = [entries.one(token, None) for token in ids[start : start + 1]]
    found = first + [entries.one(token, None if line is None else line[1][0]) for token, line in rest]
    tops = [b"null"] * len(first) + [
        b"null" if line is None else entries.many(line[0][1:], line[1][1:]) for line in lines
    ]
    members: dict[str, Any] = {"input_token_logprobs": [msgspec.Raw(one) for one in found]}
    return members | ({"input_top_logprobs": [msgspec.Raw(one) for one in tops]} if num_top else {})
