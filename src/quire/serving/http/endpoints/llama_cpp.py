"""The endpoints of llama.cpp's server that its clients call: completion, infill, templates, properties and slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest, RenderLogprobs
from quire.serving.dispatch.mailbox import Delta
from quire.serving.http.endpoint import Endpoint, PlainEndpoint
from quire.serving.http.endpoints.completions import with_infill_stops
from quire.serving.http.endpoints.tokenize import TextEndpoint
from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.fields import MODEL, SAMPLING, TEMPLATE, TOOLS, Field, no_effect
from quire.serving.http.generation.conversation import render_messages
from quire.serving.http.generation.handler import GenerationEndpoint
from quire.serving.http.generation.results import ResultReader
from quire.serving.http.generation.settings import GenerationSettings, Parameters, ResponseOptions
from quire.serving.http.request_head import RequestHead
from quire.serving.http.schemas import FLAG, IDS, TEXT, WHOLE, Schema, many, record
from quire.serving.http.service import Service
from quire.serving.http.validators.prompts import Messages, Prompts
from quire.serving.http.validators.values import Bounds, Flag, Number, Text, Texts, Whole
from quire.types.errors import EngineDead, InvalidRequest

_encode = msgspec.json.encode
MAX_FILES = 256
_STOP_TYPES = {"stop": "eos", "length": "limit"}


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A JSON schema that the answer follows. It is read and checked with the grammar."""

    def check(self, where: str, value: Any, limits: Bounds) -> dict[str, Any]:  # noqa: ARG002
        if not isinstance(value, dict):
            raise InvalidRequest(where, "must be a JSON schema, an object")
        return value

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class ExtraFiles:
    """Other files for an infill request: objects with `filename` and `text`."""

    def check(self, where: str, value: Any, limits: Bounds) -> list[tuple[str, str]]:
        if not isinstance(value, list) or len(value) > MAX_FILES:
            raise InvalidRequest(where, f"must be a list of at most {MAX_FILES} files")
        text = Text("prompt_characters")
        found = []
        for place, file in enumerate(value):
            if not isinstance(file, dict) or set(file) != {"filename", "text"}:
                raise InvalidRequest(f"{where}[{place}]", "must be an object with filename and text")
            found.append(tuple(text.check(f"{where}[{place}].{name}", file[name], limits) for name in sorted(file)))
        return [(name, content) for name, content in found]

    def schema(self, limits: Bounds) -> Schema:
        text = Text("prompt_characters").schema(limits)
        file = {
            "type": "object",
            "properties": {"filename": text, "text": text},
            "required": ["filename", "text"],
            "additionalProperties": False,
        }
        return {"type": "array", "items": file, "maxItems": MAX_FILES}


_SHARED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
_COMMON = (
    MODEL,
    Field("n_predict", Whole(-1, "max_tokens"), "At most this many new tokens; -1: as many as fit.", -1),
    *(field for field in SAMPLING if field.name in _SHARED),
    Field("repeat_penalty", Number(0.01, 100.0), "Divides the logits of tokens in prompt and answer; 1 is off.", 1.0),
    Field("stop", Texts("stop_strings", "stop_characters"), "The answer ends before the first of these."),
    Field("ignore_eos", Flag(), "Go on after the end of text.", False),
    Field("stream", Flag(), "Answer as server-sent events.", False),
    Field("return_tokens", Flag(), "Return the token ids of the answer.", False),
    Field("grammar", Text("prompt_characters", 1), "A grammar (GBNF or Lark) that the answer follows."),
    Field("json_schema", JsonSchema(), "A JSON schema that the answer follows."),
    no_effect("cache_prompt", "Prompts are always cached.", True),
    no_effect("timings_per_token", "Timings.", False),
)  # fmt: skip
_COMPLETION_FIELDS = (
    Field("prompt", Prompts(lone=True), "Text or token ids.", is_required=True),
    *_COMMON,
)
_INFILL_FIELDS = (
    Field("input_prefix", Text("prompt_characters"), "The text before the gap.", is_required=True),
    Field("input_suffix", Text("prompt_characters"), "The text after the gap.", is_required=True),
    Field("input_extra", ExtraFiles(), "Other files that the model may learn from."),
    Field("prompt", Text("prompt_characters"), "What is known of the gap's beginning; goes after `input_prefix`."),
    *_COMMON,
)
_RENAMED = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}


