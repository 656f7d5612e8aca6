"""Samplers beyond temperature, top_p, top_k and min_p, by the names of llama.cpp and text-generation-webui."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.types.errors import InvalidRequest
from quire.types.value_checks import Number, Whole, read_items, shown

MAX_DRY_LENGTH = 64  # of dry_allowed_length; the penalty stops growing this many tokens above it
MAX_NGRAM = 64
MAX_BREAKERS = 1_024
MAX_BREAKER_CHARACTERS = 16_384
DRY_BREAKERS = ("\n", ":", '"', "*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraSamplers:
    """Rarely used samplers of one request. The defaults turn them off. Raises InvalidRequest for invalid values.

    The filters (`typical_p`, `top_a`, `top_n_sigma`, `xtc_*`, `dynatemp_*`) change nothing where sampling is greedy.
    """

    typical_p: float = 1.0  # 1: off
    top_a: float = 0.0
    top_n_sigma: float = 0.0  # 0 or -1: off
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # tokens of the context that are searched; -1: all
    dry_sequence_breakers: Iterable[str] = DRY_BREAKERS
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))

    @property
    def uses_dry(self) -> bool:
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0

    @property
    def breakers(self) -> tuple[str, ...]:
        """`dry_sequence_breakers` with its type after validation."""
        assert isinstance(self.dry_sequence_breakers, tuple)
        return self.dry_sequence_breakers


def _sigma(name: str, value: object) -> float:
    return max(Number(-1.0, 100.0)(name, value), 0.0)


def _breakers(name: str, value: object) -> tuple[str, ...]:
    texts = read_items(name, value, "a list of strings")
    if len(texts) > MAX_BREAKERS:
        raise InvalidRequest(name, f"has {len(texts)} strings, limit {MAX_BREAKERS}", "send fewer")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_BREAKER_CHARACTERS:
            raise InvalidRequest(
                name, f"must hold strings of 1 to {MAX_BREAKER_CHARACTERS} characters, got {shown(text)}"
            )
    return texts


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "typical_p": Number(0.0, 1.0, is_open=True),
    "top_a": Number(0.0, 1.0),
    "top_n_sigma": _sigma,
    "xtc_probability": Number(0.0, 1.0),
    "xtc_threshold": Number(0.0, 1.0),
    "dynatemp_range": Number(0.0, 100.0),
    "dynatemp_exponent": Number(0.0, 100.0),
    "dry_multiplier": Number(0.0, 100.0),
    "dry_base": Number(1.0, 100.0),
    "dry_allowed_length": Whole(1, MAX_DRY_LENGTH),
    "dry_penalty_last_n": Whole(-1, 2**31 - 1),
    "dry_sequence_breakers": _breakers,
    "no_repeat_ngram_size": Whole(0, MAX_NGRAM),
}
EXTRA_NAMES = tuple(item.name for item in fields(ExtraSamplers))


def read_extra(name: str, value: object) -> ExtraSamplers | None:
    """Return the samplers of a mapping; None if it turns none on."""
    if isinstance(value, Mapping):
        if unknown := [key for key in value if key not in EXTRA_NAMES]:
            raise InvalidRequest(f"{name}.{unknown[0]!s:.80}", "is not known", f"known are: {', '.join(EXTRA_NAMES)}")
        value = ExtraSamplers(**value)
    if value is not None and not isinstance(value, ExtraSamplers):
        raise InvalidRequest(name, f"must be an object of samplers, got {shown(value)}")
    return None if value == _NONE else value


_NONE = ExtraSamplers()
