"""BERT with rotary positions: Nomic Embed with gated MLPs, and Jina Embeddings v3.

Queries, keys and values are one matrix. Norms follow the residual additions, as in BERT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import Encoder, ModelConfig
from quire.runtime.layers.attention import SelfAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.mlp import MLP, GatedMLP
from quire.runtime.models.bert import BERT_KEYS, Bert, BertBlock, encoder_families
from quire.runtime.models.bert_names import BERT_HEAD, ROBERTA_HEAD
from quire.runtime.models.hf_config import GATED, PLAIN, read_encoder, refuse_set
from quire.runtime.models.hf_rope import read_fixed_rope
from quire.runtime.models.labels import read_labels

GATE_UP_DOWN = ("gate", "up", "down")
NOMIC_KEYS = {  # names in the files of Nomic's own code, by transformers' names
    "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "max_position_embeddings": "n_positions", "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}  # fmt: skip
NOMIC_FLAGS = (
    "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "parallel_block", "use_rms_norm", "causal",
    "rotary_emb_interleaved", "last_layer_subset",
)  # fmt: skip


class RotaryBertBlock(BertBlock):
    def make_attention(self, config: ModelConfig, layer: int, build: LayerBuilder) -> SelfAttention:
        return SelfAttention(
            build.column_linear("qkv", config.hidden_size, config.heads, bias=config.qkv_bias),
            build.attention_of(config, layer),
            build.row_linear("output", config.heads, config.hidden_size, bias=config.o_bias),
        )


class NomicBlock(RotaryBertBlock):
    def make_mlp(self, config: ModelConfig, build: LayerBuilder) -> MLP | GatedMLP:
        hidden, inner = config.hidden_size, config.intermediate_size
        return build.gated_mlp(hidden, inner, config.activation, bias=False, names=GATE_UP_DOWN)


class JinaBert(Bert):
    block = RotaryBertBlock


class NomicBert(Bert):
    block = NomicBlock


def read_jina(config: Fields, name: str, *, classifies: bool = False) -> ModelConfig:
    return _read(config, name, PLAIN, 20_000.0, 1e-5, (8_194, 1), classifies=classifies, has_bias=True)


def read_nomic(config: Fields, name: str, *, classifies: bool = False) -> ModelConfig:
    """Read the config in transformers' spelling or in that of Nomic's own code."""
    for key in NOMIC_FLAGS:
        refuse_set(config, key, usual=False)
    refuse_set(config, "scale_attn_weights", usual=True)
    for key, usual in (("moe_every_n_layers", 0), ("num_experts", 0), ("rotary_emb_fraction", 1.0)):
        if config.number(key, usual) != usual:
            raise config.refuse(key, f"only {usual} is supported")
    if config.raw("rotary_emb_scale_base") is not None:
        raise config.refuse("rotary_emb_scale_base", "is not supported", fix="supported: null")
    if config.raw("n_embd") is not None:
        activation = config.text("activation_function", "gelu")
        if activation not in ("swiglu", "geglu"):
            raise config.refuse(
                "activation_function", f"{activation!r} is not supported", fix="supported: swiglu, geglu"
            )
        changes = {key: config.raw(theirs) for key, theirs in NOMIC_KEYS.items()}
        if config.raw("rotary_scaling_factor") is not None:  # longer texts change the frequencies
            changes["max_position_embeddings"] = config.integer("max_trained_positions", 2_048)
        config = config.changed({**changes, "hidden_act": {"swiglu": "silu", "geglu": "gelu"}[activation]})
    config = config.changed({"hidden_act": config.text("hidden_act", "silu")})
    return _read(config, name, GATED, 1_000.0, 1e-12, (2_048, 2), classifies=classifies)


def _read(
    config: Fields, name: str, activations: tuple[str, ...], theta: float, eps: float, usual: tuple[int, int],
    *, classifies: bool, has_bias: bool = False,
) -> ModelConfig:  # fmt: skip
    """`usual`: the default number of positions, and of token types."""
    num_labels = len(read_labels(config)) if classifies else 0
    length = config.integer("max_position_embeddings", usual[0])
    encoder = Encoder(config.integer("type_vocab_size", usual[1]), num_labels=num_labels, has_positions=False)
    numbers = read_encoder(
        config, name, BERT_KEYS, encoder, config.number("layer_norm_eps", eps), activations,
        qkv_bias=has_bias, o_bias=has_bias, rope=read_fixed_rope(config, length, theta),
    )  # fmt: skip
    if config.integer("head_dim", numbers.heads.dim) != numbers.heads.dim:
        raise config.refuse("head_dim", f"must be {numbers.heads.dim}, is {config.raw('head_dim')}")
    return replace(numbers, mlp_bias=has_bias)


NAMES = {
    "emb_ln.": "embeddings.LayerNorm.",
    "encoder.layers.": "layers.",
    ".norm1.": ".attention_norm.",
    ".norm2.": ".mlp_norm.",
}
NOMIC_NAMES: Mapping[str, str] = NAMES | {
    ".attn.Wqkv.": ".attention.qkv.",
    ".attn.out_proj.": ".attention.output.",
    ".fc11.": ".up.",
    ".fc12.": ".gate.",
    ".fc2.": ".down.",
}
JINA_NAMES: Mapping[str, str] = NAMES | {
    ".mixer.Wqkv.": ".attention.qkv.",
    ".mixer.out_proj.": ".attention.output.",
    ".fc1.": ".up.",
    ".fc2.": ".down.",
}
NOMIC, NOMIC_CLASSIFIER = encoder_families("nomic_bert", read_nomic, NOMIC_NAMES, BERT_HEAD, "nomic_bert.", NomicBert)
JINA3, JINA3_CLASSIFIER = encoder_families(
    "jina_embeddings_v3", read_jina, JINA_NAMES, ROBERTA_HEAD, "roberta.", JinaBert
)
