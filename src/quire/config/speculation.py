"""The settings of speculative decoding, with the names of vLLM, and their resolution for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from quire.config.model import EagleHead, ModelConfig
from quire.types.errors import ConfigError

Method = Literal["ngram", "draft_model", "self_draft", "eagle3", "mtp"]
METHODS: tuple[Method, ...] = get_args(Method)
MTP_NAMES = (  # other names of "mtp"
    "nextn", "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "mimo_mtp",
    "ernie_mtp",
)  # fmt: skip
MAX_TOKENS = 64  # longest draft, in tokens
MAX_LOOKUP = 32  # longest n-gram, in tokens
# Default maximum length of drafts; the engine adapts the length up to it. N-gram drafts cost nothing, models run once
# per token.
DEFAULT_TOKENS: dict[Method, int] = {"ngram": 16, "draft_model": 5, "self_draft": 3, "eagle3": 5, "mtp": 3}
DEFAULT_LOOKUP = (2, 4)
SELF_DRAFT_SHARE = 3  # self_draft runs the first 1 / SELF_DRAFT_SHARE of the layers by default

_SETTING = "speculative_config"
DRAFT_MODEL = f"{_SETTING}.model"  # the setting that names a draft model
_FIELDS: dict[Method, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": ("model",),
    "self_draft": ("num_layers",),
    "eagle3": ("model",),
    "mtp": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How draft tokens are proposed. The model verifies them in one step.

    `resolve_speculation` sets `draft`, the shape of the draft model `model` or of the model's own head, or the default
    of `num_layers`. If the draft model is an EAGLE head, the method becomes "eagle3".
    """

    method: Method
    num_tokens: int  # maximum length of a draft
    lookup_min: int = DEFAULT_LOOKUP[0]  # ngram: length of the shortest n-gram that is looked up
    lookup_max: int = DEFAULT_LOOKUP[1]  # ngram: length of the longest n-gram that is looked up
    model: str | None = None  # draft_model, eagle3: name or path of the draft model, or of the head
    num_layers: int | None = None  # self_draft: the first layers, which propose the draft tokens
    draft: ModelConfig | None = None


