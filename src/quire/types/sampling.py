"""The sampling parameters of a request. Their names are those of vLLM."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from numbers import Integral
from operator import attrgetter
from typing import Any, TypeVar

from quire.types.decoding import StructuredOutputsParams, read_structured_outputs
from quire.types.errors import InvalidRequest
from quire.types.extra_samplers import ExtraSamplers, read_extra
from quire.types.value_checks import Number, Whole, check_flag, read_items, shown
from quire.types.vllm_sampling import RequestOutputKind, read_output_kind, translate_fields

MAX_N = 16_384
MAX_LOGPROBS = 1_000
MAX_LOGPROB_TOKENS = 1_024
MAX_STOP_STRINGS = 1_024
MAX_BAD_WORDS = 1_000
MAX_STOP_TOKENS = 1_024
MAX_BIASED_TOKENS = 1_024
MAX_LOGIT_BIAS = 10_000.0
MAX_SEED = 2**64 - 1
MAX_PATTERN_SIZE = 4_096
MAX_PATTERN_COUNT = 65_536
_Class = TypeVar("_Class")
_MANY_TOKENS = 128  # from this length on, checking token ids as an array is faster than a loop


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """When an answer counts as a loop: its last tokens repeat one pattern at least `min_count` times.

    A pattern has `min_pattern_size` to `max_pattern_size` tokens. Raises InvalidRequest for invalid values.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        name = "repetition_detection"
        Whole(1, MAX_PATTERN_SIZE)(f"{name}.max_pattern_size", self.max_pattern_size)
        Whole(1, MAX_PATTERN_SIZE)(f"{name}.min_pattern_size", self.min_pattern_size)
        Whole(2, MAX_PATTERN_COUNT)(f"{name}.min_count", self.min_count)
        if self.min_pattern_size > self.max_pattern_size:
            reason = f"is {self.min_pattern_size}, above max_pattern_size={self.max_pattern_size}"
            raise InvalidRequest(f"{name}.min_pattern_size", reason, "lower it or raise max_pattern_size")


def _take_vllm_fields(cls: type[_Class]) -> type[_Class]:
    """Let SamplingParams accept vLLM's fields that Quire names differently, and those with a value that has no
    effect."""
    known = frozenset(cls.__dataclass_fields__)  # type: ignore[attr-defined]

    @wraps(cls.__init__)
    def read(self: Any, **values: Any) -> None:
        _fill(self, values if values.keys() <= known else translate_fields(values, known))

    cls.__init__ = read  # type: ignore[method-assign]
    return cls


