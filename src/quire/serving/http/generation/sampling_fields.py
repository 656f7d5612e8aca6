"""How a request wants its answers chosen, from the parameters it gave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.serving.http.validators.structure import STRUCTURE_FIELDS
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.sampling import SamplingParams
from quire.types.sampling_defaults import SamplingDefaults

_AS_THEY_ARE = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "ignore_eos", "min_tokens",
    "prompt_logprobs", "logprob_token_ids", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "repetition_detection", "structured_outputs", "best_of", "rank_by",
)  # fmt: skip


_BEAM_DEFAULTS: dict[str, Any] = {"length_penalty": 1.0, "early_stopping": False, "stream_best": False}


def drop_beam_fields(given: dict[str, Any]) -> list[InvalidRequest]:
    """Take out what means something to a beam search only; says what."""
    asked = [name for name, default in _BEAM_DEFAULTS.items() if given.pop(name, default) != default]
    return [InvalidRequest(name, "needs use_beam_search=true", "set it or leave this out") for name in asked]


def take_structure(given: dict[str, Any]) -> str:
    """Bring what the answer must match under one name; returns the name its client used, empty for none."""
    asked = [name for name in STRUCTURE_FIELDS if given.get(name) is not None]
    if len(asked) > 1:
        raise InvalidRequest(asked[1], f"cannot be used together with {asked[0]}", "send one of them")
    for name in asked:
        given["structured_outputs"] = given[name]
    if not asked:
        return ""
    return "response_format.json_schema.schema" if asked[0] == "response_format" else asked[0]


def read_sampling(endpoint: str, given: dict[str, Any], defaults: SamplingDefaults) -> tuple[SamplingParams, bool]:
    """How to decode, and whether the answer is to be dropped. What is not given is as the model's makers recommend;
    a beam search samples nothing and takes no recommendation."""
    recommended = {} if given.get("use_beam_search") else defaults.given()
    longest = recommended.pop("max_tokens", None)
    if longest is not None and given.get("min_tokens", 0) > longest:
        longest = None
    chosen = recommended | {name: given[name] for name in _AS_THEY_ARE if name in given}
    wanted = given.get("max_completion_tokens", given.get("max_tokens", longest if endpoint == "chat" else 16))
    if endpoint == "chat":
        chosen["logprobs"] = given.get("top_logprobs", 0) if given.get("logprobs") else None
    else:
        chosen["logprobs"] = given.get("logprobs")
    if given.get("use_beam_search"):
        chosen |= {"temperature": 0.0, "best_of": None}
    sampling = SamplingParams(**chosen, max_tokens=1 if wanted == 0 else wanted)
    if endpoint == "completions" and given.get("echo") and sampling.logprobs is not None:  # the echo has them too
        sampling = replace(sampling, prompt_logprobs=max(sampling.logprobs, sampling.prompt_logprobs or 0))
    return sampling, wanted == 0


def read_beam(given: dict[str, Any]) -> BeamRules | None:
    """The search that is asked for."""
    if not given.get("use_beam_search"):
        return None
    if given.get("temperature"):
        raise InvalidRequest("temperature", f"is {given['temperature']:g}, but beams are not sampled", "leave it out")
    n = given.get("n", 1)
    width = given.get("best_of", n)
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
        raise in_own_words(error, given) from None


def in_own_words(error: InvalidRequest, given: dict[str, Any]) -> InvalidRequest:
    """The engine's refusal in the names of this API."""
    if error.field != "beam_width":
        return error
    return InvalidRequest("best_of" if "best_of" in given else "n", error.reason, error.fix)
