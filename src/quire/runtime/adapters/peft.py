"""adapter_config.json as PEFT writes it: the ranks and scales of an adapter's modules."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from quire.types.errors import InvalidRequest

CONFIG = "adapter_config.json"
_PLAIN = re.compile(r"[\w.-]+")  # a name, which needs no regular expression
_MOST_EXPRESSIONS, _MOST_CHARACTERS = 64, 256
_MOST_WAYS, _LONG_NAME = 8_192, 64  # in which an expression may fit a name; characters of a name, to count ways
_MERGE = "merge it into the model's weights (PEFT: merge_and_unload) and serve the result"
# What changes the outputs of a model and is not computed here, with what to do instead.
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
_STRAIGHT = (0, 19)  # before this PEFT took every stacked parameter to be [experts, inputs, outputs]
_CHANGES_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that change the model's weights


@dataclass(frozen=True, slots=True)
class ModulePatterns:
    """Numbers of the modules whose names end with a pattern. If several patterns fit a name, the first one counts."""

    names: Mapping[str, tuple[int, float]]  # patterns without metacharacters: their places and numbers
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
    """The settings of a LoRA adapter that matter for its outputs."""

    rank: int
    alpha: float
    uses_rslora: bool = False
    by_inputs: bool = False  # the model stores its matrices by inputs, then outputs
    ranks: ModulePatterns = _NO_PATTERNS
    alphas: ModulePatterns = _NO_PATTERNS
    parameters: frozenset[str] = frozenset()  # the ends of names of parameters that the adapter was trained for
    takes_inputs_first: bool = False  # A is of the second dimension of stacked parameters, also where these are outputs

    def pattern_name(self, module: str) -> str:
        """What the patterns know a linear module as."""
        parts = f"{module}.weight".split(".")
        is_parameter = any(".".join(parts[first:]) in self.parameters for first in range(len(parts)))
        return f"{module}.weight" if is_parameter else module

    def rank_of(self, module: str) -> int:
        found = self.ranks.find(module)
        return self.rank if found is None else int(found)

    def scale_of(self, module: str) -> float:
        """What the product of a module's A and B is multiplied by."""
        rank, found = self.rank_of(module), self.alphas.find(module)
        alpha = self.alpha if found is None else found
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)


def read_peft_config(values: Mapping[str, object]) -> PeftConfig:
    """Raises InvalidRequest for what is wrong or not supported, naming it."""
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
    """PEFT takes patterns as regular expressions. Those that could take long to match are refused."""
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
    plain = re.sub(r"\\.", "a", pattern)  # without escapes
    quantifiers, groups = len(re.findall(r"[*+?{]", plain)), plain.count("(") + 1
    # Each quantifier may stop anywhere in a name; a group has as many ways as alternatives.
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
        return True  # PEFT says its version from 0.18 on
    found = _VERSION.match(version) if isinstance(version, str) else None
    return found is not None and (int(found[1]), int(found[2])) < _STRAIGHT


def _rank(value: object, key: str) -> int:
    if type(value) is not int or value < 1:
        refuse(key, f"must be a whole number above 0, is {value!r:.80}")
    return value


def _number(value: object, key: str) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float):
        with suppress(OverflowError):  # a whole number beyond any float
            if math.isfinite(value):
                return float(value)
    refuse(key, f"must be a number, is {value!r:.80}")


def _flag(values: Mapping[str, object], key: str) -> bool:
    value = values.get(key) or False
    if not isinstance(value, bool):
        refuse(key, f"must be true or false, is {value!r}")
    return value
