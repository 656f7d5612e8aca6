"""The API of Hugging Face's Text Generation Inference, which `InferenceClient.text_generation` calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quire.serving.http.endpoint import Endpoint, PlainEndpoint
from quire.serving.http.endpoints import tei
from quire.serving.http.endpoints.sglang import Refused
from quire.serving.http.endpoints.tgi_format import SCHEMAS, TgiFormat, write_error
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.fields import (
    CANDIDATES,
    EXTRA_SAMPLING,
    LENGTH,
    MODEL,
    NAMES,
    SAMPLING,
    TRUNCATION,
    Field,
    not_supported,
)
from quire.serving.http.generation.handler import GenerationEndpoint
from quire.serving.http.generation.settings import GenerationSettings, Parameters
from quire.serving.http.request_head import RequestHead
from quire.serving.http.schemas import Schema
from quire.serving.http.service import Service
from quire.serving.http.validators.prompts import Prompts
from quire.serving.http.validators.values import (
    AnswerLength,
    Bounds,
    Flag,
    Only,
    Options,
    Text,
    Validator,
    Whole,
    present,
    shown,
)
from quire.serving.requests import Prompt
from quire.serving.text.structure_fields import structure_of_guided
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest

DEFAULT_MAX_NEW_TOKENS = 100
_GRAMMARS = {"json": "json_schema", "json_schema": "json_schema", "regex": "regex"}


@dataclass(frozen=True, slots=True)
class PromptText:
    """One text."""

    def check(self, where: str, value: Any, limits: Bounds) -> list[Prompt]:
        if not isinstance(value, str):
            raise InvalidRequest(where, f"must be a text, got {shown(value)}", "send one request for each prompt")
        return Prompts().check(where, value, limits)

    def schema(self, limits: Bounds) -> Schema:
        return Text("prompt_characters", 1).schema(limits)


@dataclass(frozen=True, slots=True)
class Grammar:
    """`{"type": ..., "value": ...}`. The value of type json is a schema, of type json_schema an object with a schema,
    of type regex a text."""

    def check(self, where: str, value: Any, limits: Bounds) -> StructuredOutputsParams | None:  # noqa: ARG002
        given = present(value) if isinstance(value, dict) else {}
        if given.keys() != {"type", "value"} or given["type"] not in _GRAMMARS:
            fix = f'send {{"type": ..., "value": ...}} with one of the types {", ".join(_GRAMMARS)}'
            raise InvalidRequest(where, "is not a grammar", fix)
        rule, what = given["value"], where + ".value"
        if given["type"] == "json_schema":
            if not isinstance(rule, dict) or not isinstance(rule.get("schema"), dict):
                raise InvalidRequest(what, "must be an object with a schema", "or send the schema with the type json")
            rule, what = rule["schema"], what + ".schema"
        try:
            return structure_of_guided({_GRAMMARS[given["type"]]: rule})
        except InvalidRequest as error:
            raise type(error)(what, error.reason, error.fix) from None

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        members = {"type": {"enum": list(_GRAMMARS)}, "value": {"type": ["object", "string"]}}
        return {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}


_KNOWN = {field.name: field.validator for field in (*LENGTH, *SAMPLING, *CANDIDATES, *EXTRA_SAMPLING, *TRUNCATION)}
_SAMPLING_NAMES = (
    "temperature", "top_p", "top_k", "typical_p", "repetition_penalty", "frequency_penalty", "seed", "best_of", "stop",
)  # fmt: skip
_RENAMED = {  # members of `parameters`, and their names at other endpoints
    "max_new_tokens": "max_tokens",
    "truncate": "truncate_prompt_tokens",
    "return_full_text": "echo",
    "grammar": "structured_outputs",
    "adapter_id": "model",
    "top_n_tokens": "logprobs",
}
_MEMBERS: dict[str, Validator] = {
    "max_new_tokens": AnswerLength(1),
    **{name: _KNOWN[name] for name in _SAMPLING_NAMES},
    "do_sample": Flag(),
    "grammar": Grammar(),
    "truncate": Whole(1, "prompt_tokens"),
    "return_full_text": Flag(),
    "details": Flag(),
    "top_n_tokens": Whole(0, "logprobs"),
    "adapter_id": Text("label"),
    "decoder_input_details": Only((False,), "is not supported: ask /v1/completions for prompt_logprobs"),
    "watermark": Refused("is not supported", (False,)),
}
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "typical_p": 1.0}
_FIELDS = (
    MODEL,
    Field("inputs", PromptText(), "The prompt.", is_required=True),
    Field("parameters", Options(_MEMBERS),
          "`max_new_tokens` (100), `do_sample` (without it, and without `temperature`, `top_p`, `top_k` and "
          "`typical_p`, the answer is greedy), `repetition_penalty`, `frequency_penalty`, `seed`, `best_of`, `stop` "
          "(the text keeps it), `grammar` (types `json`, `json_schema`, `regex`), `truncate`, `return_full_text`, "
          "`adapter_id`, `details`, `top_n_tokens` (needs `details` or a stream)."),
    *(field for field in NAMES if field.name == "cache_salt"),
    not_supported("text", "SGLang's name of `inputs`.", why="belongs to SGLang's /generate; here it is inputs"),
)  # fmt: skip
_STREAM = Field("stream", Flag(), "Answer as server-sent events.", False)
_DESCRIPTION = """\
Text Generation Inference's API, as Hugging Face's `InferenceClient.text_generation` calls it. The answer is a list of
one object with `generated_text`, and `details` if they were asked for. An error is `{"error": text, "error_type":
kind}`. A server whose model embeds or classifies takes the bodies of `/embed`, `/similarity`, `/predict` and `/rerank`
at this path instead."""


def translate(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
    """Move the members of `parameters` to the top level, and translate names to those of other endpoints."""
    members = given.pop("parameters", {})
    samples = members.pop("do_sample", False) or any(members.get(name, off) != off for name, off in _NEUTRAL.items())
    needs_details = members.pop("details", False) or given.get("stream", False)
    if members.get("top_n_tokens") and not needs_details:
        raise InvalidRequest("parameters.top_n_tokens", "needs details=true", "set details or leave it out")
    found: Parameters = {**given, **{_RENAMED.get(name, name): value for name, value in members.items()}}
    found["prompt"] = found.pop("inputs")
    if not samples:
        found["temperature"] = 0.0
    if needs_details:
        found.setdefault("logprobs", 0)
    else:
        found.pop("logprobs", None)
    if found.get("stop"):
        found["include_stop_str_in_output"] = True
    return found


def translate_stream(service: Service, given: Parameters, head: RequestHead) -> Parameters:
    return translate(service, {**given, "stream": True}, head)


def info(service: Service) -> Handler:
    async def handle(exchange: Exchange) -> None:
        engine = service.engine()
        if engine.pooling is not None:
            await exchange.reply_json(tei.info(service, engine.pooling))
            return
        members = {"max_input_tokens": engine.max_model_len - 1, "max_total_tokens": engine.max_model_len}
        members |= {"max_best_of": service.limits["n"], "max_stop_sequences": service.limits["stop_strings"]}
        names = {"model_id": service.names[0], "model_sha": None, "router": "quire", "version": service.version}
        await exchange.reply_json({**names, **members, "max_client_batch_size": 1})

    return handle


_GENERATION = GenerationSettings(
    id_prefix="generate",
    prompt_field="inputs",
    make_format=TgiFormat,
    translate=translate,
    own_names={
        **{name: f"parameters.{name}" for name in _MEMBERS},
        **{theirs: f"parameters.{own}" for own, theirs in _RENAMED.items() if own != "adapter_id"},
        "structured_outputs": "parameters.grammar",
        "prompt": "inputs",
    },
    default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
    adds_special_tokens=True,
    echoes_prompt=True,
)
TGI: tuple[Endpoint, ...] = (
    tei.RootEndpoint(
        name="tgi_generate",
        paths=("/",),
        summary="Text Generation Inference's generate",
        fields=(*_FIELDS, _STREAM),
        response="TgiAnswer",
        event="TgiEvent",
        error="TgiError",
        ends_with_done=False,
        schemas=SCHEMAS,
        write_error=write_error,
        description=_DESCRIPTION,
        generation=_GENERATION,
    ),
    GenerationEndpoint(
        name="tgi_generate_stream",
        paths=("/generate_stream",),
        summary="Text Generation Inference's generate, always as a stream",
        fields=_FIELDS,
        event="TgiEvent",
        error="TgiError",
        ends_with_done=False,
        write_error=write_error,
        generation=replace(_GENERATION, translate=translate_stream),
    ),
    PlainEndpoint(
        name="tgi_info",
        paths=("/info",),
        summary="Hugging Face's page about the model and the server",
        method="GET",
        response="TgiInfo",
        handler=info,
    ),
)
