"""SGLang's native endpoint for text and token ids, and the pages that describe the model and the server to its
clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.serving.http.endpoint import Endpoint, PlainEndpoint
from quire.serving.http.endpoints.sglang_format import SglangFormat
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.fields import LABELS, LENGTH, MODEL, OUTPUT, SAMPLING, Field, no_effect, not_supported
from quire.serving.http.generation.handler import GenerationEndpoint
from quire.serving.http.generation.settings import GenerationSettings, Parameters
from quire.serving.http.request_head import RequestHead
from quire.serving.http.schemas import FLAG, IDS, NUMBER, TEXT, WHOLE, Schema, many, or_null, record
from quire.serving.http.service import Service
from quire.serving.http.validators.prompts import Prompts
from quire.serving.http.validators.structure import Guided
from quire.serving.http.validators.values import (
    AnswerLength,
    Bounds,
    Flag,
    Identifier,
    Options,
    Text,
    TokenIds,
    UnsupportedParameter,
    Validator,
    Whole,
)
from quire.serving.requests import Prompt
from quire.types.errors import InvalidRequest

DEFAULT_MAX_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Refused:
    """A member that would change the answer and is not supported. The harmless values are accepted."""

    why: str
    harmless: tuple[Any, ...] = ("", [], {})

    def check(self, where: str, value: Any, limits: Bounds) -> None:  # noqa: ARG002
        if value in self.harmless:
            return
        raise UnsupportedParameter(where, self.why, "leave it out")

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return {"enum": [None, *self.harmless]}


class Batch(NamedTuple):
    """The prompts of a request. `is_list`: they were sent as a list, so the response is a list."""

    prompts: list[Prompt]
    is_list: bool


@dataclass(frozen=True, slots=True)
class PromptTexts:
    """A text or a list of texts."""

    def check(self, where: str, value: Any, limits: Bounds) -> Batch:
        if isinstance(value, list) and not (value and all(isinstance(item, str) for item in value)):
            raise InvalidRequest(where, "must be a text or a list of texts", "send token ids as input_ids")
        return Batch(Prompts().check(where, value, limits), isinstance(value, list))

    def schema(self, limits: Bounds) -> Schema:
        text = Text("prompt_characters", 1).schema(limits)
        return {"anyOf": [text, _list_of(text, limits)]}


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A list of token ids, or a list of such lists."""

    def check(self, where: str, value: Any, limits: Bounds) -> Batch:
        if not isinstance(value, list) or any(isinstance(item, str) for item in value):
            raise InvalidRequest(where, "must be a list of token ids or of such lists", "send texts as text")
        return Batch(Prompts().check(where, value, limits), isinstance(value[0], list))

    def schema(self, limits: Bounds) -> Schema:
        ids = TokenIds("prompt_tokens", 1).schema(limits)
        return {"anyOf": [ids, _list_of(ids, limits)]}


def _list_of(items: Schema, limits: Bounds) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": limits["prompts"]}


