"""The fields of Ollama's endpoints, and their translation to the parameters of OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.serving.http.endpoints.completions import with_infill_stops
from quire.serving.http.fields import MODEL, TOOLS, Field, not_supported
from quire.serving.http.generation.conversation import reasoning_switches, render_messages
from quire.serving.http.generation.settings import Parameters
from quire.serving.http.json_body import check_numbers
from quire.serving.http.request_head import RequestHead
from quire.serving.http.service import Service
from quire.serving.http.validators.values import (
    Bounds,
    Flag,
    Number,
    Options,
    Schema,
    Text,
    Texts,
    TokenIds,
    UnknownField,
    UnsupportedParameter,
    Validator,
    Whole,
    drop_unknown_fields,
    shown,
)
from quire.serving.requests import Prompt
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest, UnknownParameter
from quire.types.sampling import MAX_SEED

EFFORTS = ("low", "medium", "high", "max")
_MESSAGE = frozenset({"role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id", "name"})
_FORM = 'send {"role": ..., "content": ...}'


class NothingToGenerate(Exception):
    """The request has no prompt. Ollama's clients send such requests to load the model."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model


@dataclass(frozen=True, slots=True)
class Setting:
    """A number or a flag that has no effect here."""

    def check(self, where: str, value: Any, limits: Bounds) -> Any:  # noqa: ARG002
        if not isinstance(value, bool | int | float):
            raise InvalidRequest(where, f"must be a number, true or false, got {shown(value)}")
        return value

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return {"anyOf": [{"type": "number"}, {"type": "boolean"}]}


@dataclass(frozen=True, slots=True)
class Neutral:
    """An unsupported option that would change the answer. Only the value that turns it off is accepted."""

    value: float
    what: str

    def check(self, where: str, value: Any, limits: Bounds) -> None:  # noqa: ARG002
        if isinstance(value, bool) or value != self.value:
            raise UnsupportedParameter(where, f"{self.what} is not supported", f"leave it out or send {self.value:g}")

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return {"enum": [self.value]}


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Seconds, or a duration in Go's notation such as "5m"."""

    def check(self, where: str, value: Any, limits: Bounds) -> Any:
        if isinstance(value, str):
            return Text("label").check(where, value, limits)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(where, f'must be seconds or a duration such as "5m", got {shown(value)}')
        return value

    def schema(self, limits: Bounds) -> Schema:
        return {"anyOf": [{"type": "number"}, Text("label").schema(limits)]}


@dataclass(frozen=True, slots=True)
class Format:
    """The structure of the answer: "json" or a JSON schema. Returns None for any text."""

    def check(self, where: str, value: Any, limits: Bounds) -> StructuredOutputsParams | None:  # noqa: ARG002
        if value == "":
            return None
        if value == "json":
            return StructuredOutputsParams(json_object=True)
        if not isinstance(value, dict):
            raise InvalidRequest(where, f'must be "json" or a JSON schema, got {shown(value)}')
        return StructuredOutputsParams(json=value)

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return {"anyOf": [{"enum": ["json", ""]}, {"type": "object"}]}


@dataclass(frozen=True, slots=True)
class Think:
    """Whether the model reasons, or with which effort."""

    def check(self, where: str, value: Any, limits: Bounds) -> bool | str:  # noqa: ARG002
        if not isinstance(value, bool) and value not in EFFORTS:
            raise InvalidRequest(where, f"must be true, false or one of {', '.join(EFFORTS)}, got {shown(value)}")
        return value  # type: ignore[no-any-return]

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return {"enum": [True, False, *EFFORTS]}


@dataclass(frozen=True, slots=True)
class OllamaMessages:
    """A conversation, possibly empty. Images are refused. Returns the messages for chat templates."""

    def check(self, where: str, value: Any, limits: Bounds) -> list[dict[str, Any]]:
        if not isinstance(value, list):
            raise InvalidRequest(where, f"must be a list of messages, got {shown(value)}", _FORM)
        if len(value) > limits["messages"]:
            reason = f"has {len(value)} messages, limit {limits['messages']}"
            raise InvalidRequest(where, reason, "drop the oldest ones")
        for _, _, error in _unknown_fields(where, value):
            raise error
        return [_message(f"{where}[{place}]", message, limits) for place, message in enumerate(value)]

    def prune(self, where: str, value: Any, limits: Bounds) -> tuple[Any, list[InvalidRequest]]:  # noqa: ARG002
        return value, drop_unknown_fields(_unknown_fields(where, value)) if isinstance(value, list) else []

    def schema(self, limits: Bounds) -> Schema:
        label = {"type": ["string", "null"]}
        message = {
            "type": "object",
            "properties": {
                "role": {"type": "string", "minLength": 1},
                "content": label,
                "thinking": label,
                "images": {"type": ["array", "null"], "maxItems": 0},
                "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
                **dict.fromkeys(("tool_name", "tool_call_id", "name"), label),
            },
            "required": ["role"],
            "additionalProperties": {"type": "null"},
        }
        return {"type": "array", "items": message, "maxItems": limits["messages"]}


