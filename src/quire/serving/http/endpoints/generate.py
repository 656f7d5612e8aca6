"""Generation from token ids to token ids, for routers and reinforcement learning. No text is sent or returned, and
logprobs are those of the unmodified model output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest, RenderLogprobs
from quire.serving.dispatch.mailbox import Delta
from quire.serving.http.endpoints.chat import CHAT
from quire.serving.http.endpoints.completions import COMPLETIONS
from quire.serving.http.endpoints.openai_format import (
    DONE,
    Names,
    ServerSentEvents,
    extras,
    prompt_members,
    usage_json,
)
from quire.serving.http.endpoints.openai_logprobs import TokenNames, chat_logprobs, number
from quire.serving.http.fields import CANDIDATES as CANDIDATE_FIELDS
from quire.serving.http.fields import (
    EXTRA_SAMPLING,
    LABELS,
    LENGTH,
    MODEL,
    NAMES,
    OUTPUT,
    PROMPT_LOGPROBS,
    SAMPLING,
    Field,
    not_supported,
)
from quire.serving.http.fields import STRUCTURE as STRUCTURE_FIELDS
from quire.serving.http.generation.handler import GenerationEndpoint
from quire.serving.http.generation.results import ChoiceResult, LogprobColumns, ResultReader, count_usage, usage_of
from quire.serving.http.generation.settings import GenerationSettings, Parameters, ResponseOptions
from quire.serving.http.request_head import RequestHead
from quire.serving.http.schemas import IDS, NUMBER, TEXT, WHOLE, Schema, many, or_null, record, ref
from quire.serving.http.service import Service
from quire.serving.http.validators.values import Bounds, Flag, Only, Options, TokenIds, Validator, shown
from quire.serving.requests import Prompt
from quire.types.errors import InvalidRequest
from quire.types.step import TokenLogprobs

_encode = msgspec.json.encode
_KINDS = {"cumulative": "cumulative", "delta": "delta", "final_only": "delta", 0: "cumulative", 1: "delta", 2: "delta"}
GROWTH = 16  # a cumulative event has at least 1/GROWTH more tokens than the previous one
# fields of the request itself or implied, so not members of sampling_params
_TOP_LEVEL = ("stream", "stream_options", "stream_interval", "return_tokens_as_token_ids", "return_token_ids")


@dataclass(frozen=True, slots=True)
class OutputKind:
    """Whether events of a stream are cumulative or deltas, by name or by vLLM's number."""

    def check(self, where: str, value: Any, limits: Bounds) -> str:  # noqa: ARG002
        if isinstance(value, bool) or not isinstance(value, str | int) or value not in _KINDS:
            raise InvalidRequest(where, f"must be delta or cumulative, got {shown(value)}")
        return _KINDS[value]

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return {"enum": list(_KINDS)}


@dataclass(frozen=True, slots=True)
class Anything:
    """A list or an object whose content is ignored."""

    def check(self, where: str, value: Any, limits: Bounds) -> Any:  # noqa: ARG002
        return value

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return {"anyOf": [{"type": "array"}, {"type": "object"}]}