_RENAMED = {  # members of sampling_params, and their names at other endpoints
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
_SAMPLING_NAMES = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias",
)  # fmt: skip
_KNOWN = {field.name: field.validator for field in (*LENGTH, *SAMPLING, *OUTPUT)}
_MEMBERS: dict[str, Validator] = {
    "max_new_tokens": AnswerLength(0),
    "min_new_tokens": _KNOWN["min_tokens"],
    **{name: _KNOWN[name] for name in (*_SAMPLING_NAMES, "stop", "stop_token_ids", "ignore_eos")},
    **{name: _KNOWN[name] for name in ("skip_special_tokens", "spaces_between_special_tokens", "stream_interval")},
    "no_stop_trim": _KNOWN["include_stop_str_in_output"],
    "sampling_seed": _KNOWN["seed"],
    **{name: Guided(name, or_empty=True) for name in ("json_schema", "regex", "ebnf", "structural_tag")},
    "stop_regex": Refused("is not supported yet"),
    "custom_params": Refused("is for plug-ins, which this server does not support"),
}
_LABEL = "is a label that nothing reads"
_FIELDS = (
    MODEL,
    Field("text", PromptTexts(), "The prompt, or a list of prompts, for which the response is a list."),
    Field("input_ids", PromptTokens(), "The prompt or prompts as token ids."),
    Field("sampling_params", Options(_MEMBERS),
          "One object for all prompts. `max_new_tokens` (128; 0: only the prompt's logprobs), `min_new_tokens`, "
          "`stop`, `stop_token_ids`, `no_stop_trim`, `ignore_eos`, `n`, `temperature`, `top_p`, `top_k`, `min_p`, "
          "penalties, `logit_bias`, `sampling_seed`, `json_schema` (text or object), `regex`, `ebnf`, "
          "`structural_tag`, `skip_special_tokens`, `spaces_between_special_tokens`, `stream_interval`."),
    Field("return_logprob", Flag(), "Return logprobs in `meta_info`, as `[logprob, token id, text]`.", False),
    Field("logprob_start_len", Whole(-1, "prompt_tokens"),
          "Also return the logprobs of the prompt tokens from this index on, null for the first of them; -1: of none. "
          "Not with `stream`.", -1),
    Field("top_logprobs_num", Whole(0, "logprobs"), "Also return the logprobs of this many most probable tokens at "
          "each position.", 0),
    Field("token_ids_logprob", TokenIds("logprob_token_ids", 1),
          "Also return the logprobs of these tokens at each position of the answer; not with `top_logprobs_num` or "
          "`logprob_start_len`."),
    Field("return_text_in_logprobs", Flag(), "Include the text of tokens in logprobs; otherwise it is null.", False),
    Field("stream", Flag(),
          "Answer as server-sent events. Each holds the whole answer so far, and is sent when it has grown by 1/16.",
          False),
    Field("rid", Identifier(), "Names the request in answers and logs."),
    Field("lora_path", Text("label"), "The name of a LoRA adapter; the same as `model`."),
    Field("cache_salt", Text("label", 1), "Cached prompts are shared only between requests with the same salt and API "
          "key."),
    *(field for field in LABELS if field.name in ("priority", "session_id")),
    no_effect("conversation_id", "The conversation of the request.", why=_LABEL),
    no_effect("log_metrics", "All requests are counted.", True),
    no_effect("no_logs", "Texts are never logged."),
    not_supported("inputs", "Text Generation Inference's name of `text`.",
                  why="belongs to Text Generation Inference, whose requests go to / or /generate_stream; here it is "
                  "text"),
    not_supported("token_ids", "vLLM's name of `input_ids`.", why="belongs to /v1/generate; here it is input_ids"),
    not_supported("input_embeds", "Embeddings instead of tokens."),
    *(not_supported(name, "Images and audio.") for name in ("image_data", "video_data", "audio_data")),
    not_supported("return_hidden_states", "Hidden states.", False),
    not_supported("custom_logit_processor", "Code for plug-ins.", why="would run code of the client"),
    not_supported("session_params", "Prompts that sessions continue.", why="is not supported: send the whole prompt"),
    not_supported("bootstrap_room", "Disaggregated prefill."),
)  # fmt: skip
_DESCRIPTION = """\
SGLang's own endpoint. The answer is an object with `text`, `output_ids` and `meta_info`; a list of them if the prompts
are a list or `n` is above 1."""


