"""Reads adapter_config.json as written by PEFT: the ranks and scales of an adapter's modules."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from quire.types.errors import InvalidRequest

CONFIG = "adapter_config.json"
_PLAIN = re.compile(r"[\w.-]+")  # a plain name, matched without a regular expression
_MOST_EXPRESSIONS, _MOST_CHARACTERS = 64, 256
_MOST_WAYS, _LONG_NAME = 8_192, 64  # bounds on regular expressions: ways to match a name of so many characters
_MERGE = "merge it into the model's weights (PEFT: merge_and_unload) and serve the result"
# Settings that change a model's outputs and are not supported, with what to do instead.
_REFUSED = {
    "use_dora": "DoRA is not supported: train with use_dora=false, or " + _MERGE,
    "lora_bias": "biases of adapters are not supported: train with lora_bias=false",
    "modules_to_save": "whole modules in adapters are not supported: train without modules_to_save, or " + _MERGE,
    "trainable_token_indices": "new embeddings are not supported: " + _MERGE,
    "layer_replication": "models with replicated layers are not supported: " + _MERGE,
    "alora_invocation_tokens": "activated LoRA is not supported: train plain LoRA",
    "megatron_config": "Megatron's layers are not supported: train plain LoRA",
    "use_qalora": "QA-LoRA is not supported: train plain LoRA",
    "use_bdlora": "block-diagonal LoRA is not supported: train plain LoRA",
    "arrow_config": "Arrow is not supported: serve one adapter",
    "monteclora_config": "MonteCLoRA is not supported: train plain LoRA",
}
_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})")
_STRAIGHT = (0, 19)  # before this version PEFT assumed stacked parameters to be [experts, inputs, outputs]
_CHANGES_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that change the model's weights


@dataclass(frozen=True, slots=True)
class ModulePatterns:
    """Values for modules whose names end with a pattern. If several patterns match a name, the first one counts."""

    names: Mapping[str, tuple[int, float]]  # patterns without metacharacters: (position, value)
    expressions: Sequence[tuple[int, re.Pattern[str], float]]

    def find(self, module: str) -> float | None:
        parts = module.split(".")
        ends = (".".join(parts[first:]) for first in range(len(parts)))
        found = [self.names[end] for end in ends if end in self.names]
        found += [(place, value) for place, pattern, value in self.expressions if pattern.match(module)]
        return min(found)[1] if found else None


_NO_PATTERNS = ModulePatterns({}, ())


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings of a LoRA adapter that affect its outputs."""

    rank: int
    alpha: float
    uses_rslora: bool = False
    by_inputs: bool = False  # the model stores its matrices transposed (fan_in_fan_out)
    ranks: ModulePatterns = _NO_PATTERNS
    alphas: ModulePatterns = _NO_PATTERNS
    parameters: frozenset[str] = frozenset()  # `target_parameters`: suffixes of parameter names
    takes_inputs_first: bool = False  # A belongs to dim 1 of stacked parameters, even if that is outputs

    def pattern_name(self, module: str) -> str:
        """Return the name of a linear module that patterns are matched against."""
        parts = f"{module}.weight".split(".")
        is_parameter = any(".".join(parts[first:]) in self.parameters for first in range(len(parts)))
        return f"{module}.weight" if is_parameter else module

    def rank_of(self, module: str) -> int:
        found = self.ranks.find(module)
        return self.rank if found is None else int(found)

    def scale_of(self, module: str) -> float:
        """Return the factor on the product of a module's A and B."""
        rank, found = self.rank_of(module), self.alphas.find(module)
        alpha = self.alpha if found is None else found
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)


