"""GGUF files of Gemma 2 and 3."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.models import gguf_config
from quire.runtime.models.family import GGUF_INNER, GgufFamily


def read_gemma2(fields: Fields, config: ModelConfig) -> ModelConfig:
    caps = (fields.number("attn_logit_softcapping", 50.0), fields.number(gguf_config.LOGIT_CAP, 30.0))
    config = replace(config, attention_softcap=caps[0], logit_softcap=caps[1])
    return _finish(fields, config, every=2, deepest=46)


def read_gemma3(fields: Fields, config: ModelConfig) -> ModelConfig:
    local, cap = gguf_config.read_local_rope(fields, config), fields.optional_number(gguf_config.LOGIT_CAP)
    config = replace(config, qk_norm=True, local_rope=local, logit_softcap=cap)
    return _finish(fields, config, every=6, deepest=62)


def _finish(fields: Fields, config: ModelConfig, *, every: int, deepest: int) -> ModelConfig:
    """Set what GGUF files omit. `deepest`: the number of layers of the family's largest model, the only one that does
    not scale scores by the head size."""
    windows = gguf_config.read_windows(fields, every, usual=4_096)
    size = config.hidden_size // config.heads.num_query if config.num_layers == deepest else config.heads.dim
    return replace(
        config, windows=windows, attention_scale=size**-0.5, activation="gelu_tanh",
        embedding_scale=config.hidden_size**0.5,
    )  # fmt: skip


GEMMA_INNER = GGUF_INNER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF2 = GgufFamily(
    inner=GEMMA_INNER, norm_offset=1.0, read=read_gemma2,
    settings=frozenset({"attn_logit_softcapping", gguf_config.LOGIT_CAP, gguf_config.WINDOW, gguf_config.PATTERN}),
)  # fmt: skip
GGUF3 = replace(
    GGUF2, read=read_gemma3, settings=GGUF2.settings - {"attn_logit_softcapping"} | {gguf_config.LOCAL_THETA}
)