SAMPLING_MEMBERS: dict[str, Validator] = {
    **{field.name: field.validator for field in (*LENGTH, *SAMPLING, *EXTRA_SAMPLING)},
    **{field.name: field.validator for field in (*CANDIDATE_FIELDS, *STRUCTURE_FIELDS)},
    **{field.name: field.validator for field in OUTPUT if field.name not in _TOP_LEVEL},
    "max_tokens": CHAT.fields_by_name["max_tokens"].validator,
    "logprobs": COMPLETIONS.fields_by_name["logprobs"].validator,
    **{field.name: field.validator for field in PROMPT_LOGPROBS},
    "output_kind": OutputKind(),
    "detokenize": Flag(),
    "extra_args": Only(({},)),
}
_STREAM = tuple(field for field in OUTPUT if field.name in ("stream", "stream_options", "stream_interval"))
_FIELDS = (
    MODEL,
    Field("token_ids", TokenIds("prompt_tokens", 1), "The prompt.", is_required=True),
    Field("sampling_params", Options(SAMPLING_MEMBERS),
          "The sampling parameters of `/v1/completions` by the same names. Default of `max_tokens`: as many as "
          "fit. `output_kind`: events of a stream hold the new tokens (`delta`, the default) or all tokens so far "
          "(`cumulative`); cumulative events are sent when the answer has grown by 1/16, and at its end."),
    *_STREAM,
    *NAMES,
    *(field for field in LABELS if field.name == "priority"),
    Field("token_offsets", Anything(), "A member of what render endpoints return.", support="no effect"),
    not_supported("assistant_tokens_mask", "A mask of the prompt tokens that an assistant wrote."),
    not_supported("features", "Images and audio."),
    not_supported("content_parts", "Images and audio."),
    not_supported("kv_transfer_params", "Transfer of KV caches between servers."),
    not_supported("ec_transfer_params", "Transfer of KV caches between servers."),
)  # fmt: skip
_DESCRIPTION = """\
Takes the token ids of a prompt and returns token ids, without text on either side. `logprobs` has the shape of
`/v1/chat/completions`, with tokens written as `token_id:N`: the log-softmax of the model's logits before temperature,
penalties and filters. The `token_ids` of a choice hold every sampled token, including the end token, so prompt and
answer together are what the model computed. vLLM's path `/inference/v1/generate` works too. The render endpoints make
such requests from messages and texts."""


