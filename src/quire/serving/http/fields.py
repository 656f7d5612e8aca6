"""Every parameter of every endpoint, in one table. It drives validation, the OpenAPI document, the docs and the fuzz
tests; a name that is not here is unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from quire.serving.http.inputs import Documents, Messages, Prompts, TemplateVariables
from quire.serving.http.kinds import (
    Bias,
    Bounds,
    Flag,
    Identifier,
    Kind,
    Labels,
    Number,
    OneOf,
    Only,
    Options,
    Prunable,
    Text,
    Texts,
    TokenIds,
    UnknownParameter,
    Whole,
)
from quire.types.errors import InvalidRequest
from quire.types.sampling import MAX_PATTERN_COUNT, MAX_SEED

Endpoint = Literal["chat", "completions", "tokenize", "detokenize"]
Support = Literal["yes", "no effect", "no"]

_BOTH: tuple[Endpoint, ...] = ("chat", "completions")
_CHAT: tuple[Endpoint, ...] = ("chat",)
_COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
_TOKENIZE: tuple[Endpoint, ...] = ("tokenize",)
_ALL: tuple[Endpoint, ...] = ("chat", "completions", "tokenize", "detokenize")


@dataclass(frozen=True, slots=True)
class Field:
    """One parameter. `no effect`: checked and accepted, changes nothing; `no`: refused unless harmless."""

    name: str
    kind: Kind
    endpoints: tuple[Endpoint, ...]
    doc: str
    default: Any = None  # None: absent
    support: Support = "yes"
    is_required: bool = False


def _no(
    name: str, endpoints: tuple[Endpoint, ...], doc: str, *harmless: Any, why: str = "is not supported yet"
) -> Field:
    return Field(name, Only(harmless, why), endpoints, doc, support="no")


_INPUT = (
    Field("model", Text("label", 1), _ALL, "A name the server serves; the first one when left out."),
    Field("messages", Messages(), _CHAT,
          "The conversation; `content` is text or a list of text parts.", is_required=True),
    Field("prompt", Prompts(), _COMPLETIONS, "Text, token ids, or a list of either.", is_required=True),
    Field("prompt", Prompts(lone=True), _TOKENIZE, "The text to tokenize; this or `messages`."),
    Field("messages", Messages(), _TOKENIZE, "A conversation to render and tokenize; this or `prompt`."),
    Field("tokens", TokenIds("prompt_tokens"), ("detokenize",), "The token ids to turn into text.", is_required=True),
    Field("return_token_strs", Flag(), _TOKENIZE, "Also return what each token looks like.", False),
    Field("add_special_tokens", Flag(), ("chat", "completions", "tokenize"),
          "Put the model's begin and end tokens around the prompt; default true for prompts, false for "
          "messages, whose template writes them."),
    Field("add_generation_prompt", Flag(), ("chat", "tokenize"),
          "Open the assistant's turn after the last message.", True),
    Field("continue_final_message", Flag(), ("chat", "tokenize"),
          "Continue the last message instead; needs add_generation_prompt=false.", False),
    Field("chat_template_kwargs", TemplateVariables(), ("chat", "tokenize"),
          "Values for the variables that the model's chat template reads."),
    Field("documents", Documents(), _CHAT, "Passed to chat templates that read `documents`."),
    Field("reasoning_effort", Text("label", 1), _CHAT, "Passed to chat templates that read `reasoning_effort`."),
    Field("truncate_prompt_tokens", Whole(-1, "prompt_tokens"), _BOTH,
          "Keep only this many prompt tokens; -1: as many as leave room for the answer."),
    Field("truncation_side", OneOf(("left", "right")), _BOTH, "Which end of the prompt is cut off.", "left"),
)  # fmt: skip

_LENGTH = (
    Field("max_tokens", Whole(0, "max_tokens"), _COMPLETIONS, "At most this many new tokens; 0 only with `echo`.", 16),
    Field("max_tokens", Whole(1, "max_tokens"), _CHAT,
          "At most this many new tokens; default: what is left of max_model_len."),
    Field("max_completion_tokens", Whole(1, "max_tokens"), _BOTH, "The newer name of max_tokens; it wins."),
    Field("min_tokens", Whole(0, "max_tokens"), _BOTH, "No end of text or stop before this many tokens.", 0),
    Field("ignore_eos", Flag(), _BOTH, "Go on after the end of text.", False),
    Field("stop", Texts("stop_strings", "stop_characters", or_one=True), _BOTH,
          "The answer ends before the first of these."),
    Field("stop_token_ids", TokenIds("stop_tokens"), _BOTH, "The answer ends at any of these tokens."),
    Field("include_stop_str_in_output", Flag(), _BOTH, "Keep the stop string or stop token in the text.", False),
)  # fmt: skip

_LOOPS: dict[str, Kind] = {
    "max_pattern_size": Whole(0, "pattern_tokens"),
    "min_pattern_size": Whole(0, "pattern_tokens"),
    "min_count": Whole(2, MAX_PATTERN_COUNT),
}
_SAMPLING = (
    Field("n", Whole(1, "n"), _BOTH, "How many answers to each prompt.", 1),
    Field("temperature", Number(0.0, 100.0), _BOTH, "0 is greedy; higher is more random.", 1.0),
    Field("top_p", Number(0.0, 1.0, is_open=True), _BOTH,
          "Sample among the likeliest tokens that hold this much probability.", 1.0),
    Field("top_k", Whole(-1, 2**31 - 1), _BOTH, "Sample among this many likeliest tokens; 0 or -1: all.", 0),
    Field("min_p", Number(0.0, 1.0), _BOTH, "Drop tokens below this share of the likeliest one's probability.", 0.0),
    Field("presence_penalty", Number(-2.0, 2.0), _BOTH,
          "Subtracted from the logit of every token the answer has.", 0.0),
    Field("frequency_penalty", Number(-2.0, 2.0), _BOTH, "The same, times how often the token was used.", 0.0),
    Field("repetition_penalty", Number(0.01, 100.0), _BOTH,
          "Divides the logits of tokens in prompt and answer; 1 is off.", 1.0),
    Field("seed", Whole(-1, MAX_SEED), _BOTH, "Same seed, same request: same answer. -1: any."),
    Field("logit_bias", Bias(), _BOTH, "Added to the logits of these tokens."),
    Field("allowed_token_ids", TokenIds("token_ids", 1), _BOTH, "Only these tokens may be chosen."),
    Field("bad_words", Texts("bad_words", "stop_characters"), _BOTH, "Texts that must not be generated."),
    Field("repetition_detection", Options(_LOOPS), _BOTH,
          "End an answer whose last tokens are one pattern of `min_pattern_size` (1) to `max_pattern_size` tokens, "
          "`min_count` (2) times over. Its `finish_reason` is \"repetition\"."),
)  # fmt: skip

_STREAM_OPTIONS: dict[str, Kind] = {
    "include_usage": Flag(),
    "continuous_usage_stats": Flag(),
    "include_obfuscation": Only((False,)),
}
_OUTPUT = (
    Field("logprobs", Whole(0, "logprobs"), _COMPLETIONS,
          "Return the log-probability of each token and of this many likeliest ones."),
    Field("logprobs", Flag(), _CHAT, "Return the log-probability of each token.", False),
    Field("top_logprobs", Whole(0, "logprobs"), _CHAT, "And of this many likeliest ones; needs logprobs=true.", 0),
    Field("prompt_logprobs", Whole(0, "logprobs"), _BOTH, "The same for every prompt token; not with `stream`."),
    Field("logprob_token_ids", TokenIds("logprob_token_ids", 1), _BOTH,
          "Also return the log-probabilities of these tokens at every position."),
    Field("echo", Flag(), _COMPLETIONS, "Put the prompt before the answer, with its logprobs where asked.", False),
    Field("echo", Flag(), _CHAT, "Put the last message before the answer if it is the assistant's.", False),
    Field("skip_special_tokens", Flag(), _BOTH, "Leave special tokens out of the text.", True),
    Field("spaces_between_special_tokens", Flag(), _BOTH,
          "Join special tokens with spaces, where the tokenizer joins words so.", True),
    Field("return_tokens_as_token_ids", Flag(), _BOTH, "Write tokens in logprobs as `token_id:N`.", False),
    Field("return_token_ids", Flag(), _BOTH, "Also return `prompt_token_ids` and each choice's `token_ids`.", False),
    Field("return_prompt_text", Flag(), _CHAT,
          "Also return `prompt_text`, the conversation as the chat template wrote it; in a stream with the first "
          "chunk.", False),
    Field("stream", Flag(), _BOTH, "Answer as server-sent events.", False),
    Field("stream_options", Options(_STREAM_OPTIONS), _BOTH,
          "`include_usage`: a last chunk with the usage; `continuous_usage_stats`: usage in every chunk. Needs "
          "`stream`."),
    Field("stream_interval", Whole(1, "max_tokens"), _BOTH, "At least this many tokens per event of a stream.", 1),
)  # fmt: skip

_MANNERS = (
    Field("request_id", Identifier(), _BOTH, "Names the request in answers and logs; also the X-Request-Id header."),
    Field("priority", Whole(-(2**31), 2**31 - 1), _BOTH, "Lower goes first; needs --scheduling-policy priority.", 0),
    Field("cache_salt", Text("label", 1), _BOTH,
          "Requests share cached prompts only with requests of the same salt and key."),
    Field("user", Text("label"), _BOTH, "Who asked.", support="no effect"),
    Field("session_id", Text("label"), _BOTH, "Which session asked.", support="no effect"),
    Field("safety_identifier", Text("label"), _BOTH, "Who asked.", support="no effect"),
    Field("prompt_cache_key", Text("label"), _BOTH, "A hint for caching.", support="no effect"),
    Field("metadata", Labels(), _BOTH, "The client's own labels.", support="no effect"),
    Field("service_tier", OneOf(("auto", "default")), _BOTH, "There is one tier.", support="no effect"),
    Field("parallel_tool_calls", Flag(), _CHAT, "There are no tools to call.", support="no effect"),
    Field("include_reasoning", Flag(), _CHAT, "Reasoning is part of the text.", support="no effect"),
)  # fmt: skip

_RENDER = "belongs to vLLM's render endpoints, which this server does not have"
_MISSING = (
    _no("best_of", _BOTH, "Generate more answers than are returned.", 1),
    _no("use_beam_search", _BOTH, "Beam search.", False),
    _no("length_penalty", _BOTH, "Beam search.", 1.0, 1),
    _no("early_stopping", _BOTH, "Beam search.", False),
    _no("suffix", _COMPLETIONS, "Text after the answer.", ""),
    _no("response_format", _BOTH, "JSON and other constrained output.", {"type": "text"}),
    _no("structured_outputs", _BOTH, "Constrained output."),
    _no("guided_json", _BOTH, "Constrained output."),
    _no("guided_regex", _BOTH, "Constrained output."),
    _no("guided_choice", _BOTH, "Constrained output."),
    _no("guided_grammar", _BOTH, "Constrained output."),
    _no("tools", ("chat", "tokenize"), "Functions the model may call.", []),
    _no("tool_choice", _CHAT, "Which function to call.", "none", "auto"),
    _no("functions", _CHAT, "The old name of tools.", []),
    _no("function_call", _CHAT, "The old name of tool_choice.", "none", "auto"),
    _no("chat_template", ("chat", "tokenize"), "A template with the request.", why="is set by the operator only"),
    _no("modalities", _CHAT, "Kinds of output.", ["text"]),
    _no("audio", _CHAT, "Spoken output."),
    _no("prediction", _CHAT, "A predicted answer."),
    _no("verbosity", _CHAT, "How long answers are.", "medium"),
    _no("web_search_options", _CHAT, "Searching the web."),
    _no("store", _CHAT, "Keeping the answer.", False),
    _no("prompt_embeds", _COMPLETIONS, "Prompts as vectors."),
    _no("thinking_token_budget", _BOTH, "A bound on reasoning.",
        why="needs a reasoning parser, which this server does not have"),
    _no("return_token_offsets", _BOTH, "Where prompt tokens stand in the text.", False, why=_RENDER),
    _no("return_assistant_tokens_mask", _CHAT, "Which prompt tokens an assistant wrote.", False, why=_RENDER),
    _no("media_io_kwargs", _CHAT, "Pictures and sound."),
    _no("mm_processor_kwargs", _CHAT, "Pictures and sound."),
    _no("kv_transfer_params", _BOTH, "Moving caches between servers."),
    _no("ec_transfer_params", _BOTH, "Moving caches between servers."),
    _no("routed_experts_prompt_start", _BOTH, "Which experts were used."),
    _no("vllm_xargs", _BOTH, "Arguments of plug-ins."),
    _no("logits_processors", _BOTH, "Arguments of plug-ins.", []),
)  # fmt: skip

FIELDS: tuple[Field, ...] = (*_INPUT, *_LENGTH, *_SAMPLING, *_OUTPUT, *_MANNERS, *_MISSING)


def fields_of(endpoint: Endpoint) -> dict[str, Field]:
    """The parameters of one endpoint, by name."""
    return _BY_ENDPOINT[endpoint]


_BY_ENDPOINT: dict[str, dict[str, Field]] = {
    endpoint: {field.name: field for field in FIELDS if endpoint in field.endpoints} for endpoint in _ALL
}


def check_body(endpoint: Endpoint, body: Any, limits: Bounds, *, lenient: bool) -> tuple[dict[str, Any], list[str]]:
    """The parameters that were given, checked, and warnings about what a lenient server left out.

    Raises InvalidRequest naming the parameter. A null counts as absent.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("body", "must be a JSON object", 'send {"model": ..., ...}')
    known, checked = fields_of(endpoint), {}
    warnings: list[str] = []
    for name, value in body.items():
        if value is None:
            continue
        field = known.get(name)
        try:
            if field is None:
                raise UnknownParameter(name[:80], "is not a parameter of this endpoint", "leave it out")
            if lenient and isinstance(field.kind, Prunable):
                value, dropped = field.kind.prune(name, value, limits)
                warnings += map(str, dropped)
            value = field.kind.check(name, value, limits)
        except InvalidRequest as error:
            if not lenient or (field is not None and field.support == "yes"):
                raise
            warnings.append(str(error))
            continue
        if field.support == "yes":
            checked[name] = value
    for field in known.values():
        if field.is_required and field.name not in checked:
            raise InvalidRequest(field.name, "is missing", f"send it: {field.doc}")
    return checked, warnings[:64]
