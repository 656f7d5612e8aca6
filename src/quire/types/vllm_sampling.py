"""Fields of vLLM's SamplingParams that Quire names differently, accepts without effect, or refuses."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from quire.types.errors import InvalidRequest
from quire.types.extra_samplers import EXTRA_NAMES
from quire.types.value_checks import shown


class RequestOutputKind(IntEnum):
    """What each output of `AsyncLLM.generate` holds."""

    CUMULATIVE = 0  # the whole answer so far
    DELTA = 1  # what is new since the previous output
    FINAL_ONLY = 2  # the whole answer, once, at its end


# Ignored fields: the values that have no effect, and what to use instead of any other value.
_NO_EFFECT: dict[str, tuple[tuple[object, ...], str]] = {
    "logits_processors": ((None, []), "use logit_bias, allowed_token_ids, bad_words or structured_outputs"),
    "truncate_prompt_tokens": ((None,), "cut the prompt's token ids before you pass them"),
    "extra_args": ((None, {}), "leave it out"),
    "flat_logprobs": ((None, False), "logprobs are lists of dicts; leave it out"),
    "skip_clone": ((None, False, True), ""),
    "skip_reading_prefix_cache": ((None, False), "use a cache_salt of the prompt"),
    "thinking_token_budget": ((None,), "use max_tokens; the server takes it in chats"),
    "use_beam_search": ((None, False), "use LLM.beam_search with BeamSearchParams"),
    "length_penalty": ((None, 1.0, 1), "use LLM.beam_search with BeamSearchParams"),
    "early_stopping": ((None, False), "use LLM.beam_search with BeamSearchParams"),
    "prompt_adapter_request": ((None,), "leave it out"),
}
_RENAMED = {"guided_decoding": "structured_outputs", "max_new_tokens": "max_tokens"}


def read_output_kind(name: str, value: object) -> RequestOutputKind:
    """Return a RequestOutputKind for an instance, its number, or its name in any case."""
    if isinstance(value, str) and value.upper() in RequestOutputKind.__members__:
        return RequestOutputKind[value.upper()]
    if isinstance(value, int) and not isinstance(value, bool) and value in tuple(RequestOutputKind):
        return RequestOutputKind(value)
    raise InvalidRequest(name, f"must be CUMULATIVE, DELTA or FINAL_ONLY, got {shown(value)}")


def translate_fields(given: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Translate vLLM's fields to those of SamplingParams, and leave out values without effect.

    Raises InvalidRequest for a field that is unknown, or whose value would change the answer and is not supported.
    """
    own: dict[str, Any] = {}
    extra = {name: value for name, value in given.items() if name in EXTRA_NAMES and "extra" in known}
    if extra and given.get("extra") is not None:
        raise InvalidRequest(next(iter(extra)), "is given beside extra, which can hold it too", "give it in one place")
    if extra:
        own["extra"] = extra
    for name, value in given.items():
        if name in extra or (name == "extra" and extra):
            continue
        if name in known:
            own[name] = value
        elif name in _RENAMED:
            if value is not None and given.get(_RENAMED[name]) is not None:
                raise InvalidRequest(name, f"is another name of {_RENAMED[name]}, which is given too", "give one")
            if value is not None:
                own[_RENAMED[name]] = value
        elif name in _NO_EFFECT:
            neutral, fix = _NO_EFFECT[name]
            if not any(value is one or (type(value) is type(one) and value == one) for one in neutral):
                raise InvalidRequest(name, f"{shown(value)} is not supported", fix)
        else:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            fix = f"did you mean {close[0]}?" if close else f"known are: {', '.join(sorted(known))}"
            raise InvalidRequest(name, "is no sampling parameter", fix)
    return own
