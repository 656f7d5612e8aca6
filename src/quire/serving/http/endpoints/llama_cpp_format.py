"""Responses in the format of llama.cpp's server: texts with counts, timings, settings and probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest, RenderLogprobs
from quire.serving.dispatch.mailbox import Delta
from quire.serving.http.endpoints.openai_format import Names, ServerSentEvents, extras
from quire.serving.http.endpoints.openai_logprobs import TokenName, TokenNames, number
from quire.serving.http.errors import ApiError
from quire.serving.http.generation.results import ChoiceResult, ResultReader
from quire.serving.http.generation.settings import ResponseOptions
from quire.serving.http.service import Service
from quire.types.step import TokenLogprobs

_encode = msgspec.json.encode
_STOP_TYPES = {"stop": "eos", "length": "limit"}
_SETTINGS = {  # llama.cpp's names of sampling parameters
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
}


class LlamaFormat:
    """A ResponseFormat: one object per prompt, in a list if there are several prompts."""

    def __init__(self, service: Service) -> None:
        self._tokenizer = service.texts.tokenizer
        self._reader, self._names = ResultReader(self._tokenizer), Names(self._tokenizer)

    def logprobs_renderer(self, options: ResponseOptions) -> RenderLogprobs:
        return render_probabilities(self._names.of(options))

    def body(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> bytes:
        render = self.logprobs_renderer(options) if options.wants_logprobs else None
        answers = [self._answer(options, result) for result in self._reader.results(options, requests, render)]
        return _encode(answers[0] if len(answers) == 1 else answers)

    def _answer(self, options: ResponseOptions, result: ChoiceResult) -> dict[str, Any]:
        ids = result.token_ids if options.parameters.get("return_tokens") else ()
        members: dict[str, Any] = {"content": result.content, "tokens": ids}
        if options.wants_logprobs:
            members["completion_probabilities"] = [msgspec.Raw(column[0]) for column in result.logprobs]
        request, ended = result.request, (result.finish_reason, result.stop_reason)
        members |= _end(options, request, ended, len(result.token_ids), has_new_line="\n" in result.content)
        members["prompt"] = self._tokenizer.decode(request.submit.prompt_token_ids.tolist(), skip_special_tokens=False)
        return _chosen(options, members) | extras(options, [request], self._names)

    def stream(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> LlamaStream:
        return LlamaStream(options, requests[0], self._names)


class LlamaStream(ServerSentEvents):
    """A StreamFormat: events with new text. The last event has the reason for the end; no `[DONE]` follows."""

    def __init__(self, options: ResponseOptions, request: InFlightRequest, names: Names) -> None:
        self._options, self._request, self._names = options, request, names
        self._num_tokens = 0
        self._ended: tuple[str | None, int | str | None] = (None, None)
        self._has_new_line = False
        self._columns: list[msgspec.Raw] = []  # logprobs of tokens whose text has not been sent yet

    def opening(self) -> bytes:
        return b""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        if self._options.drops_answer:
            self._ended = "length", None
            return b""
        text = "".join(delta.text for delta in deltas)
        ids = [token for delta in deltas for token in delta.token_ids]
        self._num_tokens += len(ids)
        self._has_new_line |= "\n" in text
        self._columns += [msgspec.Raw(delta.logprobs[0]) for delta in deltas if delta.logprobs]
        if deltas and deltas[-1].finish_reason is not None:
            self._ended = deltas[-1].finish_reason, deltas[-1].stop_reason
        if not text:
            return b""
        members = {"content": text, "tokens": ids, **_begin(self._request, self._num_tokens), **self._probabilities()}
        return _event(members)

    def closing(self) -> bytes:
        members = {"content": "", "tokens": [], **self._probabilities()}
        ended, num_tokens = self._ended, self._num_tokens
        members |= _end(self._options, self._request, ended, num_tokens, has_new_line=self._has_new_line)
        return _event(_chosen(self._options, members) | extras(self._options, [self._request], self._names))

    def _probabilities(self) -> dict[str, Any]:
        columns, self._columns = self._columns, []
        return {"completion_probabilities": columns} if self._options.wants_logprobs else {}

    @staticmethod
    def failure(error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"


def render_probabilities(names: TokenNames) -> RenderLogprobs:
    """Return a renderer of one column: {"id", "token", "logprob", "bytes", "top_logprobs"}."""

    def entry(token: int, name: TokenName, value: float) -> bytes:
        return b'{"id":' + str(token).encode() + b"," + name.head[1:] + number(value) + name.tail

    def render(given: TokenLogprobs, offset: int) -> tuple[bytes, ...]:  # noqa: ARG001 - there are no offsets
        pairs = list(zip(given.token_ids.tolist(), given.logprobs.tolist(), strict=True))
        first, *top = [entry(token, names[token], value) for token, value in pairs]
        return (first + b',"top_logprobs":[' + b",".join(one + b"}" for one in top) + b"]}",)

    return render


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _begin(request: InFlightRequest, num_tokens: int) -> dict[str, Any]:
    counts = {"tokens_predicted": num_tokens, "tokens_evaluated": len(request.submit.prompt_token_ids)}
    return {"index": request.first_choice, "id_slot": -1, "stop": False, **counts}


def _end(
    options: ResponseOptions,
    request: InFlightRequest,
    ended: tuple[str | None, int | str | None],
    num_tokens: int,
    *,
    has_new_line: bool,
) -> dict[str, Any]:
    """Return the members that a whole answer and the last event of a stream have in common."""
    finish_reason, stop_reason = ended
    word = stop_reason if isinstance(stop_reason, str) else ""
    return {
        **_begin(request, num_tokens),
        "stop": True,
        "model": options.model,
        "tokens_cached": 0 if request.finished is None else request.finished.num_cached_tokens,
        "truncated": False,
        "has_new_line": has_new_line,
        "stop_type": "word" if word else _STOP_TYPES.get(finish_reason or "", "none"),
        "stopping_word": word,
        "generation_settings": _settings(options, request),
        "timings": _timings(request, num_tokens),
    }


def _settings(options: ResponseOptions, request: InFlightRequest) -> dict[str, Any]:
    sampling = request.submit.sampling
    length = 0 if options.drops_answer else -1 if sampling.max_tokens is None else sampling.max_tokens
    return {
        "n_predict": length,
        "max_tokens": length,
        "seed": -1 if sampling.seed is None else sampling.seed,
        **{name: getattr(sampling, own) for name, own in _SETTINGS.items()},
        "stop": sampling.stop or (),
        "n_probs": sampling.logprobs or 0,
        "stream": options.stream,
    }


def _timings(request: InFlightRequest, num_tokens: int) -> dict[str, Any]:
    """Return counts and times of the prompt tokens that were not cached, and of the answer's tokens."""
    record, finished = request.record, request.finished
    end = max(at for at in (record.received_at, record.last_token_at, record.finished_at) if at is not None)
    submitted = record.received_at if record.submitted_at is None else record.submitted_at
    first = end if record.first_token_at is None else record.first_token_at
    cached = 0 if finished is None else finished.num_cached_tokens
    computed = len(request.submit.prompt_token_ids) - cached
    spent = {  # the answer's first token is computed with the prompt, so the answer's rate is that of the others
        "prompt": (computed, computed, first - submitted),
        "predicted": (num_tokens, max(0, num_tokens - 1), end - first),
    }
    members: dict[str, Any] = {"cache_n": cached}
    for name, (count, num_timed, seconds) in spent.items():
        ms = max(0.0, seconds * 1000)
        members |= {
            f"{name}_n": count,
            f"{name}_ms": ms,
            f"{name}_per_token_ms": ms / num_timed if num_timed else 0.0,
            f"{name}_per_second": num_timed / ms * 1000 if ms else 0.0,
        }
    return members


def _chosen(options: ResponseOptions, members: dict[str, Any]) -> dict[str, Any]:
    """Return only the members that `response_fields` lists. A path with slashes selects a nested member and is its key
    in the result."""
    paths = options.parameters.get("response_fields")
    if not paths:
        return members
    found = {}
    for path in paths:
        value: Any = members
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found
