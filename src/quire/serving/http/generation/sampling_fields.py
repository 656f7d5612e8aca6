"""Reads sampling parameters, beam search and structured output from the parameters of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.serving.http.generation.settings import GenerationSettings, Parameters, renamed
from quire.serving.http.validators.structure import STRUCTURE_FIELDS
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.extra_samplers import EXTRA_NAMES
from quire.types.sampling import SamplingParams
from quire.types.sampling_defaults import SamplingDefaults

_SAME_NAME = (  # parameters that SamplingParams has by the same name
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "ignore_eos", "min_tokens",
    "prompt_logprobs", "logprob_token_ids", "skip_special_tokens", "spaces_between_special_tokens",
    "logprobs", "include_stop_str_in_output", "repetition_detection", "structured_outputs", "best_of", "rank_by",
)  # fmt: skip


_BEAM_DEFAULTS: dict[str, Any] = {"length_penalty": 1.0, "early_stopping": False, "stream_best": False}


def drop_beam_fields(given: Parameters) -> list[InvalidRequest]:
    """Remove the parameters of beam search from a request without one. Returns an error for each that had an effect."""
    asked = [name for name, default in _BEAM_DEFAULTS.items() if given.pop(name, default) != default]
    return [InvalidRequest(name, "needs use_beam_search=true", "set it or leave this out") for name in asked]


def take_structure(given: Parameters) -> str:
    """Store the structure that the answer must match as `structured_outputs`, whichever field it came in. Several
    fields must ask for the same. Returns the first of them, or "" if there is none."""
    asked = [name for name in STRUCTURE_FIELDS if given.get(name) is not None]
    for name in asked[1:]:
        if given[name] != given[asked[0]]:  # clients that serve several versions of vLLM send the same in two fields
            raise InvalidRequest(name, f"cannot be used together with another {asked[0]}", "send one of them")
    for name in asked:
        given["structured_outputs"] = given[name]
    if not asked:
        return ""
    structure = given["structured_outputs"]
    if asked[0] != "response_format" or structure.structural_tag is not None:
        return asked[0]
    return "response_format.json_schema.schema" if structure.regex is None else "response_format.value"


def read_sampling(
    settings: GenerationSettings, given: Parameters, defaults: SamplingDefaults
) -> tuple[SamplingParams, bool]:
    """Return the sampling parameters, and whether to drop the answer (max_tokens=0). Parameters that were not given
    have the model's recommended values, except in a beam search, which does not sample."""
    try:
        return _read_sampling(settings, given, defaults)
    except InvalidRequest as error:
        raise with_api_field(error, given) from None


def _read_sampling(
    settings: GenerationSettings, given: Parameters, defaults: SamplingDefaults
) -> tuple[SamplingParams, bool]:
    recommended = {} if given.get("use_beam_search") else defaults.given()
    longest = recommended.pop("max_tokens", None)
    if longest is None or given.get("min_tokens", 0) > longest or settings.default_max_tokens is not None:
        longest = settings.default_max_tokens
    chosen = recommended | {name: given[name] for name in _SAME_NAME if name in given}
    if extra := {name: given[name] for name in EXTRA_NAMES if name in given}:
        chosen["extra"] = extra
    wanted = given.get("max_completion_tokens", given.get("max_tokens", longest))
    if wanted == -1:
        wanted = None
    if given.get("logprob_token_ids"):
        chosen["logprobs"] = 0  # these tokens replace the most probable ones
    if given.get("use_beam_search"):
        chosen |= {"temperature": 0.0, "best_of": None}
    sampling = SamplingParams(**chosen, max_tokens=1 if wanted == 0 else wanted)
    if settings.echoes_prompt and given.get("echo") and sampling.logprobs is not None:  # the echo needs logprobs too
        counts = (given.get("logprobs", 0), sampling.prompt_logprobs or 0)
        sampling = replace(sampling, prompt_logprobs=-1 if -1 in counts else max(counts))
    if (start := _first_scored(given)) is not None:
        sampling = replace(sampling, prompt_logprobs_start=start)
    return sampling, wanted == 0


def _first_scored(given: Parameters) -> int | None:
    """Return the index of the first prompt token whose logprob is asked for, or None for all."""
    start: int | None = given.get("prompt_logprobs_start")
    other: int = given.get("logprob_start_len", -1)
    if start is not None and other not in (-1, start):
        reason = f"is {other}, but prompt_logprobs_start is {start}"
        raise InvalidRequest("logprob_start_len", reason, "give one of them")
    return start if start is not None or other == -1 else other


def read_beam(given: Parameters) -> BeamRules | None:
    """Return the beam search that a request asks for, or None."""
    if not given.get("use_beam_search"):
        return None
    if given.get("temperature"):
        raise InvalidRequest("temperature", f"is {given['temperature']:g}, but beams are not sampled", "leave it out")
    n: int = given.get("n", 1)
    width: int = given.get("best_of", n)
    if width < n:
        raise InvalidRequest("best_of", f"is {width}, below n={n}", "raise it or lower n")
    try:
        return BeamRules(
            width,
            given.get("length_penalty", 1.0),
            given.get("early_stopping", False),
            given.get("stream_best", False),
        )
    except InvalidRequest as error:
        raise with_api_field(error, given) from None


def with_api_field(error: InvalidRequest, given: Parameters) -> InvalidRequest:
    """Return an error of the engine under the name of the field that this API uses."""
    if error.field == "prompt_logprobs" and "prompt_logprobs" not in given:  # they come from `echo`
        return InvalidRequest("logprobs", error.reason, error.fix)
    if error.field == "prompt" and "prompt_field" in given:
        return InvalidRequest(given["prompt_field"], error.reason, error.fix)
    names = {"beam_width": "best_of" if "best_of" in given else "n"}
    if "max_completion_tokens" in given:
        names["max_tokens"] = "max_completion_tokens"
    if "prompt_logprobs_start" not in given:
        names["prompt_logprobs_start"] = "logprob_start_len"
    field, *rest = (renamed(text, names) for text in (error.field, error.reason, error.fix))
    return error if (field, *rest) == (error.field, error.reason, error.fix) else InvalidRequest(field, *rest)
