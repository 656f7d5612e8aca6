"""DBRX: MPT's layer norms and limit on queries, keys and values, rotary positions, and a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import Experts, Heads, ModelConfig, Rope
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models.base import BaseModel
from quire.runtime.models.family import Family, Stacked
from quire.runtime.models.hf_config import GATED, Activation, check_experts, read_activation, read_heads
from quire.runtime.models.hf_rope import read_rope
from quire.runtime.models.mpt import WITHOUT_BIAS, MptAttention, read_limit, section_of

_NAMES = ("w1", "v1", "w2")  # gate, up and down of an expert
_STACKED = {
    "mlp.w1": Stacked(("w1.weight",), flat=True),
    "mlp.v1": Stacked(("v1.weight",), flat=True),
    "mlp.w2": Stacked(("w2.weight",), flat=True, transposed=True),
}
_KEYS = ("moe_num_experts", "moe_top_k", "ffn_hidden_size")
_POWER = "moe_normalize_expert_weights"
_ACTIVATION = "ffn_config.ffn_act_fn."
_EPS = 1e-5


class DbrxMixer(nn.Module):
    """Attention and both norms of a block."""

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        self.norm_1 = build.layer_norm("norm_1", config.hidden_size, config.norm_eps, WITHOUT_BIAS)
        self.attn = MptAttention(config, layer, build)
        self.norm_2 = build.layer_norm("norm_2", config.hidden_size, config.norm_eps, WITHOUT_BIAS)


class DbrxBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        self.norm_attn_norm = DbrxMixer(config, layer, build)
        self.ffn = build.experts.moe_mlp(config, _NAMES, "router.layer")

    def forward(self, x: Stream, step: ForwardStep) -> None:
        mixer = self.norm_attn_norm
        x.add(mixer.attn(mixer.norm_1(x), step))
        x.add(self.ffn(mixer.norm_2(x)))


class DbrxStack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self.wte = build.embedding("wte", config.vocab_size, config.hidden_size)
        self.blocks = Blocks((DbrxBlock(config, layer, build) for layer in range(config.num_layers)), config)
        self.norm_f = build.layer_norm("norm_f", config.hidden_size, config.norm_eps, WITHOUT_BIAS)


class Dbrx(BaseModel):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.transformer = DbrxStack(config, build)
        self.lm_head = build.lm_head("lm_head", self.transformer.wte, config)
        self.assemble(self.transformer.wte, self.transformer.blocks, self.transformer.norm_f, self.lm_head)


def read_dbrx(config: Fields) -> ModelConfig:
    attention, mixture = section_of(config, "attn_config"), section_of(config, "ffn_config")
    heads = read_heads(config, heads="n_heads", hidden="d_model")
    num_kv = attention.integer("kv_n_heads", 1, least=1)
    if heads.num_query % num_kv:
        raise attention.refuse("kv_n_heads", f"must divide {heads.num_query} heads, is {num_kv}")
    experts = _read_experts(mixture)
    return ModelConfig(
        architecture="dbrx",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("d_model"),
        intermediate_size=experts.size,
        num_layers=config.integer("n_layers"),
        heads=Heads(heads.num_query, num_kv, heads.dim),
        rope=_read_rope(config, attention),
        norm_eps=_EPS,
        activation=_read_activation(mixture),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        qkv_limit=read_limit(attention),
        experts=experts,
    )


def _read_rope(config: Fields, attention: Fields) -> Rope:
    """Read the rotary positions. Files state their base among the settings of attention. transformers 5 writes one at
    the top too, which is its default whatever the model has."""
    rope = read_rope(config, config.integer("max_seq_len", 2_048))
    return replace(rope, theta=attention.number("rope_theta", rope.theta))


def _read_activation(mixture: Fields) -> Activation:
    given = mixture.raw("ffn_act_fn")
    if given is not None and not isinstance(given, dict):
        raise mixture.refuse("ffn_act_fn", "must be an object")
    own = Fields(mixture.file, {_ACTIVATION + key: value for key, value in (given or {}).items()}, _ACTIVATION)
    return read_activation(own, GATED, "name")


def _read_experts(mixture: Fields) -> Experts:
    power = mixture.values.get(f"ffn_config.{_POWER}", 1.0)
    if power not in (None, 1.0):
        raise mixture.refuse(_POWER, f"{power!r} is not supported", fix="supported: 1, null")
    num, used, size = map(mixture.integer, _KEYS, (4, 1, 3_584))
    return check_experts(mixture, Experts(num, used, size, is_normalized=power is not None), _KEYS)


DBRX = Family(name="dbrx", build=Dbrx, read=read_dbrx, stacked=_STACKED, embedding="transformer.wte.weight")