def read_peft_config(values: Mapping[str, object]) -> PeftConfig:
    """Read the config. Raises InvalidRequest, naming the key, for invalid or unsupported settings."""
    kind = values.get("peft_type", "LORA")
    if kind != "LORA":
        refuse("peft_type", f"is {kind!r}, only LORA is supported", "train a LoRA adapter")
    for key, reason in _REFUSED.items():
        if values.get(key):
            refuse(key, f"is set: {reason.partition(': ')[0]}", reason.partition(": ")[2])
    if values.get("bias", "none") != "none":
        refuse("bias", f"is {values['bias']!r}: biases of adapters are not supported", "train with bias='none'")
    begin = values.get("init_lora_weights", True)
    if isinstance(begin, str) and begin.lower().startswith(_CHANGES_THE_MODEL):
        reason = f"is {begin!r}: the adapter belongs to weights that were changed when its training began"
        refuse("init_lora_weights", reason, "convert it to plain LoRA when you save it (path_initial_model_for_weight_conversion)")  # fmt: skip # noqa: E501
    return PeftConfig(
        rank=_rank(values.get("r"), "r"),
        alpha=_number(values.get("lora_alpha"), "lora_alpha"),
        uses_rslora=_flag(values, "use_rslora"),
        by_inputs=_flag(values, "fan_in_fan_out"),
        ranks=_patterns(values, "rank_pattern", _rank),
        alphas=_patterns(values, "alpha_pattern", _number),
        parameters=_parameters(values.get("target_parameters") or []),
        takes_inputs_first=_is_old(values.get("peft_version")),
    )


def refuse(key: str, reason: str, fix: str = "") -> NoReturn:
    raise InvalidRequest("lora_path", f"{CONFIG}: {key} {reason}", fix)


def _patterns(values: Mapping[str, object], key: str, read: Callable[[object, str], float]) -> ModulePatterns:
    """Read patterns, which PEFT treats as regular expressions. Refuses those that could take long to match."""
    found = values.get(key) or {}
    if not isinstance(found, dict):
        refuse(key, "must be an object of patterns")
    names, expressions = {}, []
    for place, (pattern, value) in enumerate(found.items()):
        where = f"{key}.{pattern[:80]}"
        if len(pattern) > _MOST_CHARACTERS:
            refuse(where, f"has {len(pattern)} characters, the limit is {_MOST_CHARACTERS}")
        number = read(value, where)
        if _PLAIN.fullmatch(pattern):
            names[pattern] = (place, number)
        else:
            expressions.append((place, _expression(pattern, where), number))
    if len(expressions) > _MOST_EXPRESSIONS:
        reason = f"has {len(expressions)} regular expressions, the limit is {_MOST_EXPRESSIONS}"
        refuse(key, reason, "name modules as they are called")
    return ModulePatterns(names, expressions)


def _expression(pattern: str, where: str) -> re.Pattern[str]:
    plain = re.sub(r"\\.", "a", pattern)  # with escapes replaced
    quantifiers, groups = len(re.findall(r"[*+?{]", plain)), plain.count("(") + 1
    # Each quantifier can stop at any character of a name; a group multiplies the ways by its alternatives.
    ways = _LONG_NAME**quantifiers * (1 + plain.count("|") / groups) ** groups
    if "(?" in pattern or re.search(r"\)[*+?{]", plain) or ways > _MOST_WAYS:
        refuse(where, "is too complex a pattern", "name modules as they are called")
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError, RecursionError) as error:
        refuse(where, f"is no regular expression: {error}")


def _parameters(found: object) -> frozenset[str]:
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        refuse("target_parameters", "must be a list of names")
    return frozenset(found)


def _is_old(version: object) -> bool:
    if version is None:
        return True  # PEFT stores its version from 0.18 on
    found = _VERSION.match(version) if isinstance(version, str) else None
    return found is not None and (int(found[1]), int(found[2])) < _STRAIGHT


def _rank(value: object, key: str) -> int:
    if type(value) is not int or value < 1:
        refuse(key, f"must be a whole number above 0, is {value!r:.80}")
    return value


def _number(value: object, key: str) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float):
        with suppress(OverflowError):  # an integer too large for a float
            if math.isfinite(value):
                return float(value)
    refuse(key, f"must be a number, is {value!r:.80}")


def _flag(values: Mapping[str, object], key: str) -> bool:
    value = values.get(key) or False
    if not isinstance(value, bool):
        refuse(key, f"must be true or false, is {value!r}")
    return value