def translate(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
    """Move the members of `sampling_params` to the top level, and translate names to those of other endpoints."""
    texts, ids = given.pop("text", None), given.pop("input_ids", None)
    if (texts is None) == (ids is None):
        reason = "is missing" if texts is None else "cannot be used together with input_ids"
        raise InvalidRequest("text", reason, "send text or input_ids")
    batch: Batch = texts or ids
    prompt_field = "text" if ids is None else "input_ids"
    sampling = {_RENAMED.get(name, name): value for name, value in given.pop("sampling_params", {}).items()}
    found = {**_logprobs(given), **sampling, "prompt": batch.prompts, "is_list": batch.is_list}
    found["prompt_field"] = prompt_field
    adapter = found.pop("lora_path", None)
    if adapter and found.setdefault("model", adapter) != adapter:
        raise InvalidRequest("lora_path", "names another model than the field model", "send one of them")
    if "rid" in found:
        found["request_id"] = found["response_id"] = found.pop("rid")
    if found.get("max_tokens") == 0:
        found["echo"] = True  # only the prompt is computed
    return found


def _logprobs(given: Parameters) -> Parameters:
    """Translate the parameters of logprobs to those of other endpoints."""
    wanted, start = given.pop("return_logprob", False), given.pop("logprob_start_len", -1)
    num_top, others = given.pop("top_logprobs_num", 0), given.pop("token_ids_logprob", None)
    if not wanted:
        return given
    if others and (num_top or start >= 0):
        other = "top_logprobs_num" if num_top else "logprob_start_len"
        raise InvalidRequest("token_ids_logprob", f"cannot be used together with {other}", "send one of them")
    found = {**given, "logprobs": num_top, **({"logprob_token_ids": others} if others else {})}
    return found if start < 0 else {**found, "prompt_logprobs": num_top, "prompt_logprobs_start": start}


def model_info(service: Service) -> Handler:
    async def handle(exchange: Exchange) -> None:
        name = service.names[0]  # the path of the files is not disclosed
        members = {"model_path": name, "tokenizer_path": name, "is_generation": service.engine().pooling is None}
        await exchange.reply_json({**members, "preferred_sampling_params": service.texts.sampling_defaults.given()})

    return handle


def server_info(service: Service) -> Handler:
    async def handle(exchange: Exchange) -> None:
        engine, name = service.engine(), service.names[0]
        await exchange.reply_json(
            {
                "version": service.version,
                "model_path": name,
                "served_model_name": name,
                "context_length": engine.max_model_len,
                "max_running_requests": engine.max_num_seqs,
                "max_total_num_tokens": engine.num_blocks * engine.block_size,
                "page_size": engine.block_size,
            }
        )

    return handle


_META: dict[str, Schema] = {
    "id": TEXT,
    "finish_reason": or_null(record({"type": TEXT}, {"length": WHOLE, "matched": {}})),
    "prompt_tokens": WHOLE,
    "completion_tokens": WHOLE,
    "cached_tokens": WHOLE,
}
_ANSWER = record(
    {"text": TEXT, "output_ids": IDS, "meta_info": record(_META, {"e2e_latency": NUMBER}, is_open=True)},
    {"warnings": many(TEXT), "quire": {"type": "object"}, "index": WHOLE},
)
_SCHEMAS: dict[str, Schema] = {
    "SglangAnswer": {"anyOf": [_ANSWER, many(_ANSWER)]},
    "SglangChunk": _ANSWER,
    "SglangModel": record({"model_path": TEXT, "is_generation": FLAG}, is_open=True),
    "SglangServer": record({"version": TEXT, "max_total_num_tokens": WHOLE}, is_open=True),
}
_OWN_NAMES = {
    **{name: f"sampling_params.{name}" for name in _MEMBERS},
    **{theirs: f"sampling_params.{own}" for own, theirs in _RENAMED.items()},
    "structured_outputs": "sampling_params.json_schema",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
    "prompt_logprobs_start": "logprob_start_len",
    "logprob_token_ids": "token_ids_logprob",
    "request_id": "rid",
    "prompt": "text",
}
SGLANG: tuple[Endpoint, ...] = (
    GenerationEndpoint(
        name="sglang_generate",
        paths=("/generate",),
        summary="SGLang's generate",
        fields=_FIELDS,
        response="SglangAnswer",
        event="SglangChunk",
        schemas=_SCHEMAS,
        description=_DESCRIPTION,
        generation=GenerationSettings(
            id_prefix="generate",
            prompt_field="text",
            make_format=SglangFormat,
            translate=translate,
            own_names=_OWN_NAMES,
            default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
            adds_special_tokens=True,
        ),
    ),
    PlainEndpoint(
        name="sglang_model_info",
        paths=("/get_model_info", "/model_info"),
        summary="SGLang's page about the model",
        method="GET",
        response="SglangModel",
        handler=model_info,
    ),
    PlainEndpoint(
        name="sglang_server_info",
        paths=("/get_server_info", "/server_info"),
        summary="SGLang's page about the server",
        method="GET",
        response="SglangServer",
        handler=server_info,
    ),
)