def read_speculation(value: Mapping[str, Any] | None) -> SpeculationConfig | None:
    """Parse `speculative_config`. Raises ConfigError naming the field, the limit and the fix."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(_SETTING, f"must be an object, got {value!r}", 'write for example {"method": "ngram"}')
    method = _method(value)
    own = ("method", "num_speculative_tokens", *_FIELDS[method])
    for name in value:
        if name not in own:
            known = any(name in names for names in _FIELDS.values())
            reason = f"has no meaning with method {method!r}" if known else "is unknown"
            raise ConfigError(f"{_SETTING}.{name}", reason, f"fields are {', '.join(own)}")
    settings: dict[str, Any] = {"num_tokens": _whole(value, "num_speculative_tokens", MAX_TOKENS)}
    settings["num_tokens"] = settings["num_tokens"] or DEFAULT_TOKENS[method]
    if method == "ngram":
        settings["lookup_min"], settings["lookup_max"] = _lookup(value)
    elif "model" in _FIELDS[method]:
        settings["model"] = _model(value.get("model"))
    elif method == "self_draft":
        settings["num_layers"] = _whole(value, "num_layers", 10_000)
    return SpeculationConfig(method=method, **settings)


def resolve_speculation(config: SpeculationConfig, target: ModelConfig, draft: ModelConfig | None) -> SpeculationConfig:
    """Complete the settings for a target model. `draft` is the draft model, if there is one. Raises ConfigError."""
    if draft is not None and draft.recurrent is not None:
        reason = "has recurrent layers, whose state cannot go back to before a rejected draft"
        raise ConfigError(f"{_SETTING}.model", reason, "choose a draft model without recurrent layers")
    if config.method == "self_draft" and target.recurrent is not None:
        reason = "drafts with the model's first layers, and the state of recurrent ones cannot go back"
        raise ConfigError(f"{_SETTING}.method", reason, 'use "ngram", or a draft model without recurrent layers')
    if config.method == "self_draft":
        layers = config.num_layers or max(1, target.num_layers // SELF_DRAFT_SHARE)
        if layers >= target.num_layers:
            reason = f"must be below the model's {target.num_layers} layers, got {layers}"
            raise ConfigError(f"{_SETTING}.num_layers", reason, "lower it; a third is usual")
        return replace(config, num_layers=layers)
    if draft is not None and draft.eagle is not None:
        return replace(config, method="eagle3", draft=_fit_head(draft, draft.eagle, target))
    if config.method == "mtp":
        assert draft is not None, "the config of the head was not read"
        return replace(config, draft=draft)
    if config.method == "eagle3":
        reason = "is a complete model: its config.json does not describe an EAGLE-3 head"
        raise ConfigError(f"{_SETTING}.model", reason, 'name an EAGLE-3 head, or set "method" to "draft_model"')
    if config.method == "draft_model":
        assert draft is not None, "the draft model was not read"
        if draft.vocab_size != target.vocab_size:
            sizes = f"has {draft.vocab_size} tokens in its vocabulary, the model {target.vocab_size}"
            raise ConfigError(f"{_SETTING}.model", sizes, "choose a draft model of the same family")
        return replace(config, draft=draft)
    return config


def _fit_head(draft: ModelConfig, head: EagleHead, target: ModelConfig) -> ModelConfig:
    """Return the EAGLE head with the target's layers that it reads filled in. Raises ConfigError if it does not fit the
    target."""
    setting, fix = f"{_SETTING}.model", "choose a head that was trained for this model"
    for size, what in (("hidden_size", "numbers in a hidden state"), ("vocab_size", "tokens in its vocabulary")):
        own, wanted = getattr(draft, size), getattr(target, size)
        if own != wanted:
            raise ConfigError(setting, f"is an EAGLE head for {own} {what}, the model has {wanted}", fix)
    lacks = {
        "recurrent layers": target.recurrent is not None,
        "attention over latents": target.latent is not None,
        "two kinds of heads": target.local_heads is not None,
        "a vision tower": target.vision is not None,
        "several residual streams": target.streams > 1,
        "scaled embeddings": target.embedding_scale != 1.0,
    }
    for what, is_there in lacks.items():
        if is_there:
            reason = f"is an EAGLE head, and {target.architecture} models of this config have {what}"
            raise ConfigError(setting, reason, 'use "ngram" or a draft model')
    count = target.num_layers
    layers = head.layers or (2, count // 2, count - 3)
    if layers[-1] >= count or layers != tuple(sorted(set(layers))):
        reason = f"reads what layers {', '.join(map(str, layers))} are given, and the model has {count} layers"
        raise ConfigError(setting, reason, fix)
    return replace(draft, eagle=replace(head, layers=layers))


def check_head(config: SpeculationConfig | None, *, layout: str, has_tiers: bool) -> None:
    """Raise ConfigError for settings that do not work with an EAGLE or MTP head."""
    if config is None or config.method not in ("eagle3", "mtp"):
        return
    setting, whose = f"{_SETTING}.model", "is an EAGLE head, which reads hidden states of the model"
    if config.method == "mtp":
        setting, whose = f"{_SETTING}.method", "drafts by the MTP head, which reads hidden states of the model"
    if layout != "paged":
        raise ConfigError(setting, f"{whose} by block, and kv_layout is {layout!r}", 'set kv_layout to "paged"')
    if has_tiers:
        reason = f"{whose}, and tiers behind the device (host_cache_memory, swap_space) do not keep them"
        raise ConfigError(setting, reason, "leave the tiers out, or use a draft model")


def _method(value: Mapping[str, Any]) -> Method:
    given = value.get("method", "draft_model" if "model" in value else None)
    for method in METHODS:
        if given == method:
            return method
    if isinstance(given, str) and given.lower() in MTP_NAMES:
        return "mtp"
    names = " or ".join(f'"{name}"' for name in METHODS)
    reason = "is missing" if given is None else f"{given!r} is unknown"
    raise ConfigError(f"{_SETTING}.method", reason, f"use {names}")


def _lookup(value: Mapping[str, Any]) -> tuple[int, int]:
    least, most = (_whole(value, f"prompt_lookup_{side}", MAX_LOOKUP) for side in ("min", "max"))
    if most is None:
        most = max(DEFAULT_LOOKUP[1], least or 0)
    if least is None:
        least = min(DEFAULT_LOOKUP[0], most)
    if least > most:
        reason = f"is {least}, above prompt_lookup_max={most}"
        raise ConfigError(f"{_SETTING}.prompt_lookup_min", reason, "lower it or raise prompt_lookup_max")
    return least, most


def _model(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        reason = "is missing" if value is None else f"must be a name, got {value!r}"
        raise ConfigError(f"{_SETTING}.model", reason, "name a smaller model with the same vocabulary")
    return value


def _whole(value: Mapping[str, Any], name: str, most: int) -> int | None:
    number = value.get(name)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
        raise ConfigError(f"{_SETTING}.{name}", f"must be a whole number in [1, {most}], got {number!r}")
    return number
