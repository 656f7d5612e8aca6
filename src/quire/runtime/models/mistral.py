"""Models of Mistral AI beside Mistral: Ministral, some of whose layers have windows, Ministral 3, and the text part of
Mistral 3. And Meta's Code World Model, which has windows too."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import QUERY_SCALE, ModelConfig
from quire.runtime.models.decoder import Decoder, read_mistral
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import read_decoder, read_window, read_windows
from quire.runtime.models.hf_rope import read_rope

_TEXT_SIZES = {"num_hidden_layers": 40, "hidden_size": 5_120, "intermediate_size": 32_768, "vocab_size": 131_072,
               "num_attention_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e9,
               "sliding_window": None}  # fmt: skip
_LENGTH = "original_max_position_embeddings"
_MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, _LENGTH: 16_384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, QUERY_SCALE: 0.1,
}  # fmt: skip

_CWM_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    _LENGTH: 8_192,
}  # fmt: skip


def read_ministral(config: Fields) -> ModelConfig:
    windows = read_windows(config, read_window(config, 4_096), lambda layer: True)  # noqa: ARG005
    return read_decoder(config, "ministral", 131_072, num_kv_heads=8, windows=windows)


def read_ministral3(config: Fields) -> ModelConfig:
    """Queries of long sequences are scaled by their position."""
    window, length = read_window(config, None), config.integer("max_position_embeddings", 262_144)
    if not (config.raw("rope_parameters") or config.raw("rope_scaling")):
        config = config.changed({"rope_parameters": _MINISTRAL3_ROPE})
    rope = read_rope(config, length, more=(QUERY_SCALE, _LENGTH))
    if rope.scales_queries and _LENGTH not in dict(rope.scaling):
        raise config.refuse(f"rope_parameters.{_LENGTH}", "is missing", fix=f"{QUERY_SCALE} needs it")
    return read_decoder(
        config, "ministral3", 262_144, num_kv_heads=8, head_dim=128, norm_eps=config.number("rms_norm_eps", 1e-5),
        rope=rope,
        windows=() if window is None else (window,) * config.integer("num_hidden_layers"),
    )  # fmt: skip


def read_mistral3_text(config: Fields) -> ModelConfig:
    """Read the text model, which is a Mistral or a Ministral 3."""
    kind = config.text("model_type", "mistral")
    if kind == "ministral3":
        return replace(read_ministral3(config), architecture="mistral3")
    if kind not in ("mistral", "mistral3"):
        raise config.refuse(
            "text_config.model_type", f"{kind!r} is not supported", fix="supported: mistral, ministral3"
        )
    return replace(read_mistral(Fields(config.file, {**_TEXT_SIZES, **config.values})), architecture="mistral3")


def read_cwm(config: Fields) -> ModelConfig:
    windows = read_windows(config, read_window(config, 8_192), lambda layer: layer % 4 != 0)
    if not (config.raw("rope_parameters") or config.raw("rope_scaling")):
        config = config.changed({"rope_parameters": _CWM_ROPE})
    return read_decoder(
        config, "cwm", 131_072, head_dim=128, norm_eps=config.number("rms_norm_eps", 1e-5),
        mlp_bias=config.flag("mlp_bias", False), windows=windows,
        rope=read_rope(config, config.integer("max_position_embeddings", 131_072), theta=1e6),
    )  # fmt: skip


MINISTRAL = Family(name="ministral", build=Decoder, read=read_ministral)
CWM = Family(name="cwm", build=Decoder, read=read_cwm)
MINISTRAL3 = Family(name="ministral3", build=Decoder, read=read_ministral3)
