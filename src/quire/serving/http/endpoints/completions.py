"""OpenAI's completions: continue prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest, RenderLogprobs
from quire.serving.dispatch.mailbox import Delta
from quire.serving.http.endpoints.openai_format import (
    Names,
    OpenAIStream,
    choice_end,
    extras,
    head,
    prompt_members,
    usage_json,
)
from quire.serving.http.endpoints.openai_logprobs import completion_logprobs, echoed_columns, render_completion
from quire.serving.http.endpoints.openai_schemas import COMPLETION_SCHEMAS
from quire.serving.http.fields import (
    ADD_SPECIAL_TOKENS,
    GENERATION,
    MODEL,
    NAMES,
    NO_REASONING,
    NOT_SUPPORTED,
    PROMPT_LOGPROBS,
    TRUNCATION,
    Field,
    not_supported,
)
from quire.serving.http.generation.handler import GenerationEndpoint
from quire.serving.http.generation.results import ChoiceResult, LogprobColumns, ResultReader, usage_of
from quire.serving.http.generation.settings import GenerationSettings, Parameters, ResponseOptions
from quire.serving.http.request_head import RequestHead
from quire.serving.http.service import Service
from quire.serving.http.validators.prompts import Prompts
from quire.serving.http.validators.values import AnswerLength, Flag, LogprobCount, Text
from quire.serving.text.detokenizer import Detokenizer
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest

_encode = msgspec.json.encode
DEFAULT_MAX_TOKENS = 16

TEXT_FIELDS = (
    Field("max_tokens", AnswerLength(0),
          "At most this many new tokens; 0 only with `echo`; -1: as many as fit.", DEFAULT_MAX_TOKENS),
    Field("logprobs", LogprobCount(),
          "Return the log-probability of each token and of this many most probable ones at its position; -1: of the "
          "whole vocabulary."),
)  # fmt: skip
_FIELDS = (
    MODEL,
    Field("prompt", Prompts(), "Text, token ids, or a list of either.", is_required=True),
    ADD_SPECIAL_TOKENS,
    *TRUNCATION,
    *TEXT_FIELDS,
    *PROMPT_LOGPROBS,
    Field("suffix", Text("prompt_characters"),
          "Text after the answer: the model fills in what is between `prompt` and this. Needs a model that was trained "
          "to fill in the middle, such as qwen2.5-coder."),
    Field("echo", Flag(), "Put the prompt before the answer, with its logprobs if `logprobs` is given.", False),
    *GENERATION,
    *NAMES,
    NO_REASONING,
    *NOT_SUPPORTED,
    not_supported("prompt_embeds", "Prompts as vectors."),
)  # fmt: skip


def translate(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
    """If there is a suffix, turn each prompt into an infill prompt."""
    suffix = given.pop("suffix", "")
    if not suffix:
        return given
    if given.get("echo"):
        raise InvalidRequest("echo", "cannot be used together with suffix", "leave one out")
    if any(prompt.text is None for prompt in given["prompt"]):
        raise InvalidRequest("prompt", "must be text if there is a suffix", "send text")
    prompts = [service.texts.infill_prompt("suffix", prompt.text, suffix) for prompt in given["prompt"]]
    return with_infill_stops(service, {**given, "prompt": prompts})


def with_infill_stops(service: Service, given: Parameters) -> Parameters:
    """Add the token ids at which an infill answer ends, because the model continues with something else."""
    assert service.texts.infill is not None
    stops = [*given.get("stop_token_ids", ()), *service.texts.infill.stop_ids]
    return {**given, "stop_token_ids": list(dict.fromkeys(stops))}


class CompletionFormat:
    """A ResponseFormat: texts."""

    def __init__(self, service: Service) -> None:
        self._tokenizer = tokenizer = service.texts.tokenizer
        self._reader, self._names = ResultReader(tokenizer), Names(tokenizer)

    def logprobs_renderer(self, options: ResponseOptions) -> RenderLogprobs:
        return render_completion(self._names.of(options))

    def body(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> bytes:
        render = self.logprobs_renderer(options) if options.wants_logprobs else None
        results = self._reader.results(options, requests, render)
        body = head(options, "text_completion")
        pairs = zip(requests, options.prefaces, strict=True)
        prompts = {request.first_choice: self._prompt(options, request, preface) for request, preface in pairs}
        body["choices"] = [_choice(options, result, prompts[result.request.first_choice]) for result in results]
        body["usage"] = usage_json(usage_of(options, results, requests))
        return _encode(body | extras(options, requests, self._names))

    def stream(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> CompletionStream:
        return CompletionStream(options, requests, self._names, "text_completion")

    def _prompt(self, options: ResponseOptions, request: InFlightRequest, preface: str) -> _Prompt:
        members, columns = prompt_members(options, request, self._names), []
        if options.wants_logprobs and options.echoes_prompt:
            table = None if request.finished is None else request.finished.prompt_logprobs
            token_ids = request.submit.prompt_token_ids
            offsets = text_offsets(self._tokenizer, token_ids, preface)
            num_top = options.parameters.get("logprobs", 0)
            columns.append(echoed_columns(table, token_ids, offsets, self._names.of(options), num_top))
        return _Prompt(members, columns)


class _Prompt(NamedTuple):
    """The members that all choices of one prompt share. They are rendered once, because they may be large."""

    members: dict[str, Any]
    columns: list[LogprobColumns]  # the logprobs of an echoed prompt; empty if not asked for


def _choice(options: ResponseOptions, result: ChoiceResult, prompt: _Prompt) -> dict[str, Any]:
    logprobs = completion_logprobs([*prompt.columns, *result.logprobs]) if options.wants_logprobs else None
    choice = {"index": result.index, "text": result.preface + result.content}
    return choice | choice_end(options, result, logprobs) | prompt.members


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Return the character offset in `text` at which each token begins. Tokens that `text` does not show, such as a BOS
    token that the tokenizer added, have zero width."""
    detokenizer, offset = Detokenizer(tokenizer, False), 0
    num_added = _num_added(tokenizer, token_ids, text)
    offsets = [0] * num_added
    for token in token_ids[num_added:]:
        offsets.append(offset)
        piece = detokenizer.push((token,))
        if text.startswith(piece, offset):
            offset += len(piece)
        elif text.startswith(piece.removeprefix(" "), offset):  # some tokenizers put a space before a text
            offset += len(piece) - 1
        elif token not in tokenizer.special_ids:
            offset = min(offset + len(piece), len(text))
    return offsets


