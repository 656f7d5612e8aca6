"""adapter_config.json as PEFT writes it: the ranks and scales of an adapter's modules."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from quire.types.errors import InvalidRequest

CONFIG = "adapter_config.json"
_MOST_PATTERNS, _MOST_CHARACTERS, _MOST_QUANTIFIERS = 4_096, 256, 4
_MERGE = "merge it into the model's weights (PEFT: merge_and_unload) and serve the result"
# What changes the outputs of a model and is not computed here, with what to do instead.
_REFUSED = {
    "use_dora": "DoRA is not supported: train with use_dora=false, or " + _MERGE,
    "lora_bias": "biases of adapters are not supported: train with lora_bias=false",
    "modules_to_save": "whole modules in adapters are not supported: train without modules_to_save, or " + _MERGE,
    "trainable_token_indices": "new embeddings are not supported: " + _MERGE,
    "target_parameters": "adapters of parameters (experts) are not supported: target linear modules, or " + _MERGE,
    "layer_replication": "models with replicated layers are not supported: " + _MERGE,
    "alora_invocation_tokens": "activated LoRA is not supported: train plain LoRA",
    "megatron_config": "Megatron's layers are not supported: train plain LoRA",
    "use_qalora": "QA-LoRA is not supported: train plain LoRA",
    "use_bdlora": "block-diagonal LoRA is not supported: train plain LoRA",
    "arrow_config": "Arrow is not supported: serve one adapter",
    "monteclora_config": "MonteCLoRA is not supported: train plain LoRA",
}
_CHANGES_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that change the model's weights


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings of a LoRA adapter that matter for its outputs."""

    rank: int
    alpha: float
    uses_rslora: bool = False
    by_inputs: bool = False  # the model stores its matrices by inputs, then outputs
    ranks: Mapping[str, int] = field(default_factory=dict)  # of modules whose names match
    alphas: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        key = _matching(self.ranks, module)
        return self.rank if key is None else self.ranks[key]

    def scale_of(self, module: str) -> float:
        """What the product of a module's A and B is multiplied by."""
        rank, key = self.rank_of(module), _matching(self.alphas, module)
        alpha = self.alpha if key is None else self.alphas[key]
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
        ranks={key: _rank(value, f"rank_pattern.{key}") for key, value in _patterns(values, "rank_pattern")},
        alphas={key: _number(value, f"alpha_pattern.{key}") for key, value in _patterns(values, "alpha_pattern")},
    )


def refuse(key: str, reason: str, fix: str = "") -> NoReturn:
    raise InvalidRequest("adapter", f"{CONFIG}: {key} {reason}", fix)


def _matching(patterns: Mapping[str, object], module: str) -> str | None:
    """The first pattern that a module's name ends with."""
    if not patterns:
        return None
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)


def _patterns(values: Mapping[str, object], key: str) -> list[tuple[str, object]]:
    """PEFT takes them as regular expressions. Those that could take long to match are refused."""
    found = values.get(key) or {}
    if not isinstance(found, dict) or len(found) > _MOST_PATTERNS:
        refuse(key, f"must be an object of at most {_MOST_PATTERNS} names")
    for pattern in found:
        quantifiers = re.findall(r"(?<!\\)[*+?{]", pattern)
        repeats_group = re.search(r"(?<!\\)\)[*+?{]", pattern) is not None
        if len(pattern) > _MOST_CHARACTERS or len(quantifiers) > _MOST_QUANTIFIERS or repeats_group:
            refuse(f"{key}.{pattern[:80]}", "is too complex a pattern", "name modules as they are called")
        try:
            re.compile(rf"(.*\.)?({pattern})$")
        except re.error as error:
            refuse(f"{key}.{pattern[:80]}", f"is no regular expression: {error}")
    return list(found.items())


def _rank(value: object, key: str) -> int:
    if type(value) is not int or value < 1:
        refuse(key, f"must be a whole number above 0, is {value!r}")
    return value


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        refuse(key, f"must be a number, is {value!r}")
    return float(value)


def _flag(values: Mapping[str, object], key: str) -> bool:
    value = values.get(key) or False
    if not isinstance(value, bool):
        refuse(key, f"must be true or false, is {value!r}")
    return value
