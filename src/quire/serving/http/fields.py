"""Every parameter of every endpoint, in one table. It drives validation, the OpenAPI document, the docs and the fuzz
tests; a name that is not here is unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from quire.serving.http.validators.prompts import Documents, Messages, Prompts, TemplateVariables
from quire.serving.http.validators.structure import Guided, ResponseFormat, StructuredOutputs
from quire.serving.http.validators.tools import ToolChoice, Tools
from quire.serving.http.validators.values import (
    Bias,
    Bounds,
    EarlyStop,
    Flag,
    Identifier,
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
    Validator,
    Whole,
)
from quire.serving.text.structure_fields import GUIDED
from quire.types.errors import InvalidRequest
from quire.types.sampling import MAX_PATTERN_COUNT, MAX_SEED

Endpoint = Literal["chat", "completions", "fork", "tokenize", "detokenize"]
Support = Literal["yes", "no effect", "no"]

_EVERY: tuple[Endpoint, ...] = ("chat", "completions", "fork")  # all that generate
_BOTH: tuple[Endpoint, ...] = ("chat", "completions")
_CHAT: tuple[Endpoint, ...] = ("chat",)
_COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
_TOKENIZE: tuple[Endpoint, ...] = ("tokenize",)
_TEXT: tuple[Endpoint, ...] = ("completions", "fork")
_FORK: tuple[Endpoint, ...] = ("fork",)
ENDPOINTS: tuple[Endpoint, ...] = ("chat", "completions", "fork", "tokenize", "detokenize")


@dataclass(frozen=True, slots=True)
class Field:
    """One parameter. `no effect`: checked and accepted, changes nothing; `no`: refused unless harmless."""

    name: str
    validator: Validator
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
    Field("model", Text("label", 1), ENDPOINTS, "A name the server serves; the first one when left out."),
    Field("messages", Messages(), _CHAT,
          "The conversation; `content` is text or a list of text parts.", is_required=True),
    Field("prompt", Prompts(), _COMPLETIONS, "Text, token ids, or a list of either.", is_required=True),
    Field("request_id", Text("label", 1), _FORK,
          "The request to fork: the `id` of its answer, or its X-Request-Id.", is_required=True),
    Field("index", Whole(0, "choices"), _FORK, "Which of its choices.", 0),
    Field("at_token", Whole(0, "max_tokens"), _FORK,
          "Keep so many tokens of its answer; default: all that are known."),
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
    Field("max_tokens", Whole(0, "max_tokens"), _TEXT, "At most this many new tokens; 0 only with `echo`.", 16),
    Field("max_tokens", Whole(1, "max_tokens"), _CHAT,
          "At most this many new tokens; default: what is left of max_model_len."),
    Field("max_completion_tokens", Whole(1, "max_tokens"), _EVERY, "The newer name of max_tokens; it wins."),
    Field("min_tokens", Whole(0, "max_tokens"), _EVERY, "No end of text or stop before this many tokens.", 0),
    Field("ignore_eos", Flag(), _EVERY, "Go on after the end of text.", False),
    Field("stop", Texts("stop_strings", "stop_characters", or_one=True), _EVERY,
          "The answer ends before the first of these."),
    Field("stop_token_ids", TokenIds("stop_tokens"), _EVERY, "The answer ends at any of these tokens."),
    Field("include_stop_str_in_output", Flag(), _EVERY, "Keep the stop string or stop token in the text.", False),
)  # fmt: skip

_LOOPS: dict[str, Validator] = {
    "max_pattern_size": Whole(0, "pattern_tokens"),
    "min_pattern_size": Whole(0, "pattern_tokens"),
    "min_count": Whole(2, MAX_PATTERN_COUNT),
}
_SAMPLING = (
    Field("n", Whole(1, "n"), _EVERY, "How many answers to each prompt.", 1),
    Field("temperature", Number(0.0, 100.0), _EVERY, "0 is greedy; higher is more random.", 1.0),
    Field("top_p", Number(0.0, 1.0, is_open=True), _EVERY,
          "Sample among the likeliest tokens that hold this much probability.", 1.0),
    Field("top_k", Whole(-1, 2**31 - 1), _EVERY, "Sample among this many likeliest tokens; 0 or -1: all.", 0),
    Field("min_p", Number(0.0, 1.0), _EVERY, "Drop tokens below this share of the likeliest one's probability.", 0.0),
    Field("presence_penalty", Number(-2.0, 2.0), _EVERY,
          "Subtracted from the logit of every token the answer has.", 0.0),
    Field("frequency_penalty", Number(-2.0, 2.0), _EVERY, "The same, times how often the token was used.", 0.0),
    Field("repetition_penalty", Number(0.01, 100.0), _EVERY,
          "Divides the logits of tokens in prompt and answer; 1 is off.", 1.0),
    Field("seed", Whole(-1, MAX_SEED), _EVERY, "Same seed, same request: same answer. -1: any."),
    Field("logit_bias", Bias(), _EVERY, "Added to the logits of these tokens."),
    Field("allowed_token_ids", TokenIds("token_ids", 1), _EVERY, "Only these tokens may be chosen."),
    Field("bad_words", Texts("bad_words", "stop_characters"), _EVERY, "Texts that must not be generated."),
    Field("repetition_detection", Options(_LOOPS), _EVERY,
          "End an answer whose last tokens are one pattern of `min_pattern_size` (1) to `max_pattern_size` tokens, "
          "`min_count` (2) times over. Its `finish_reason` is \"repetition\"."),
)  # fmt: skip

_GROUPS = (
    Field("best_of", Whole(1, "n"), _EVERY,
          "Generate so many answers and return the `n` best, best first; a stream begins when all are known. With "
          "`use_beam_search`: the width of the search. Default: n."),
    Field("rank_by", OneOf(("mean", "sum")), _EVERY,
          "What `best_of` compares: the mean or the sum of an answer's logprobs.", "mean"),
    Field("use_beam_search", Flag(), _EVERY,
          "Search for the `n` likeliest answers instead of sampling; needs temperature 0, which it implies.", False),
    Field("length_penalty", Number(-100.0, 100.0), _EVERY,
          "A search ranks answers by summed logprob / (tokens ** length_penalty).", 1.0),
    Field("early_stopping", EarlyStop(), _EVERY,
          "When a search ends: `true`: with as many finished answers as it is wide; `false`: when better ones are "
          "unlikely; `\"never\"`: when they are impossible.", False),
    Field("stream_best", Flag(), _EVERY,
          "A streamed search also sends chunks with `best`: the text of its best answer so far, which may change.",
          False),
)  # fmt: skip

_STRUCTURE = (
    Field("response_format", ResponseFormat(), _EVERY,
          '`{"type": "json_schema", "json_schema": {"schema": ...}}`: the answer is JSON of this schema; '
          '`{"type": "json_object"}`: any JSON object; `{"type": "text"}`: anything.'),
    Field("structured_outputs", StructuredOutputs(), _EVERY,
          "The answer matches one of: `json` (a schema), `regex`, `choice` (a list of texts), `grammar` (Lark or "
          "EBNF), `json_object` (true)."),
    *(Field(name, Guided(name), _EVERY, f"The old name of `structured_outputs.{member}`.")
      for name, member in GUIDED.items()),
)  # fmt: skip

_TOOLS = (
    Field("tools", Tools(), ("chat", "tokenize"), "Functions the model may call: names, JSON schemas of arguments."),
    Field("tool_choice", ToolChoice(), _CHAT,
          "`none`: no call; `auto`: the model decides; `required`: it must call one; or the one it must call. A call "
          "that must be made follows the schema. Default: auto with `tools`, none without."),
    Field("parallel_tool_calls", Flag(), _CHAT, "Whether an answer may hold several calls.", True),
    Field("include_reasoning", Flag(), _CHAT,
          "Return what a model marks as its reasoning, as `reasoning_content` and `reasoning`.", True),
)  # fmt: skip

_STREAM_OPTIONS: dict[str, Validator] = {
    "include_usage": Flag(),
    "continuous_usage_stats": Flag(),
    "include_obfuscation": Only((False,)),
}
_OUTPUT = (
    Field("logprobs", Whole(0, "logprobs"), _TEXT,
          "Return the log-probability of each token and of this many likeliest ones."),
    Field("logprobs", Flag(), _CHAT, "Return the log-probability of each token.", False),
    Field("top_logprobs", Whole(0, "logprobs"), _CHAT, "And of this many likeliest ones; needs logprobs=true.", 0),
    Field("prompt_logprobs", Whole(0, "logprobs"), _BOTH, "The same for every prompt token; not with `stream`."),
    Field("logprob_token_ids", TokenIds("logprob_token_ids", 1), _EVERY,
          "Also return the log-probabilities of these tokens at every position."),
    Field("echo", Flag(), _COMPLETIONS, "Put the prompt before the answer, with its logprobs where asked.", False),
    Field("echo", Flag(), _FORK, "Put what was kept of the forked answer before the new one.", False),
    Field("echo", Flag(), _CHAT, "Put the last message before the answer if it is the assistant's.", False),
    Field("skip_special_tokens", Flag(), _EVERY, "Leave special tokens out of the text.", True),
    Field("spaces_between_special_tokens", Flag(), _EVERY,
          "Join special tokens with spaces, where the tokenizer joins words so.", True),
    Field("return_tokens_as_token_ids", Flag(), _EVERY, "Write tokens in logprobs as `token_id:N`.", False),
    Field("return_token_ids", Flag(), _EVERY, "Also return `prompt_token_ids` and each choice's `token_ids`.", False),
    Field("return_prompt_text", Flag(), _CHAT,
          "Also return `prompt_text`, the conversation as the chat template wrote it; in a stream with the first "
          "chunk.", False),
    Field("stream", Flag(), _EVERY, "Answer as server-sent events.", False),
    Field("stream_options", Options(_STREAM_OPTIONS), _EVERY,
          "`include_usage`: a last chunk with the usage; `continuous_usage_stats`: usage in every chunk. Needs "
          "`stream`."),
    Field("stream_interval", Whole(1, "max_tokens"), _EVERY, "At least this many tokens per event of a stream.", 1),
)  # fmt: skip

_MANNERS = (
    Field("request_id", Identifier(), _BOTH, "Names the request in answers and logs; also the X-Request-Id header."),
    Field("priority", Whole(-(2**31), 2**31 - 1), _EVERY, "Lower goes first; needs --policy priority.", 0),
    Field("cache_salt", Text("label", 1), _BOTH,
          "Requests share cached prompts only with requests of the same salt and key."),
    Field("user", Text("label"), _EVERY, "Who asked.", support="no effect"),
    Field("session_id", Text("label"), _EVERY, "Which session asked.", support="no effect"),
    Field("safety_identifier", Text("label"), _EVERY, "Who asked.", support="no effect"),
    Field("prompt_cache_key", Text("label"), _EVERY, "A hint for caching.", support="no effect"),
    Field("metadata", Labels(), _EVERY, "The client's own labels.", support="no effect"),
    Field("service_tier", OneOf(("auto", "default")), _EVERY, "There is one tier.", support="no effect"),
)  # fmt: skip

_RENDER = "belongs to vLLM's render endpoints, which this server does not have"
_MISSING = (
    _no("suffix", _COMPLETIONS, "Text after the answer.", ""),
    _no("functions", _CHAT, "The old name of tools.", [], why="is the old name of tools, which this server takes"),
    _no("function_call", _CHAT, "The old name of tool_choice.", "none", "auto",
        why="is the old name of tool_choice, which this server takes"),
    _no("chat_template", ("chat", "tokenize"), "A template with the request.", why="is set by the operator only"),
    _no("modalities", _CHAT, "Kinds of output.", ["text"]),
    _no("audio", _CHAT, "Spoken output."),
    _no("prediction", _CHAT, "A predicted answer."),
    _no("verbosity", _CHAT, "How long answers are.", "medium"),
    _no("web_search_options", _CHAT, "Searching the web."),
    _no("store", _CHAT, "Keeping the answer.", False),
    _no("prompt_embeds", _COMPLETIONS, "Prompts as vectors."),
    _no("thinking_token_budget", _BOTH, "A bound on reasoning.", why="cannot be kept: reasoning ends by itself here"),
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

FIELDS: tuple[Field, ...] = (
    *_INPUT,
    *_LENGTH,
    *_SAMPLING,
    *_GROUPS,
    *_STRUCTURE,
    *_TOOLS,
    *_OUTPUT,
    *_MANNERS,
    *_MISSING,
)


def fields_of(endpoint: Endpoint) -> dict[str, Field]:
    """The parameters of one endpoint, by name."""
    return _BY_ENDPOINT[endpoint]


_BY_ENDPOINT: dict[str, dict[str, Field]] = {
    endpoint: {field.name: field for field in FIELDS if endpoint in field.endpoints} for endpoint in ENDPOINTS
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
            if lenient and isinstance(field.validator, Prunable):
                value, dropped = field.validator.prune(name, value, limits)
                warnings += map(str, dropped)
            value = field.validator.check(name, value, limits)
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
