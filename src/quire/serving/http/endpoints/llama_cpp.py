"""The endpoints of llama.cpp's server that clients use: completion, infill, templates, properties and slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.serving.http.endpoint import Endpoint, PlainEndpoint
from quire.serving.http.endpoints.completions import with_infill_stops
from quire.serving.http.endpoints.llama_cpp_format import LlamaFormat
from quire.serving.http.endpoints.tokenize import TextEndpoint
from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.fields import (
    FOREIGN_SAMPLING,
    MODEL,
    SAMPLING,
    TEMPLATE,
    TOOLS,
    Field,
    no_effect,
    not_supported,
)
from quire.serving.http.generation.conversation import render_messages
from quire.serving.http.generation.handler import GenerationEndpoint
from quire.serving.http.generation.settings import GenerationSettings, Parameters
from quire.serving.http.request_head import RequestHead
from quire.serving.http.schemas import FLAG, IDS, TEXT, WHOLE, Schema, many, record
from quire.serving.http.service import Service
from quire.serving.http.validators.prompts import Messages, Prompts
from quire.serving.http.validators.values import MAX_TOKEN_ID, Bounds, Flag, Number, Text, Texts, Whole, shown
from quire.serving.text.structure_fields import structure_of_guided
from quire.types.errors import EngineDead, InvalidRequest

MAX_FILES = 256


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A JSON schema that the answer must follow. Its content is validated later, with the grammar."""

    def check(self, where: str, value: Any, limits: Bounds) -> dict[str, Any]:  # noqa: ARG002
        if not isinstance(value, dict):
            raise InvalidRequest(where, "must be a JSON schema, an object")
        return value

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class ExtraFiles:
    """The other files of an infill request: objects with `filename` and `text`."""

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


@dataclass(frozen=True, slots=True)
class LlamaBias:
    """A list of [token, bias] pairs, or an object of them. A token is its id, or a text whose tokens all get the bias.
    A bias of false bans the token."""

    def check(self, where: str, value: Any, limits: Bounds) -> list[tuple[int | str, float]]:
        pairs = list(value.items()) if isinstance(value, dict) else value
        if not isinstance(pairs, list) or len(pairs) > limits["logit_bias"]:
            most = limits["logit_bias"]
            raise InvalidRequest(where, f"must be a list of at most {most} pairs", "send [[token, bias], ...]")
        found = []
        for place, pair in enumerate(pairs):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise InvalidRequest(f"{where}[{place}]", f"must be a pair, got {shown(pair)}", "send [token, bias]")
            token, bias = pair
            if isinstance(value, dict) and token.isascii() and token.isdigit() and len(token) <= 10:
                token = int(token)
            token = (
                Text("stop_characters", 1).check(f"{where}[{place}]", token, limits)
                if isinstance(token, str)
                else Whole(0, MAX_TOKEN_ID).check(f"{where}[{place}]", token, limits)
            )
            number = Number(-100.0, 100.0)
            found.append((token, -100.0 if bias is False else number.check(f"{where}[{place}]", bias, limits)))
        return found

    def schema(self, limits: Bounds) -> Schema:
        bias = {"anyOf": [Number(-100.0, 100.0).schema(limits), {"enum": [False]}]}
        text = Text("stop_characters", 1).schema(limits)
        token = {"anyOf": [Whole(0, MAX_TOKEN_ID).schema(limits), text]}
        items = {"anyOf": [*token["anyOf"], *bias["anyOf"]]}
        pair = {"type": "array", "prefixItems": [token, bias], "items": items, "minItems": 2, "maxItems": 2}
        by_name = {"type": "object", "propertyNames": text, "additionalProperties": bias}
        most = limits["logit_bias"]
        return {"anyOf": [{"type": "array", "items": pair, "maxItems": most}, {**by_name, "maxProperties": most}]}