def _message(where: str, message: Any, limits: Bounds) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(where, f"must be an object, got {shown(message)}", _FORM)
    if message.get("images"):
        raise UnsupportedParameter(f"{where}.images", "is not supported: this API takes text only", "leave it out")
    made: dict[str, Any] = {"role": Text("label", 1).check(f"{where}.role", message.get("role"), limits)}
    content = message.get("content")
    made["content"] = "" if content is None else Text("prompt_characters").check(f"{where}.content", content, limits)
    if message.get("thinking") is not None:
        thinking = Text("prompt_characters").check(f"{where}.thinking", message["thinking"], limits)
        made["reasoning_content"] = thinking
    name = message.get("tool_name", message.get("name"))
    if name is not None:
        made["name"] = Text("label").check(f"{where}.tool_name", name, limits)
    if message.get("tool_call_id") is not None:
        made["tool_call_id"] = Text("label").check(f"{where}.tool_call_id", message["tool_call_id"], limits)
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls", f"must be a list, got {shown(calls)}")
    if calls:
        made["tool_calls"] = [_call(f"{where}.tool_calls[{place}]", call) for place, call in enumerate(calls)]
    return made


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(where, "must name a function", 'send {"function": {"name": ..., "arguments": {...}}}')
    arguments = function.get("arguments")
    if not isinstance(arguments, dict | str | None):
        raise InvalidRequest(f"{where}.function.arguments", f"must be an object, got {shown(arguments)}")
    check_numbers(f"{where}.function.arguments", arguments)
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}


def _unknown_fields(where: str, messages: list[Any]) -> Iterator[UnknownField]:
    for place, message in enumerate(messages):
        for name in [name for name in message if name not in _MESSAGE] if isinstance(message, dict) else ():
            if message[name] is not None:
                fix = f"known: {', '.join(sorted(_MESSAGE))}"
                yield message, name, UnknownParameter(f"{where}[{place}].{name[:80]}", "is not known", fix)


# ------------------------------------------------------------------------------------------------------------- fields
_RENAMED = {"repeat_penalty": "repetition_penalty"}  # options whose parameter has another name
_SAMPLING: dict[str, Validator] = {
    "temperature": Number(0.0, 100.0),
    "top_k": Whole(-1, 2**31 - 1),
    "top_p": Number(0.0, 1.0, is_open=True),
    "min_p": Number(0.0, 1.0),
    "seed": Whole(-(2**63), MAX_SEED),
    "stop": Texts("stop_strings", "stop_characters", or_one=True),
    "presence_penalty": Number(-2.0, 2.0),
    "frequency_penalty": Number(-2.0, 2.0),
    "repeat_penalty": Number(0.01, 100.0),
    "typical_p": Number(0.0, 1.0, is_open=True),
}
_WITHOUT_EFFECT = (
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv",
    "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "repeat_last_n", "penalize_newline",
    "mirostat_tau", "mirostat_eta", "draft_num_predict",
)  # fmt: skip
_OPTIONS: dict[str, Validator] = {
    **_SAMPLING,
    "num_predict": Whole(-2, "max_tokens"),
    "tfs_z": Neutral(1, "tail-free sampling"),
    "mirostat": Neutral(0, "mirostat"),
    **{name: Setting() for name in _WITHOUT_EFFECT},
}
_COMMON = (
    Field("stream", Flag(), "Answer as lines of JSON.", True),
    Field("format", Format(), '`"json"`: the answer is a JSON object; a JSON schema: it follows that schema.'),
    Field("options", Options(_OPTIONS),
          f"{', '.join(f'`{name}`' for name in _SAMPLING)}; `num_predict`: at most this many new tokens, 0 or less: as "
          "many as fit. Accepted without effect: `num_ctx` (the context has max_model_len tokens), `num_gpu`, "
          "`num_thread` and others about Ollama's own runner."),
    Field("think", Think(), "Whether the model reasons, or with which effort; default: that of its chat template."),
    Field("keep_alive", KeepAlive(), "The model stays loaded.", support="no effect"),
    Field("truncate", Flag(), "Prompts that are too long are always refused.", support="no effect"),
    Field("shift", Flag(), "Answers always end when the context is full.", support="no effect"),
    Field("logprobs", Flag(), "Return the log-probability of each token of the answer.", False),
    Field("top_logprobs", Whole(0, 20), "Also return those of this many most probable tokens at each position; needs "
          "`logprobs`.", 0),
)  # fmt: skip
CHAT_FIELDS = (
    MODEL,
    Field("messages", OllamaMessages(), "The conversation. Without messages the answer only says that the model is "
          "loaded."),
    TOOLS,
    *_COMMON,
)  # fmt: skip
GENERATE_FIELDS = (
    MODEL,
    Field("prompt", Text("prompt_characters"), "The question. Without one the answer only says that the model is "
          "loaded."),
    Field("system", Text("prompt_characters"), "The system prompt."),
    Field("raw", Flag(), "Continue the prompt itself, without a chat template.", False),
    Field("context", TokenIds("prompt_tokens"), "The `context` of an earlier answer, which this one continues."),
    *_COMMON,
    not_supported("images", "Images.", [], why="is not supported: this API takes text only"),
    Field("suffix", Text("prompt_characters"), "The text after the gap that the answer fills; needs a model that was "
          "trained to fill in the middle."),
    not_supported("template", "A template with the request.", "", why="is set by the operator only"),
)  # fmt: skip
OWN_NAMES = {
    "max_tokens": "options.num_predict",
    "structured_outputs": "format",
    **{_RENAMED.get(name, name): f"options.{name}" for name in _SAMPLING},
}