def _num_added(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> int:
    """Return how many BOS tokens at the start of the prompt do not appear in its text, because the tokenizer added
    them."""
    if tokenizer.bos_id is None:
        return 0
    begin = tokenizer.token_text(tokenizer.bos_id)
    num_tokens = next((place for place, token in enumerate(token_ids) if token != tokenizer.bos_id), len(token_ids))
    shown = (count for count in range(num_tokens) if not text.startswith(begin, count * len(begin)))
    return num_tokens - next(shown, num_tokens)


class CompletionStream(OpenAIStream):
    """A StreamFormat: chunks whose choices have a `text`."""

    def _opens(self, preface: str) -> bool:
        return bool(preface) or self._options.return_token_ids

    def _first_delta(self, preface: str) -> dict[str, Any]:
        return {"text": preface}

    def _opening_members(self, request: InFlightRequest, choice: dict[str, Any], more: dict[str, Any]) -> None:  # noqa: ARG002
        choice["prompt_token_ids"] = request.submit.prompt_token_ids.tolist()

    def _delta(self, choice: int, text: str, deltas: list[Delta]) -> bytes | None:  # noqa: ARG002
        return b'"text":' + _encode(text) if text else None

    def _empty_delta(self) -> bytes:
        return b'"text":""'

    def _logprobs(self, columns: list[tuple[bytes, ...]]) -> bytes:
        return completion_logprobs(columns)


COMPLETIONS = GenerationEndpoint(
    name="completions",
    paths=("/v1/completions",),
    summary="Continue prompts",
    fields=_FIELDS,
    response="CompletionAnswer",
    event="CompletionChunk",
    schemas=COMPLETION_SCHEMAS,
    generation=GenerationSettings(
        id_prefix="cmpl",
        prompt_field="prompt",
        make_format=CompletionFormat,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        adds_special_tokens=True,
        echoes_prompt=True,
        translate=translate,
    ),
)
