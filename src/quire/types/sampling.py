"""How the next token of a sequence is chosen, in the names vLLM's users know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from quire.types.errors import InvalidRequest

MAX_N = 16_384
MAX_LOGPROBS = 1_000
MAX_STOP_STRINGS = 1_024
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a user may ask of decoding. Frozen and fully validated when made; unknown arguments are errors.

    Logprobs are raw: log-softmax of the model's logits before temperature, penalties and filters.
    """

    n: int = 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Iterable[str] | None = ()
    stop_token_ids: Iterable[int] | None = ()
    bad_words: Iterable[str] | None = ()
    allowed_token_ids: Iterable[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to max_model_len
    min_tokens: int = 0
    logprobs: int | None = None  # -1: the whole vocabulary
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _freeze(self)
        _check_numbers(self)
        _check_lists(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stops(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple)
        return self.stop


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What the text floor resolved from words to ids for one request."""

    end_ids: tuple[int, ...] = ()  # ids that end a sequence: eos (unless ignored) and stop_token_ids
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    eos_ids: tuple[int, ...] = field(default=())  # the subset of end_ids that is the model's own end of text


def _freeze(params: SamplingParams) -> None:
    put = object.__setattr__
    stop = params.stop
    put(params, "stop", () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop))
    put(params, "stop_token_ids", tuple(params.stop_token_ids or ()))
    put(params, "bad_words", tuple(params.bad_words or ()))
    if params.allowed_token_ids is not None:
        put(params, "allowed_token_ids", tuple(params.allowed_token_ids))
    if params.logit_bias is not None:
        try:
            put(params, "logit_bias", {int(k): float(v) for k, v in params.logit_bias.items()})
        except (TypeError, ValueError, AttributeError):
            raise InvalidRequest("logit_bias", "must map token ids to numbers", "pass {token_id: bias}") from None
    if params.top_k == -1:
        put(params, "top_k", 0)


# field: (lowest, highest, is the lowest itself allowed)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "n": (1, MAX_N, True),
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "top_k": (0, 2**31 - 1, True),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, 100.0, False),
    "seed": (0, MAX_SEED, True),
    "max_tokens": (1, 2**31 - 1, True),
    "min_tokens": (0, 2**31 - 1, True),
    "logprobs": (-1, MAX_LOGPROBS, True),
    "prompt_logprobs": (-1, MAX_LOGPROBS, True),
}
_INTEGERS = {"n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"}
_OPTIONAL = {"seed", "max_tokens", "logprobs", "prompt_logprobs"}


def _check_numbers(params: SamplingParams) -> None:
    for name, (low, high, closed) in _RANGES.items():
        value = getattr(params, name)
        if value is None and name in _OPTIONAL:
            continue
        kinds: tuple[type, ...] = (int,) if name in _INTEGERS else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            wanted = "a whole number" if name in _INTEGERS else "a number"
            raise InvalidRequest(name, f"must be {wanted}, got {value!r}")
        if not math.isfinite(value) or value > high or value < low or (value == low and not closed):
            bracket = "[" if closed else "("
            raise InvalidRequest(name, f"must be in {bracket}{low}, {high}], got {value!r}", "choose a value inside it")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            "min_tokens", f"is {params.min_tokens}, above max_tokens={params.max_tokens}", "lower it or raise max_tokens"
        )
    for item in fields(params):
        if item.type == "bool" and not isinstance(getattr(params, item.name), bool):
            raise InvalidRequest(item.name, f"must be true or false, got {getattr(params, item.name)!r}")


def _check_lists(params: SamplingParams) -> None:
    if len(params.stops) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"has {len(params.stops)} strings, limit {MAX_STOP_STRINGS}", "send fewer")
    for name in ("stop", "bad_words"):
        for word in getattr(params, name):
            if not isinstance(word, str) or not word:
                raise InvalidRequest(name, f"must hold non-empty strings, got {word!r}")
    if params.stops and not params.detokenize:
        raise InvalidRequest("stop", "needs text, but detokenize is false", "use stop_token_ids or set detokenize=True")
    for name in ("stop_token_ids", "allowed_token_ids"):
        for token in getattr(params, name) or ():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise InvalidRequest(name, f"must hold token ids (whole numbers from 0), got {token!r}")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids", "is empty, so no token could be chosen", "name at least one id or leave it out")
    for token, bias in (params.logit_bias or {}).items():
        if token < 0 or not math.isfinite(bias):
            raise InvalidRequest("logit_bias", f"{token}: {bias} needs a token id from 0 and a finite number")
