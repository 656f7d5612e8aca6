"""Encoders in GGUF. Files of BERT, RoBERTa, XLM-RoBERTa and DistilBERT have one layout, named `bert`: the table of
positions begins with the first position, and models without token types have no tensor of them."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import ModelConfig, Rope
from quire.runtime.models.family import GgufFamily


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Files do not name the activation. Quantized ones run in float16, which their scales are, not in bfloat16: rows of
    embeddings are compared with those that others made."""
    for key in (each.removeprefix("bert.") for each in fields.values):
        if key.startswith("rope.") or key == "attention.layer_norm_rms_epsilon":
            raise fields.refuse(key, "encoders of this kind have a table of positions, and layer norms")
    if config.heads.num_kv != config.heads.num_query:
        raise fields.refuse("attention.head_count_kv", f"must be {config.heads.num_query}, as many as query heads")
    return replace(
        config,
        activation="gelu",
        rope=Rope(max_position=config.rope.max_position),
        dtype="float16" if config.levels.parameters else config.dtype,
        tie_word_embeddings=False, qkv_bias=False, o_bias=False, mlp_bias=False,
    )  # fmt: skip


GGUF = GgufFamily(
    outer={
        "token_embd.weight": "embeddings.word_embeddings.weight",
        "position_embd.weight": "embeddings.position_embeddings.weight",
        "token_types.weight": "embeddings.token_type_embeddings.weight",
        "token_embd_norm.weight": "embeddings.LayerNorm.weight",
        "token_embd_norm.bias": "embeddings.LayerNorm.bias",
    },
    inner={
        "attn_q": "attention.query",
        "attn_k": "attention.key",
        "attn_v": "attention.value",
        "attn_output": "attention.output",
        "attn_output_norm": "attention_norm",
        "ffn_up": "mlp.up",
        "ffn_down": "mlp.down",
        "layer_output_norm": "mlp_norm",
    },
    blocks="layers",
    read=read_gguf,
)