# -------------------------------------------------------------------------------------------------------- translation
def chat_parameters(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
    """Translate a request to the parameters of `/v1/chat/completions`. Raises NothingToGenerate if it has no
    messages."""
    if not given.get("messages"):
        raise NothingToGenerate(service.served_name(given.get("model")))
    made = {**_shared(given), "messages": given["messages"], **_reasoning(service, given)}
    return {**made, "tools": given["tools"]} if "tools" in given else made


def generate_parameters(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
    """Translate a request to a chat with one question, or to a text to continue. Raises NothingToGenerate if it has no
    prompt."""
    if not given.get("prompt"):
        raise NothingToGenerate(service.served_name(given.get("model")))
    made, prompt, context = _shared(given), given["prompt"], given.get("context")
    if given.get("suffix"):
        return _infill(service, given, made)
    if given.get("raw"):
        for name in [name for name in ("system", "context") if given.get(name)]:
            raise InvalidRequest(name, "cannot be used together with raw", "leave it out, or set raw=false")
        return {**made, "prompt": [Prompt(text=prompt)], "add_special_tokens": True, "raw": True}
    system = [{"role": "system", "content": given["system"]}] if given.get("system") else []
    made |= {"messages": [*system, {"role": "user", "content": prompt}], **_reasoning(service, given)}
    if not context:
        return made
    tokenizer = service.texts.tokenizer
    new = tokenizer.encode(render_messages(service, made), add_special_tokens=False)
    if new and new[0] == tokenizer.bos_id:
        new = new[1:]
    return {**_shared(given), "prompt": [Prompt(token_ids=(*context, *new))]}


def _infill(service: Service, given: Parameters, made: Parameters) -> Parameters:
    """Return the parameters of a request for the text between prompt and suffix."""
    for name in [name for name in ("system", "context", "think") if given.get(name)]:
        raise InvalidRequest(name, "cannot be used together with suffix", "leave it out")
    prompt = service.texts.infill_prompt("suffix", given["prompt"], given["suffix"])
    return with_infill_stops(service, {**made, "prompt": [prompt], "raw": True})


def _shared(given: Parameters) -> Parameters:
    options = given.get("options", {})
    made: Parameters = {_RENAMED.get(name, name): options[name] for name in _SAMPLING if name in options}
    made["stream"] = given.get("stream", True)
    if "model" in given:
        made["model"] = given["model"]
    if made.get("seed", 0) < 0:
        made["seed"] = -1
    if options.get("num_predict", 0) > 0:
        made["max_tokens"] = options["num_predict"]
    if given.get("logprobs"):
        made["logprobs"] = given.get("top_logprobs", 0)
    elif given.get("top_logprobs"):
        raise InvalidRequest("top_logprobs", "needs logprobs=true", "set logprobs or leave it out")
    if given.get("format") is not None:
        made["structured_outputs"] = given["format"]
    return made


def _reasoning(service: Service, given: Parameters) -> Parameters:
    """Return the parameters that turn reasoning on or off, as far as the chat template has variables for it, and that
    show or hide it."""
    think = given.get("think")
    if think is None:
        return {}
    if think and service.texts.reasoning_format is None:
        raise UnsupportedParameter("think", "this model does not mark its reasoning", "leave it out")
    takes_effort = isinstance(think, str) and "reasoning_effort" in service.texts.template.variables
    effort = {"reasoning_effort": think} if takes_effort else {}
    return {
        "include_reasoning": bool(think),
        **effort,
        **reasoning_switches(service, bool(think)),
    }
