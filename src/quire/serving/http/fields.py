"""The parameters of requests. An endpoint lists its parameters in its descriptor; groups that several endpoints share
are defined here. Validation, the OpenAPI document, the reference page and the fuzz tests are driven by these lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from quire.serving.http.validators.prompts import TemplateVariables
from quire.serving.http.validators.structure import Guided, ResponseFormat, StructuredOutputs
from quire.serving.http.validators.tools import Tools
from quire.serving.http.validators.values import (
    AnswerLength,
    Bias,
    Bounds,
    EarlyStop,
    Flag,
    Identifier,
    LogprobCount,
    Number,
    OneOf,
    Only,
    Options,
    Prunable,
    Seed,
    Text,
    Texts,
    TokenIds,
    Validator,
    Whole,
)
from quire.serving.text.structure_fields import GUIDED
from quire.types.errors import InvalidRequest, UnknownParameter
from quire.types.extra_samplers import MAX_DRY_LENGTH, MAX_NGRAM
from quire.types.sampling import MAX_PATTERN_COUNT, MAX_SEED

Support = Literal["yes", "no effect", "no"]
MAX_WARNINGS = 64


@dataclass(frozen=True, slots=True)
class Field:
    """One parameter. Support `no effect`: it cannot change the answer and causes a warning; `no`: it would change the
    answer and is refused. Both accept values that are equivalent to leaving it out."""

    name: str
    validator: Validator
    doc: str
    default: Any = None  # None: absent
    support: Support = "yes"
    is_required: bool = False


def not_supported(name: str, doc: str, *harmless: Any, why: str = "is not supported yet") -> Field:
    """Return a parameter that is refused, except for the `harmless` values, which are equivalent to leaving it out."""
    return Field(name, Only(harmless, why), doc, support="no")


def no_effect(name: str, doc: str, *harmless: Any, why: str = "has no effect here") -> Field:
    """Return a parameter that is accepted with a warning. The `harmless` values, equivalent to leaving it out, cause
    none."""
    return Field(name, Only(harmless, why), doc, support="no effect")


MODEL = Field("model", Text("label"), "The name of a served model; `default`, or no name: the first one.")

ADD_SPECIAL_TOKENS = Field("add_special_tokens", Flag(),
          "Add the tokenizer's special tokens, such as BOS, to the prompt. Default: true for prompts, false for "
          "messages, whose chat template adds them.")  # fmt: skip

TOOLS = Field("tools", Tools(), "Functions that the model may call: names and JSON schemas of their arguments.")

TEMPLATE = (
    Field("add_generation_prompt", Flag(),
          "Open the assistant's turn after the last message.", True),
    Field("continue_final_message", Flag(),
          "Continue the last message instead; needs add_generation_prompt=false.", False),
    Field("chat_template_kwargs", TemplateVariables(),
          "Values for the variables that the model's chat template reads."),
)  # fmt: skip

TRUNCATION = (
    Field("truncate_prompt_tokens", Whole(-1, "prompt_tokens"),
          "Keep only this many prompt tokens; -1: as many as leave room for the answer."),
    Field("truncation_side", OneOf(("left", "right")), "The end of the prompt that is cut off.", "left"),
)  # fmt: skip

LENGTH = (
    Field("max_completion_tokens", AnswerLength(1), "The newer name of `max_tokens`; if both are given, this one "
          "counts."),
    Field("min_tokens", Whole(0, "max_tokens"), "The answer ends at a stop or at the end of text only after this many "
          "tokens.", 0),
    Field("ignore_eos", Flag(), "Continue after the model's end-of-text token.", False),
    Field("stop", Texts("stop_strings", "stop_characters", or_one=True),
          "The answer ends before the first of these texts. Empty texts are ignored."),
    Field("stop_token_ids", TokenIds("stop_tokens"), "The answer ends at any of these tokens."),
    Field("include_stop_str_in_output", Flag(), "Keep the stop string or stop token in the text.", False),
)  # fmt: skip

_LOOPS: dict[str, Validator] = {
    "max_pattern_size": Whole(0, "pattern_tokens"),
    "min_pattern_size": Whole(0, "pattern_tokens"),
    "min_count": Whole(2, MAX_PATTERN_COUNT),
}

SAMPLING = (
    Field("n", Whole(1, "n"), "How many answers to each prompt.", 1),
    Field("temperature", Number(0.0, 100.0), "0 is greedy; higher is more random.", 1.0),
    Field("top_p", Number(0.0, 1.0, is_open=True),
          "Sample only among the most probable tokens that together have this probability.", 1.0),
    Field("top_k", Whole(-1, 2**31 - 1), "Sample only among this many most probable tokens; 0 or -1: among all.", 0),
    Field("min_p", Number(0.0, 1.0), "Drop tokens whose probability is below this fraction of the most probable "
          "token's.", 0.0),
    Field("presence_penalty", Number(-2.0, 2.0),
          "Subtracted from the logits of tokens that the answer contains.", 0.0),
    Field("frequency_penalty", Number(-2.0, 2.0), "Subtracted from the logits of tokens that the answer contains, "
          "once per occurrence.", 0.0),
    Field("repetition_penalty", Number(0.01, 100.0),
          "Positive logits of tokens in prompt and answer are divided by it, negative ones multiplied; 1 is off.", 1.0),
    Field("seed", Seed(MAX_SEED), "The same request with the same seed has the same answer. -1: a random seed."),
    Field("logit_bias", Bias(), "An object from token ids to numbers, which are added to the logits of these tokens."),
    Field("allowed_token_ids", TokenIds("token_ids", 1), "Only these tokens may be chosen."),
    Field("bad_words", Texts("bad_words", "stop_characters"), "Texts that must not be generated."),
    Field("repetition_detection", Options(_LOOPS),
          "End an answer when its last tokens repeat a pattern of `min_pattern_size` (default 1) to "
          "`max_pattern_size` tokens `min_count` (default 2) times. Its `finish_reason` is then \"repetition\"."),
)  # fmt: skip

CANDIDATES = (
    Field("best_of", Whole(1, "n"),
          "Generate this many answers and return the `n` best, best first; a stream begins when all are complete. "
          "With `use_beam_search`: the beam width. Default: `n`."),
    Field("rank_by", OneOf(("mean", "sum")),
          "Whether `best_of` compares answers by the mean or the sum of their logprobs.", "mean"),
    Field("use_beam_search", Flag(),
          "Find the `n` most probable answers by beam search instead of sampling; implies temperature 0.", False),
    Field("length_penalty", Number(-100.0, 100.0),
          "Beam search ranks answers by summed logprob / (tokens ** length_penalty).", 1.0),
    Field("early_stopping", EarlyStop(),
          "When a beam search ends. `true`: when it has as many finished answers as its width; `false`: when better "
          "ones are unlikely; `\"never\"`: when they are impossible.", False),
    Field("stream_best", Flag(),
          "A streamed beam search also sends chunks with `best`: the text of its best answer so far, which may change.",
          False),
)  # fmt: skip

STRUCTURE = (
    Field("response_format", ResponseFormat(),
          '`{"type": "json_schema", "json_schema": {"schema": ...}}`: the answer is JSON of this schema; '
          '`{"type": "json_object"}`: any JSON object, or JSON of the `schema` or `value` beside the type; `{"type": '
          '"json"}` and `{"type": "regex"}`: what matches the schema or expression in `value`, as in Text Generation '
          'Inference; `{"type": "text"}`: anything; `{"type": "structural_tag", ...}`: text with tags whose contents '
          'follow schemas, see '
          "[structural tags](../guides/structured_output.md#structural-tags)."),
    Field("structured_outputs", StructuredOutputs(),
          "The answer matches one of: `json` (a schema), `regex`, `choice` (a list of texts), `grammar` (Lark or "
          "EBNF), `json_object` (true), `structural_tag` (an object or its JSON text). vLLM's settings of "
          "its backends are accepted if they change nothing."),
    *(Field(name, Guided(name), f"The old name of `structured_outputs.{member}`.")
      for name, member in GUIDED.items()),
    Field("grammar", Guided("grammar", or_empty=True), "llama.cpp's name of `structured_outputs.grammar`."),
    Field("json_schema", Guided("json_schema", or_empty=True), "llama.cpp's name of `structured_outputs.json`."),
    Field("regex", Guided("regex", or_empty=True), "SGLang's name of `structured_outputs.regex`."),
    Field("ebnf", Guided("ebnf", or_empty=True), "SGLang's name of `structured_outputs.grammar`."),
    Field("structural_tag", Guided("structural_tag", or_empty=True),
          "The old name of `structured_outputs.structural_tag`."),
)  # fmt: skip

_STREAM_OPTIONS: dict[str, Validator] = {
    "include_usage": Flag(),
    "continuous_usage_stats": Flag(),
    "include_obfuscation": Only((False,)),
}

OUTPUT = (
    Field("logprob_token_ids", TokenIds("logprob_token_ids", 1),
          "Return the log-probabilities of these tokens at every position, instead of the most probable ones."),
    Field("skip_special_tokens", Flag(), "Leave special tokens out of the text.", True),
    Field("spaces_between_special_tokens", Flag(),
          "Put spaces between special tokens, if the tokenizer puts spaces between words.", True),
    Field("return_tokens_as_token_ids", Flag(), "Write tokens in logprobs as `token_id:N`.", False),
    Field("return_token_ids", Flag(), "Also return `prompt_token_ids` and each choice's `token_ids`.", False),
    Field("stream", Flag(), "Answer as server-sent events.", False),
    Field("stream_options", Options(_STREAM_OPTIONS),
          "`include_usage`: a last chunk with the usage; `continuous_usage_stats`: usage in every chunk. Needs "
          "`stream`."),
    Field("stream_interval", Whole(1, "max_tokens"), "At least this many tokens per event of a stream.", 1),
)  # fmt: skip

PROMPT_LOGPROBS = (
    Field("prompt_logprobs", LogprobCount(), "Return the log-probability of each prompt token and of this many most "
          "probable ones at its position; -1: of "
          "the whole vocabulary. Not with `stream`."),
    Field("prompt_logprobs_start", Whole(0, "prompt_tokens"),
          "Index of the first prompt token to return logprobs for; earlier tokens may come from the prefix cache. "
          "Needs `prompt_logprobs`, or `echo` with `logprobs`."),
    Field("logprob_start_len", Whole(-1, "prompt_tokens"), "SGLang's name of `prompt_logprobs_start`; -1: absent.", -1),
)  # fmt: skip

NAMES = (
    Field("request_id", Identifier(), "Names the request in answers and logs; also the X-Request-Id header."),
    Field("cache_salt", Text("label", 1),
          "Cached prompts are shared only between requests with the same salt and API key."),
)  # fmt: skip

_LABEL = "is a label that nothing reads"
_CACHES = "has no effect: cached prompts are kept while there is room"

LABELS = (
    Field("priority", Whole(-(2**31), 2**31 - 1), "Requests with lower numbers go first; needs `--policy priority`.",
          0),
    no_effect("user", "The user who sent the request.", why=_LABEL),
    no_effect("session_id", "The session of the request.", why=_LABEL),
    no_effect("safety_identifier", "The user who sent the request.", why=_LABEL),
    no_effect("metadata", "The client's own labels.", {}, why=_LABEL),
    no_effect("prompt_cache_key", "A hint for caching.", why=_CACHES),
    no_effect("prompt_cache_retention", "How long to cache the prompt.", "in_memory", "in-memory", why=_CACHES),
    no_effect("service_tier", "There is only one tier.", "auto", "default", why="has no effect: there is one tier"),
    no_effect("store", "Keeping the answer.", False, why="has no effect: nothing is stored"),
    no_effect("guided_decoding_backend", "Which library enforces structure.", "auto",
              why="has no effect: there is one backend"),
    no_effect("cache_prompt", "Prompts are always cached.", True, why=_CACHES),
)  # fmt: skip

_FOREIGN = "is a sampling method that this server does not support"
EXTRA_SAMPLING = (
    Field("typical_p", Number(0.0, 1.0, is_open=True), "Locally typical sampling: keep the tokens whose surprise is "
          "nearest to the entropy, as few as have this probability together; 1 is off.", 1.0),
    Field("top_a", Number(0.0, 1.0), "Drop tokens whose probability is below this times the square of the highest one.",
          0.0),
    Field("top_n_sigma", Number(-1.0, 100.0), "Drop tokens whose logit is more than this many standard deviations "
          "below the highest; 0 or -1 is off.", 0.0),
    Field("xtc_probability", Number(0.0, 1.0), "With this probability, exclude at each token all choices with at least "
          "`xtc_threshold` except the least probable of them.", 0.0),
    Field("xtc_threshold", Number(0.0, 1.0), "See `xtc_probability`; above 0.5 nothing is excluded.", 0.1),
    Field("dynatemp_range", Number(0.0, 100.0), "The temperature is this much lower where one token is certain, and "
          "this much higher where all are equally probable.", 0.0),
    Field("dynatemp_exponent", Number(0.0, 100.0), "How the temperature follows the entropy; needs `dynatemp_range`.",
          1.0),
    Field("dry_multiplier", Number(0.0, 100.0), "DRY: subtract multiplier * base ** (length - allowed length) from the "
          "logit of a token that lengthens a repetition of this length; 0 is off.", 0.0),
    Field("dry_base", Number(1.0, 100.0), "See `dry_multiplier`.", 1.75),
    Field("dry_allowed_length", Whole(1, MAX_DRY_LENGTH), "Shorter repetitions have no DRY penalty.", 2),
    Field("dry_penalty_last_n", Whole(-1, 2**31 - 1), "How many tokens DRY searches for repetitions; -1: all; 0: off.",
          -1),
    Field("dry_sequence_breakers", Texts("stop_strings", "stop_characters"),
          'A token that contains one of these texts ends repetitions. Default: `"\\n"`, `":"`, `"\""`, `"*"`.'),
    Field("no_repeat_ngram_size", Whole(0, MAX_NGRAM), "No sequence of this many tokens may occur twice in prompt and "
          "answer, unless no other token is left; 0 is off.", 0),
)  # fmt: skip
FOREIGN_SAMPLING = (
    *EXTRA_SAMPLING,
    not_supported("tfs_z", "Tail-free sampling.", 1, why=_FOREIGN),
    not_supported("mirostat", "Mirostat sampling.", 0, why=_FOREIGN),
    not_supported("adaptive_target", "Adaptive sampling.", -1, why=_FOREIGN),
    not_supported("stop_regex", "Ending an answer by a regex.", [], "", why="is not supported yet: use stop"),
    not_supported("custom_logit_processor", "Code of plug-ins.", why="would run code of the client"),
    not_supported("custom_params", "Arguments of plug-ins.", {}, why="belongs to plug-ins"),
    not_supported("guided_whitespace_pattern", "White space in JSON.", why="cannot be chosen here"),
)  # fmt: skip

GENERATION = (
    *LENGTH,
    *SAMPLING,
    *CANDIDATES,
    *STRUCTURE,
    *OUTPUT,
    *LABELS,
    *FOREIGN_SAMPLING,
)  # the parameters that all generating endpoints share


THINKING_BUDGET = Field("thinking_token_budget", Whole(0, "max_tokens"),
          "At most this many tokens of reasoning. Then its end is forced, and the model continues with the answer. "
          "Needs a model that marks the end of its reasoning with one token.")  # fmt: skip
NO_REASONING = not_supported("thinking_token_budget", "A bound on reasoning.",
          why="needs a chat: other answers are not searched for reasoning")  # fmt: skip

OF_RENDERING = "belongs to the render endpoints"

NOT_SUPPORTED = (
    no_effect("media_io_kwargs", "Images and audio.", why="has no effect: images are read in one way"),
    no_effect("mm_processor_kwargs", "Images and audio.", why="has no effect: the operator sets it for all requests"),
    not_supported("return_token_offsets", "The position of prompt tokens in the text.", False, why=OF_RENDERING),
    not_supported("kv_transfer_params", "Transfer of KV caches between servers."),
    not_supported("ec_transfer_params", "Transfer of KV caches between servers."),
    not_supported("routed_experts_prompt_start", "Which experts were used."),
    not_supported("vllm_xargs", "Arguments for plug-ins."),
    not_supported("logits_processors", "Arguments for plug-ins.", []),
    not_supported("input_ids", "A prompt as token ids.", why="belongs to /generate; /v1/completions has prompt"),
    not_supported("lora_path", "A LoRA adapter.", why="belongs to /generate; here model names the adapter"),
    not_supported("return_hidden_states", "Hidden states.", False),
)  # fmt: skip


def check_body(
    fields: Mapping[str, Field], body: Any, limits: Bounds, *, strict: bool
) -> tuple[dict[str, Any], list[str]]:
    """Validate the members of a body as parameters of its endpoint. Returns the values of the given parameters, and
    warnings about parameters that are unknown or have no effect.

    A parameter that is null counts as absent. Raises InvalidRequest, which names the parameter; if `strict`, also for
    anything that would cause a warning.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("body", "must be a JSON object", 'send {"model": ..., ...}')
    checked: dict[str, Any] = {}
    warnings: list[str] = []
    for name, value in body.items():
        if value is None:
            continue
        field = fields.get(name)
        if field is None and not strict and len(warnings) >= MAX_WARNINGS:
            continue  # there are enough warnings, and finding similar names is slow
        try:
            if field is None:
                raise _unknown(name, fields)
            if not strict and isinstance(field.validator, Prunable):
                value, dropped = field.validator.prune(name, value, limits)
                warnings += map(str, dropped)
            value = field.validator.check(name, value, limits)
        except InvalidRequest as error:
            if strict or (field is not None and field.support != "no effect"):
                raise
            warnings.append(str(error))
            continue
        if field.support == "yes":
            checked[name] = value
    for field in fields.values():
        if field.is_required and field.name not in checked:
            raise InvalidRequest(field.name, "is missing", f"send it: {field.doc}")
    return checked, warnings[:MAX_WARNINGS]


def _unknown(name: str, fields: Mapping[str, Field]) -> UnknownParameter:
    meant = get_close_matches(name[:80], fields, 1, 0.8)
    if name == "extra_body":
        fix = "that is an argument of OpenAI's Python client; in JSON, put its members beside the other parameters"
    else:
        fix = f"did you mean {meant[0]}?" if meant else "leave it out"
    return UnknownParameter(name[:80], "is not a parameter of this endpoint", fix)
