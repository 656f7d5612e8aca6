"""Encoders in GGUF. Files of BERT, RoBERTa, XLM-RoBERTa and DistilBERT share one layout, named `bert`: the position
table starts with the first used position, and models without token types have no such tensor."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import ModelConfig, Rope
from quire.runtime.models.family import GgufFamily


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Complete the config. GGUF files do not name the activation. Quantized models run in float16, the dtype of their
    scales, not in bfloat16, because their embeddings may be compared with those that other engines computed."""
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