def translate_common(given: Parameters) -> Parameters:
    """Rename llama.cpp's parameters."""
    if "grammar" in given and "json_schema" in given:
        raise InvalidRequest("json_schema", "cannot be used together with grammar", "send one of them")
    structure = {"grammar": given.pop("grammar", None), "json": given.pop("json_schema", None)}
    found = {_RENAMED.get(name, name): value for name, value in given.items()}
    if found.get("max_tokens", -1) < 0:
        found.pop("max_tokens", None)
    if any(value is not None for value in structure.values()):
        found["structured_outputs"] = {name: value for name, value in structure.items() if value is not None}
    return found


def translate_completion(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
    return translate_common(given)


def translate_infill(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
    """Make the prompt of the two sides of the gap."""
    prefix = given.pop("input_prefix") + given.pop("prompt", "")
    suffix, files = given.pop("input_suffix"), given.pop("input_extra", [])
    prompt = service.texts.infill_prompt("input_suffix", prefix, suffix, files)
    return with_infill_stops(service, {**translate_common(given), "prompt": [prompt]})


class LlamaFormat:
    """A ResponseFormat: one text with counts."""

    def __init__(self, service: Service) -> None:
        self._reader = ResultReader(service.texts.tokenizer)

    def logprobs_renderer(self, options: ResponseOptions) -> RenderLogprobs:  # noqa: ARG002
        raise InvalidRequest("n_probs", "is not known here", "use /v1/completions")

    def body(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> bytes:
        (result,) = self._reader.results(options, requests, None)
        ids = result.token_ids if options.parameters.get("return_tokens") else ()
        told = {"content": result.content, "tokens": ids}
        return _encode(
            told | _end(options, requests[0], result.finish_reason, result.stop_reason, len(result.token_ids))
        )

    def stream(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> LlamaStream:
        return LlamaStream(options, requests)


class LlamaStream:
    """A StreamFormat: events with new text; the last says why it ended."""

    content_type = b"text/event-stream; charset=utf-8"

    def __init__(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> None:
        self._options, self._request = options, requests[0]
        self._num_tokens = 0
        self._ended: tuple[str | None, int | str | None] = (None, None)

    def opening(self) -> bytes:
        return b""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        text = "".join(delta.text for delta in deltas)
        ids = [token for delta in deltas for token in delta.token_ids]
        self._num_tokens += len(ids)
        if deltas and deltas[-1].finish_reason is not None:
            self._ended = deltas[-1].finish_reason, deltas[-1].stop_reason
        return _event({"content": text, "tokens": ids, **_begin(self._request, self._num_tokens)}) if text else b""

    def closing(self) -> bytes:
        told = {"content": "", "tokens": []}
        return _event(told | _end(self._options, self._request, *self._ended, self._num_tokens))

    @staticmethod
    def failure(error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    @staticmethod
    def ping(*, is_queued: bool) -> bytes:
        return b": queued\n\n" if is_queued else b": working\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _begin(request: InFlightRequest, num_tokens: int) -> dict[str, Any]:
    counts = {"tokens_predicted": num_tokens, "tokens_evaluated": len(request.submit.prompt_token_ids)}
    return {"index": 0, "id_slot": -1, "stop": False, **counts}


def _end(
    options: ResponseOptions,
    request: InFlightRequest,
    finish_reason: str | None,
    stop_reason: int | str | None,
    num_tokens: int,
) -> dict[str, Any]:
    """The members of a whole answer and of the last event."""
    finished, word = request.finished, stop_reason if isinstance(stop_reason, str) else ""
    told = {
        **_begin(request, num_tokens),
        "stop": True,
        "model": options.model,
        "tokens_cached": 0 if finished is None else finished.num_cached_tokens,
        "truncated": False,
        "stop_type": "word" if word else _STOP_TYPES.get(finish_reason or "", "none"),
        "stopping_word": word,
        "timings": {"prompt_n": len(request.submit.prompt_token_ids), "predicted_n": num_tokens},
    }
    return {**told, "warnings": options.warnings} if options.warnings else told


def apply_template(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": render_messages(service, given, given.get("tools", ()))}


def props(service: Service) -> Handler:
    async def handle(exchange: Exchange) -> None:
        engine, texts = service.engine(), service.texts
        tokenizer = texts.tokenizer
        eos = tokenizer.token_text(tokenizer.eos_ids[0]) if tokenizer.eos_ids else ""
        await exchange.reply_json(
            {
                "default_generation_settings": {
                    "n_ctx": engine.max_model_len,
                    "params": texts.sampling_defaults.given(),
                },
                "total_slots": engine.max_num_seqs,
                "model_alias": service.names[0],
                "chat_template": texts.template_source or "",
                "bos_token": "" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
                "eos_token": eos,
                "modalities": {"vision": False, "audio": False},
                "build_info": f"quire-{service.version}",
            }
        )

    return handle


def slots(service: Service) -> Handler:
    """A slot is one of the sequences that the engine can run. What others generate in theirs is not shown."""

    async def handle(exchange: Exchange) -> None:
        engine = service.engine()
        try:
            running = (await service.link.stats()).running
        except EngineDead:
            running = 0
        free = engine.max_num_seqs - running
        if exchange.query.get("fail_on_no_slot") and free <= 0:
            raise ApiError(503, "no slot is free", code="no_slot", headers=((b"retry-after", b"1"),))
        await exchange.reply_json(
            [
                {"id": place, "n_ctx": engine.max_model_len, "is_processing": place < running}
                for place in range(engine.max_num_seqs)
            ]
        )

    return handle


_TEXT_END: dict[str, Schema] = {
    "content": TEXT,
    "tokens": IDS,
    "index": WHOLE,
    "id_slot": {"type": "integer"},
    "stop": FLAG,
    "tokens_predicted": WHOLE,
    "tokens_evaluated": WHOLE,
}
_SCHEMAS: dict[str, Schema] = {
    "LlamaAnswer": record(_TEXT_END, is_open=True),
    "LlamaPrompt": record({"prompt": TEXT}, {"warnings": many(TEXT)}),
    "LlamaProps": record({"total_slots": WHOLE, "chat_template": TEXT}, is_open=True),
    "LlamaSlots": many(record({"id": WHOLE, "n_ctx": WHOLE, "is_processing": FLAG})),
}
_OWN_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "structured_outputs": "grammar"}
LLAMA_CPP: tuple[Endpoint, ...] = (
    GenerationEndpoint(
        name="llama_completion",
        paths=("/completion",),
        summary="llama.cpp's completion",
        fields=_COMPLETION_FIELDS,
        response="LlamaAnswer",
        schemas=_SCHEMAS,
        generation=GenerationSettings(
            id_prefix="completion",
            prompt_field="prompt",
            make_format=LlamaFormat,
            translate=translate_completion,
            own_names=_OWN_NAMES,
            adds_special_tokens=True,
        ),
    ),
    GenerationEndpoint(
        name="llama_infill",
        paths=("/infill",),
        summary="llama.cpp's infill: the text between a prefix and a suffix",
        fields=_INFILL_FIELDS,
        response="LlamaAnswer",
        schemas={},
        generation=GenerationSettings(
            id_prefix="infill",
            prompt_field="input_prefix",
            make_format=LlamaFormat,
            translate=translate_infill,
            own_names={**_OWN_NAMES, "prompt": "input_prefix"},
        ),
    ),
    TextEndpoint(
        name="llama_apply_template",
        paths=("/apply-template",),
        summary="The text that the chat template makes of a conversation",
        fields=(MODEL, Field("messages", Messages(), "The conversation.", is_required=True), *TEMPLATE, TOOLS),
        response="LlamaPrompt",
        schemas={},
        work=apply_template,
    ),
    PlainEndpoint(
        name="llama_props",
        paths=("/props",),
        summary="Properties of the model and the server",
        method="GET",
        response="LlamaProps",
        handler=props,
    ),
    PlainEndpoint(
        name="llama_slots",
        paths=("/slots",),
        summary="Which of the engine's sequences are in use",
        method="GET",
        response="LlamaSlots",
        handler=slots,
    ),
)
