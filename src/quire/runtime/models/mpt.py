"""MPT: layer norms without biases before attention and MLP, ALiBi in place of positions, perhaps a limit on queries,
keys and values, tied head."""

from __future__ import annotations

from typing import Any

from torch import nn

from quire.config.fields import Fields
from quire.config.model import Alibi, ModelConfig, Rope
from quire.runtime.layers.attention import SelfAttention
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.layer_norm import LayerNormKind
from quire.runtime.layers.qkv_changes import QkvLimit
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Projected, Stream
from quire.runtime.models.base import BaseModel
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import read_heads, refuse_other, refuse_set

WITHOUT_BIAS = LayerNormKind(has_bias=False)
_NORMS = ("low_precision_layernorm", "layernorm")  # compute the same, in other precisions


class MptAttention(SelfAttention):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        hidden, heads = config.hidden_size, config.heads
        super().__init__(
            build.column_linear("Wqkv", hidden, heads, bias=False),
            build.attention_of(config, layer),
            build.row_linear("out_proj", heads, hidden, bias=False),
        )
        self.limit = None if config.qkv_limit is None else QkvLimit(config.qkv_limit)

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # type: ignore[override]  # x: [tokens, hidden]
        qkv = self.qkv_proj(x)
        return self.out_proj.later(self.attention(qkv if self.limit is None else self.limit(qkv), step))


class MptBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self.norm_1 = build.layer_norm("norm_1", hidden, eps, WITHOUT_BIAS)
        self.attn = MptAttention(config, layer, build)
        self.norm_2 = build.layer_norm("norm_2", hidden, eps, WITHOUT_BIAS)
        self.ffn = build.plain_mlp(hidden, inner, config.activation, bias=False)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.attn(self.norm_1(x), step))
        x.add(self.ffn(self.norm_2(x)))


class MptStack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self.wte = build.embedding("wte", config.vocab_size, config.hidden_size)
        self.blocks = Blocks((MptBlock(config, layer, build) for layer in range(config.num_layers)), config)
        self.norm_f = build.layer_norm("norm_f", config.hidden_size, config.norm_eps, WITHOUT_BIAS)


class Mpt(BaseModel):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.transformer = MptStack(config, build)
        self.lm_head = build.lm_head("lm_head", self.transformer.wte, config)
        self.assemble(self.transformer.wte, self.transformer.blocks, self.transformer.norm_f, self.lm_head)


def read_mpt(config: Fields) -> ModelConfig:
    refuse_set(config, "no_bias", usual=True)
    if config.raw("logit_scale") is not None:
        raise config.refuse("logit_scale", "is not supported")
    if config.text("norm_type", _NORMS[0]) not in _NORMS:
        raise config.refuse("norm_type", "is not supported", fix=f"supported: {', '.join(_NORMS)}")
    ratio = config.integer("expansion_ratio", 4, least=1)
    hidden, inner = config.integer("d_model", least=1), section_of(config, "attn_config")
    refuse_other(inner, "attn_type", "multihead_attention")
    refuse_set(inner, "alibi", usual=True)
    for flag in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        refuse_set(inner, flag, usual=False)
    return ModelConfig(
        architecture="mpt",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=ratio * hidden,
        num_layers=config.integer("n_layers"),
        heads=read_heads(config, heads="n_heads", hidden="d_model"),
        rope=Rope(max_position=config.integer("max_seq_len", 2_048)),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation="gelu",
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_limit=read_limit(inner),
        attention_scale=inner.optional_number("softmax_scale"),
        alibi=Alibi(most=inner.number("alibi_bias_max", 8.0)),
    )


def read_limit(attention: Fields) -> float | None:
    """Read the limit on queries, keys and values; None: there is none."""
    limit = attention.optional_number("clip_qkv") or None
    if limit is not None and limit < 0:
        raise attention.refuse("clip_qkv", f"must be above 0, is {limit}")
    return limit


def section_of(config: Fields, key: str) -> Fields:
    """Return the settings of an inner object of config.json."""
    given: Any = config.raw(key)
    if given is not None and not isinstance(given, dict):
        raise config.refuse(key, "must be an object")
    prefix = f"{key}."
    return Fields(config.file, {prefix + name: value for name, value in (given or {}).items()}, prefix)


MPT = Family(name="mpt", build=Mpt, read=read_mpt, embedding="transformer.wte.weight")