_SHARED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
_MIROSTAT = ("mirostat_tau", "mirostat_eta")
_COMMON = (
    MODEL,
    Field("n_predict", Whole(-1, "max_tokens"),
          "At most this many new tokens; -1: as many as fit; 0: only compute and cache the prompt.", -1),
    *(field for field in SAMPLING if field.name in _SHARED),
    Field("repeat_penalty", Number(0.01, 100.0), "Positive logits of tokens in prompt and answer are divided by it, "
          "negative ones multiplied; 1 is off.", 1.0),
    Field("stop", Texts("stop_strings", "stop_characters"), "The answer ends before the first of these texts."),
    Field("ignore_eos", Flag(), "Continue after the model's end-of-text token.", False),
    Field("stream", Flag(), "Answer as server-sent events.", False),
    Field("return_tokens", Flag(), "Return the token ids of the answer.", False),
    Field("grammar", Text("prompt_characters", 1), "A grammar (GBNF or Lark) that the answer must follow."),
    Field("json_schema", JsonSchema(), "A JSON schema that the answer must follow."),
    Field("n_probs", Whole(0, "logprobs"), "Return the log-probabilities of this many most probable tokens at each "
          "position.", 0),
    Field("logit_bias", LlamaBias(),
          "Added to the logits of these tokens: `[[id or text, number], ...]`, or an object of these; false is -100."),
    Field("response_fields", Texts("prompts", "label"), "Return only these members; `a/b` is member `b` of `a`."),
    not_supported("post_sampling_probs", "Probabilities after sampling.", False),
    *FOREIGN_SAMPLING,
    not_supported("lora", "LoRA adapters.", [], why="is not supported: model names the adapter"),
    not_supported("n_cmpl", "Several answers.", 1, why="is not supported: send the prompt several times in a list"),
    not_supported("n_indent", "The least indentation.", 0),
    not_supported("t_max_predict_ms", "A limit of time.", 0, -1, why="is not supported: send X-Request-Timeout"),
    no_effect("samplers", "The order of samplers.", why="has no effect: their order is fixed"),
    no_effect("min_keep", "The fewest tokens that filters keep.", 0, 1, why="has no effect: they keep at least one"),
    no_effect("repeat_last_n", "How many tokens penalties look at.", -1, why="has no effect: they look at all tokens"),
    *(no_effect(name, "Mirostat's parameters.", why="has no effect without mirostat") for name in _MIROSTAT),
    *(no_effect(name, "Shifting the context.", 0, -1, why="has no effect: answers end when the context is full")
      for name in ("n_keep", "n_discard", "n_cache_reuse")),
    no_effect("id_slot", "The slot to use.", -1, why="has no effect: there are no fixed slots"),
    no_effect("cache_prompt", "Prompts are always cached.", True),
    no_effect("timings_per_token", "Timings.", False),
    no_effect("return_progress", "Progress of the prompt.", False),
)  # fmt: skip
_COMPLETION_FIELDS = (
    Field(
        "prompt",
        Prompts(),
        "Text, token ids, or a list of either; several prompts have a list of answers.",
        is_required=True,
    ),
    *_COMMON,
)
_INFILL_FIELDS = (
    Field("input_prefix", Text("prompt_characters"), "The text before the gap.", is_required=True),
    Field("input_suffix", Text("prompt_characters"), "The text after the gap.", is_required=True),
    Field("input_extra", ExtraFiles(), "Other files, which are put before the text as context."),
    Field(
        "prompt", Text("prompt_characters"), "The beginning of the text in the gap; it is appended to `input_prefix`."
    ),
    *_COMMON,
)
_RENAMED = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "n_probs": "logprobs"}


def translate_common(service: Service, given: Parameters) -> Parameters:
    """Translate llama.cpp's parameters to ours."""
    if "grammar" in given and "json_schema" in given:
        raise InvalidRequest("json_schema", "cannot be used together with grammar", "send one of them")
    if not given.get("n_probs"):
        given.pop("n_probs", None)
    if "logit_bias" in given:
        given["logit_bias"] = _token_biases(service, given["logit_bias"])
    found = {_RENAMED.get(name, name): value for name, value in given.items()}
    if found.get("max_tokens", -1) < 0:
        found.pop("max_tokens", None)
    if found.get("max_tokens") == 0:
        found["echo"] = True  # only compute and cache the prompt
    for name in ("grammar", "json_schema"):
        if name in found:
            found[name] = structure_of_guided({name: found[name]})
    return found


def _token_biases(service: Service, pairs: list[tuple[int | str, float]]) -> dict[int, float]:
    """Return the bias of each token id, after tokenizing texts. Raises InvalidRequest if there are too many tokens."""
    found: dict[int, float] = {}
    for token, bias in pairs:
        ids = service.texts.tokenizer.encode(token, False) if isinstance(token, str) else [token]
        found |= dict.fromkeys(ids, bias)
    if len(found) > service.limits["logit_bias"]:
        reason = f"names {len(found)} tokens, limit {service.limits['logit_bias']}"
        raise InvalidRequest("logit_bias", reason, "send fewer or shorter texts")
    return found


def translate_completion(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
    if given.get("stream") and len(given["prompt"]) > 1:
        raise InvalidRequest("prompt", "must be one prompt if the answer is streamed", "set stream=false")
    return translate_common(service, given)


def translate_infill(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
    """Build the infill prompt from the prefix and the suffix."""
    prefix = given.pop("input_prefix") + given.pop("prompt", "")
    suffix, files = given.pop("input_suffix"), given.pop("input_extra", [])
    prompt = service.texts.infill_prompt("input_suffix", prefix, suffix, files)
    return with_infill_stops(service, {**translate_common(service, given), "prompt": [prompt]})


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
                "model_path": service.names[0],  # clients show it; the path itself is not disclosed
                "chat_template": texts.template_source or "",
                "bos_token": "" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
                "eos_token": eos,
                "modalities": {"vision": False, "audio": False},
                "build_info": f"quire-{service.version}",
            }
        )

    return handle


def slots(service: Service) -> Handler:
    """Return the handler of /slots. A slot stands for one of the sequences that the engine can run; its content is not
    shown."""

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
    "LlamaAnswer": {"anyOf": [record({}, _TEXT_END, is_open=True), many(record({}, _TEXT_END, is_open=True))]},
    "LlamaPrompt": record({"prompt": TEXT}, {"warnings": many(TEXT)}),
    "LlamaProps": record({"total_slots": WHOLE, "chat_template": TEXT}, is_open=True),
    "LlamaSlots": many(record({"id": WHOLE, "n_ctx": WHOLE, "is_processing": FLAG})),
}
_OWN_NAMES = {own: name for name, own in _RENAMED.items()}
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
        summary="Render a conversation with the chat template",
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