@_take_vllm_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of a request. Frozen and fully validated when made; unknown arguments raise
    InvalidRequest.

    Lists become tuples without duplicates. Logprobs are raw: the log-softmax of the model's logits before temperature,
    penalties and filters. `dataclasses.replace` makes a changed copy.
    """

    n: int = 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None or -1: the engine derives one
    stop: str | Iterable[str] | None = ()
    stop_token_ids: Iterable[int] | None = ()
    bad_words: Iterable[str] | None = ()
    allowed_token_ids: Iterable[int] | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to max_model_len
    min_tokens: int = 0
    logprobs: int | None = None  # report this many most likely tokens besides the chosen one; -1: all of the vocabulary
    prompt_logprobs: int | None = None  # the same for every prompt token but the first
    prompt_logprobs_start: int | None = None  # from this prompt token on; earlier tokens may come from the prefix cache
    logprob_token_ids: Iterable[int] | None = ()  # more tokens whose logprobs are returned; implies logprobs=0
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    repetition_detection: RepetitionDetection | Mapping[str, int] | None = None  # ends answers that repeat themselves
    best_of: int | None = None  # generate this many samples and return the n best; None: n
    rank_by: str = "mean"  # best_of ranks by the "mean" or the "sum" of the tokens' logprobs
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = field(default=None, hash=False)
    extra: ExtraSamplers | Mapping[str, Any] | None = field(default=None, hash=False)  # typical_p, DRY, XTC and others
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # what AsyncLLM.generate yields

    @classmethod
    def trusted(cls, **values: Any) -> SamplingParams:
        """Make an instance without checking its values. Fields that are not named get their defaults.

        The values must come from an instance that was validated before, for example in another process of this server.
        An unknown name raises InvalidRequest.
        """
        if not values.keys() <= _DEFAULTS.keys():
            unknown = next(name for name in values if name not in _DEFAULTS)
            raise InvalidRequest(unknown, "is no sampling parameter", "leave it out")
        params = object.__new__(cls)
        for write, default in _WRITE_DEFAULTS:
            write(params, default)
        for name, value in values.items():
            _WRITE_FIELD[name](params, value)
        return params

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Make an instance from values in which None means the default."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    def clone(self) -> SamplingParams:
        """Return a copy. An instance never changes, so this is the instance itself."""
        return self

    def changed_fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, by name. `trusted` makes an equal instance of them."""
        fields = zip(_DEFAULT_ITEMS, _read_values(self), strict=True)
        return {name: value for (name, default), value in fields if value is not default and value != default}

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop` with its type after validation."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def loops(self) -> RepetitionDetection | None:
        """`repetition_detection` with its type after validation."""
        assert not isinstance(self.repetition_detection, Mapping)
        return self.repetition_detection

    @property
    def num_sequences(self) -> int:
        """The number of samples to generate: best_of, or n."""
        return self.best_of or self.n

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """`structured_outputs` with its type after validation."""
        if self.structured_outputs is None:  # nearly always; isinstance(..., Mapping) is slower
            return None
        assert not isinstance(self.structured_outputs, Mapping)
        return self.structured_outputs

    @property
    def samplers(self) -> ExtraSamplers | None:
        """`extra` with its type after validation."""
        if self.extra is None:
            return None
        assert isinstance(self.extra, ExtraSamplers)
        return self.extra

    @property
    def ends_by_text(self) -> bool:
        """Whether the text of an answer can end it, so that its text must be checked after every token."""
        return bool(self.stop) or self.repetition_detection is not None


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What the serving layer derives from a request's parameters with the tokenizer: token ids and the grammar."""

    end_ids: tuple[int, ...] = ()  # tokens that end a sequence: eos (unless ignored) and stop_token_ids
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not occur in the output
    eos_ids: tuple[int, ...] = field(default=())  # those of end_ids that the model defines as end of sequence
    grammar: str = ""  # the grammar that the answer must match, in the format of llguidance; "": none
    dry_breakers: tuple[int, ...] = ()  # tokens that end the sequences which DRY compares
    grammar_digest: str = ""  # proves that the grammar was checked: see CheckedGrammar


def _stop(name: str, value: object) -> tuple[str, ...]:
    return _texts(name, (value,) if isinstance(value, str) else value, MAX_STOP_STRINGS)


def _bad_words(name: str, value: object) -> tuple[str, ...]:
    return _texts(name, value, MAX_BAD_WORDS)


def _texts(name: str, value: object, limit: int) -> tuple[str, ...]:
    texts = read_items(name, value, "a list of strings")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(name, f"must hold non-empty strings, got {shown(text)}")
    if len(texts) > limit:
        raise InvalidRequest(name, f"has {len(texts)} strings, limit {limit}", "send fewer")
    return texts


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    return tuple(_token_id(name, token) for token in read_items(name, value, "a list of token ids"))


def _stop_token_ids(name: str, value: object) -> tuple[int, ...]:
    return _few_token_ids(name, value, MAX_STOP_TOKENS)


def _logprob_token_ids(name: str, value: object) -> tuple[int, ...]:
    return _few_token_ids(name, value, MAX_LOGPROB_TOKENS)


def _few_token_ids(name: str, value: object, limit: int) -> tuple[int, ...]:
    ids = _token_ids(name, value)
    if len(ids) > limit:
        raise InvalidRequest(name, f"has {len(ids)} ids, limit {limit}", "send fewer")
    return ids


def _allowed_token_ids(name: str, value: object) -> tuple[int, ...] | None:
    ids = None if value is None else _token_ids(name, value)
    if ids == ():
        raise InvalidRequest(name, "is empty, so no token could be chosen", "name at least one id or leave it out")
    return ids


def _logit_bias(name: str, value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequest(name, f"must map token ids to numbers, got {shown(value)}", "pass {token_id: bias}")
    if len(value) > MAX_BIASED_TOKENS:
        raise InvalidRequest(name, f"has {len(value)} entries, limit {MAX_BIASED_TOKENS}", "send fewer")
    in_range = Number(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return {_token_id(name, _from_json_key(token)): in_range(name, bias) for token, bias in value.items()}


def _repetition_detection(name: str, value: object) -> RepetitionDetection | None:
    """Convert a mapping with the names of vLLM. A max_pattern_size of 0 means no detection, a min_pattern_size of 0
    means 1."""
    if value is None or isinstance(value, RepetitionDetection):
        return value
    known = ("max_pattern_size", "min_pattern_size", "min_count")
    if not isinstance(value, Mapping) or not set(value) <= set(known):
        raise InvalidRequest(name, f"must be an object of {', '.join(known)}, got {shown(value)}")
    sizes = {key: Whole(0, 2**31 - 1)(f"{name}.{key}", given) or 0 for key, given in value.items()}
    if not sizes.get("max_pattern_size"):
        return None
    return RepetitionDetection(**{**sizes, "min_pattern_size": sizes.get("min_pattern_size") or 1})


def _rank_by(name: str, value: object) -> str:
    if value not in ("mean", "sum"):
        raise InvalidRequest(name, f'must be "mean" or "sum", got {shown(value)}')
    return str(value)


def _from_json_key(token: object) -> object:
    """Convert a string of digits to an int, because JSON object keys are strings. Return anything else unchanged."""
    return int(token) if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 20 else token


def _token_id(name: str, token: object) -> int:
    if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < 2**31:
        raise InvalidRequest(name, f"must hold token ids (whole numbers from 0), got {shown(token)}")
    return int(token)


_CHECKS: dict[str, Any] = {
    "n": Whole(1, MAX_N),
    "temperature": Number(0.0, 100.0),
    "top_p": Number(0.0, 1.0, is_open=True),
    "top_k": Whole(0, 2**31 - 1, off=-1, default=0),
    "min_p": Number(0.0, 1.0),
    "presence_penalty": Number(-2.0, 2.0),
    "frequency_penalty": Number(-2.0, 2.0),
    "repetition_penalty": Number(0.01, 100.0),
    "seed": Whole(0, MAX_SEED, optional=True, off=-1),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "bad_words": _bad_words,
    "allowed_token_ids": _allowed_token_ids,
    "logit_bias": _logit_bias,
    "ignore_eos": check_flag,
    "max_tokens": Whole(1, 2**31 - 1, optional=True),
    "min_tokens": Whole(0, 2**31 - 1),
    "logprobs": Whole(-1, MAX_LOGPROBS, optional=True),
    "prompt_logprobs": Whole(-1, MAX_LOGPROBS, optional=True),
    "prompt_logprobs_start": Whole(0, 2**31 - 1, optional=True),
    "logprob_token_ids": _logprob_token_ids,
    "detokenize": check_flag,
    "skip_special_tokens": check_flag,
    "spaces_between_special_tokens": check_flag,
    "include_stop_str_in_output": check_flag,
    "repetition_detection": _repetition_detection,
    "best_of": Whole(1, MAX_N, optional=True),
    "rank_by": _rank_by,
    "structured_outputs": read_structured_outputs,
    "extra": read_extra,
    "output_kind": read_output_kind,
}


_DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(SamplingParams)}
_DEFAULT_ITEMS = tuple(_DEFAULTS.items())
_WRITE_FIELD: dict[str, Callable[[SamplingParams, Any], None]] = {
    name: getattr(SamplingParams, name).__set__ for name in _DEFAULTS
}
_WRITE_DEFAULTS = tuple((_WRITE_FIELD[name], default) for name, default in _DEFAULTS.items())
_read_values: Callable[[SamplingParams], tuple[Any, ...]] = attrgetter(*_DEFAULTS)


def _fill(params: SamplingParams, values: Mapping[str, Any]) -> None:
    """Set all fields of a new instance: those of `values`, which are checked, and the others to their defaults. This
    takes half the time of a frozen dataclass's own `__init__`."""
    for write, default in _WRITE_DEFAULTS:
        write(params, default)
    # Values that are the default object itself need no check. Compare by identity: True == 1 and 1.0 == 1.
    given = [(name, value) for name, value in values.items() if value is not _DEFAULTS[name]]
    if not given:
        return
    for name, value in given:
        _WRITE_FIELD[name](params, _CHECKS[name](name, value))
    if params.logprob_token_ids and params.logprobs is None:
        _WRITE_FIELD["logprobs"](params, 0)
    _check_together(params)


def _check_together(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        reason = f"is {params.min_tokens}, above max_tokens={params.max_tokens}"
        raise InvalidRequest("min_tokens", reason, "lower it or raise max_tokens")
    if params.best_of is not None and params.best_of < params.n:
        raise InvalidRequest("best_of", f"is {params.best_of}, below n={params.n}", "raise it or lower n")
    if params.prompt_logprobs_start is not None and params.prompt_logprobs is None:
        raise InvalidRequest("prompt_logprobs_start", "needs prompt_logprobs", "set that, or leave this out")
    if params.stops and not params.detokenize:
        raise InvalidRequest("stop", "needs text, but detokenize is false", "use stop_token_ids or set detokenize=True")
    if params.repetition_detection is not None and not params.detokenize:
        raise InvalidRequest("repetition_detection", "needs detokenize=True", "set it or leave this out")


def check_vocabulary(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidRequest if `ids` contain a token that is outside a vocabulary of `vocab_size` tokens."""
    tokens = ids if isinstance(ids, tuple | list | array) else tuple(ids)
    if isinstance(tokens, array) and tokens and _highest(tokens) < min(vocab_size, 2**31):
        return
    if len(tokens) >= _MANY_TOKENS and _are_below(tokens, vocab_size):
        return
    for token in tokens:
        if not 0 <= token < vocab_size:
            reason = f"names token {token}, outside the vocabulary [0, {vocab_size})"
            raise InvalidRequest(field, reason, f"use ids from 0 to {vocab_size - 1}")


def _are_below(tokens: Sequence[int], limit: int) -> bool:
    """Whether all tokens are whole numbers in [0, limit). `tokens` must not be empty."""
    try:
        packed = struct.pack(f"{len(tokens)}I", *tokens)
    except struct.error:  # an item is negative, too large or not a whole number
        return False
    return _highest(packed) < limit


def _highest(tokens: bytes | array[int]) -> int:
    """Return the highest of 32-bit tokens. A negative one counts as 2**31 or more."""
    import numpy as np  # the supervisor, which imports this module, does without it

    return int(np.maximum.reduce(np.frombuffer(tokens, np.uint32)))  # faster than ndarray.max()