def translate(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
    """Move the members of `sampling_params` to the top level, and set the options that this endpoint implies."""
    sampling = given.pop("sampling_params", {})
    sampling.pop("detokenize", None)
    prompt = [Prompt(token_ids=tuple(given.pop("token_ids")))]
    return {**given, **sampling, "prompt": prompt, "return_tokens_as_token_ids": True, "return_token_ids": True}


def render_ids(names: TokenNames) -> RenderLogprobs:
    """Return a renderer of one column, in the format of chat logprobs. If no top tokens are asked for, the chosen token
    is listed as the only one, as vLLM does."""

    def render(entry: TokenLogprobs, offset: int) -> tuple[bytes, ...]:  # noqa: ARG001 - there is no text
        ids, values = entry.token_ids.tolist(), entry.logprobs.tolist()
        pairs = list(zip(ids, values, strict=True))
        top = b",".join(names[token].head + number(value) + b"}" for token, value in pairs[1:] or pairs)
        return (names[ids[0]].head + number(values[0]) + b',"top_logprobs":[' + top + b"]}",)

    return render


class TokenFormat:
    """A ResponseFormat: token ids."""

    def __init__(self, service: Service) -> None:
        self._reader, self._names = ResultReader(service.texts.tokenizer), Names(service.texts.tokenizer)

    def logprobs_renderer(self, options: ResponseOptions) -> RenderLogprobs:
        return render_ids(self._names.of(options))

    def body(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> bytes:
        render = self.logprobs_renderer(options) if options.wants_logprobs else None
        results = self._reader.results(options, requests, render)
        body: dict[str, Any] = {
            "request_id": options.response_id,
            "model": options.model,
            "created": options.created,
            "choices": [_choice(options, result) for result in results],
            "usage": usage_json(usage_of(options, results, requests)),
            "prompt_logprobs": prompt_members(options, requests[0], self._names).get("prompt_logprobs"),
        }
        return _encode(body | extras(options, requests, self._names))

    def stream(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> TokenStream:
        return TokenStream(options, requests, self._names)


def _choice(options: ResponseOptions, result: ChoiceResult) -> dict[str, Any]:
    logprobs = msgspec.Raw(chat_logprobs(result.logprobs)) if options.wants_logprobs else None
    return {
        "index": result.index,
        "token_ids": result.token_ids,
        "logprobs": logprobs,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
    }


@dataclass(slots=True)
class SoFar:
    """All tokens of one choice of a cumulative stream. The next event is due when the answer has grown by 1/GROWTH, so
    that the size of all events together stays proportional to the answer."""

    ids: list[int] = field(default_factory=list)
    columns: list[LogprobColumns] = field(default_factory=list)
    num_sent: int = 0

    def extend(self, ids: list[int], columns: list[LogprobColumns]) -> tuple[list[int], list[LogprobColumns]]:
        """Append tokens, and return all tokens and columns so far."""
        self.ids += ids
        self.columns += columns
        return self.ids, self.columns

    def is_due(self) -> bool:
        """Whether the next event is due. If so, also record that it is sent."""
        if len(self.ids) - self.num_sent < max(1, self.num_sent // GROWTH):
            return False
        self.num_sent = len(self.ids)
        return True


class TokenStream(ServerSentEvents):
    """A StreamFormat: events with the token ids of one choice."""

    def __init__(self, options: ResponseOptions, requests: Sequence[InFlightRequest], names: Names) -> None:
        self._options, self._requests, self._names = options, requests, names
        self._is_cumulative = options.parameters.get("output_kind") == "cumulative"
        self._so_far: dict[int, SoFar] = {}  # of cumulative choices
        self._num_tokens = 0

    def opening(self) -> bytes:
        return self._event([], {"warnings": self._options.warnings}) if self._options.warnings else b""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        ordered = sorted((delta for delta in deltas if delta.best is None), key=attrgetter("choice"))
        groups = groupby(ordered, key=attrgetter("choice"))
        return b"".join([self._choice(choice, list(group)) for choice, group in groups])

    def closing(self) -> bytes:
        last = extras(self._options, self._requests, self._names)
        last.pop("warnings", None)
        if self._options.include_usage:
            last["usage"] = self._usage()
        return (self._event([], last) if last else b"") + DONE

    def _choice(self, choice: int, deltas: list[Delta]) -> bytes:
        last = deltas[-1]
        ids = [token for delta in deltas for token in delta.token_ids]
        columns = [delta.logprobs for delta in deltas if delta.logprobs]
        self._num_tokens += len(ids)
        if self._is_cumulative:
            so_far = self._so_far.setdefault(choice, SoFar())
            ids, columns = so_far.extend(ids, columns)
            if last.finish_reason is None and not so_far.is_due():
                return b""
        members = {
            "index": choice,
            "token_ids": ids,
            "logprobs": msgspec.Raw(chat_logprobs(columns)) if self._options.wants_logprobs else None,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        return self._event([members], {"usage": self._usage()} if self._options.continuous_usage else {})

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        return b"data: " + _encode({"request_id": self._options.response_id, "choices": choices, **more}) + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        return usage_json(count_usage(self._options, self._requests, self._num_tokens, 0))


_LOGPROB = {"token": TEXT, "logprob": NUMBER}
_SCHEMAS: dict[str, Schema] = {
    "GeneratedTokens": record(
        {
            "index": WHOLE,
            "token_ids": IDS,
            "logprobs": or_null(
                record(
                    {
                        "content": many(record({**_LOGPROB, "top_logprobs": many(record(_LOGPROB))})),
                        "refusal": {"type": "null"},
                    }
                )
            ),
            "finish_reason": or_null(TEXT),
            "stop_reason": {},
        }
    ),
    "GenerateAnswer": record(
        {
            "request_id": TEXT,
            "model": TEXT,
            "created": WHOLE,
            "choices": many(ref("GeneratedTokens")),
            "usage": {"type": "object"},
            "prompt_logprobs": or_null({"type": "array"}),
        },
        {"warnings": many(TEXT), "quire": {"type": "object"}},
    ),
    "GenerateChunk": record(
        {"request_id": TEXT, "choices": many(ref("GeneratedTokens"))},
        {"usage": {"type": "object"}, "warnings": many(TEXT), "quire": {"type": "object"}},
    ),
}
GENERATE = GenerationEndpoint(
    name="generate",
    paths=("/v1/generate", "/inference/v1/generate"),
    summary="Token ids in, token ids out",
    fields=_FIELDS,
    response="GenerateAnswer",
    event="GenerateChunk",
    schemas=_SCHEMAS,
    description=_DESCRIPTION,
    generation=GenerationSettings(
        id_prefix="generate",
        prompt_field="token_ids",
        make_format=TokenFormat,
        translate=translate,
        own_names={"prompt": "token_ids", **{name: f"sampling_params.{name}" for name in SAMPLING_MEMBERS}},
    ),
)
