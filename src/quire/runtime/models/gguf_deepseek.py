"""GGUF files of DeepSeek V2 and V3. Both have the architecture `deepseek2`; files that rank experts by sigmoids are V3.

Newer files store the matrix from latents to keys and values as two tensors, the first of them transposed in each head;
older ones store it as one, and count heads as if there were no latents.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from quire.config.fields import Fields
from quire.config.model import Heads, Latent, ModelConfig, Rope
from quire.runtime.models import gguf_config
from quire.runtime.models.family import GGUF_EXPERTS, GGUF_INNER, GgufFamily
from quire.runtime.models.gguf_layout import Rearranged
from quire.runtime.models.hf_rope import score_scale

_RANK, _QUERY_RANK = "attention.kv_lora_rank", "attention.q_lora_rank"
_KEY, _VALUE, _ROPE = "attention.key_length", "attention.value_length", "rope.dimension_count"
_MAGNITUDE = "rope.scaling.yarn_log_multiplier"  # mscale_all_dim / 10
_SOFTMAX = 1  # a value of `gguf_config.GATING`


def read_v2(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Complete the config of DeepSeek V2. Expert weights are not normalized to sum 1, as in Hugging Face's
    checkpoints."""
    if fields.flag(gguf_config.NORMALIZED, False):
        raise fields.refuse(gguf_config.NORMALIZED, "weights of experts that rank by a softmax are not normalized")
    if fields.integer(gguf_config.GATING, _SOFTMAX) not in (0, _SOFTMAX):
        raise fields.refuse(gguf_config.GATING, "must be 1 (softmax) or 2 (sigmoid)")
    return _read_latent_decoder(fields, config, by_sigmoid=False)


def read_v3(fields: Fields, config: ModelConfig) -> ModelConfig:
    return _read_latent_decoder(fields, config, by_sigmoid=True)


def _read_latent_decoder(fields: Fields, config: ModelConfig, *, by_sigmoid: bool) -> ModelConfig:
    latent, rope = _read_latent(fields), _read_rope(fields, config)
    return replace(
        config,
        latent=latent,
        heads=Heads(config.heads.num_query, 1, latent.rank + latent.rope_dim, latent.rank),
        rope=rope,
        attention_scale=latent.query_dim**-0.5 * score_scale(rope),
        experts=gguf_config.read_grouped_experts(fields, config.num_layers, by_sigmoid=by_sigmoid),
    )


def _read_latent(fields: Fields) -> Latent:
    """Newer files store the head sizes under `..._mla` keys, because the plain keys describe heads that read
    latents."""
    keys = (f"{_KEY}_mla", f"{_VALUE}_mla") if fields.raw(f"{_KEY}_mla") is not None else (_KEY, _VALUE)
    rope_dim, rank = fields.integer(_ROPE, least=2), fields.integer(_RANK, least=1)
    query_dim, value_dim = fields.integer(keys[0]), fields.integer(keys[1], least=1)
    if rope_dim % 2 or query_dim <= rope_dim:
        raise fields.refuse(_ROPE, f"must be even and below the size of keys, {query_dim}, is {rope_dim}")
    return Latent(rank, query_dim - rope_dim, rope_dim, value_dim, fields.optional_integer(_QUERY_RANK, least=1))


def _read_rope(fields: Fields, config: ModelConfig) -> Rope:
    """Files do not store `mscale`; published models use the same value as for `mscale_all_dim`."""
    rope, magnitude = replace(config.rope, in_pairs=True), fields.optional_number(_MAGNITUDE)
    if rope.kind != "yarn" or magnitude is None:
        return rope
    size = round(magnitude * 10, 6)  # files store 32-bit floats
    return replace(rope, scaling=(*rope.scaling, ("mscale", size), ("mscale_all_dim", size)))


def whole_heads(fields: Fields) -> Fields:
    """Replace the head sizes by one fully rotated head size, for the reader that all families share."""
    dim = fields.integer(_KEY)
    return fields.changed(gguf_config.without_drafts(fields) | {_VALUE: dim, _ROPE: dim})


def rearrange(config: ModelConfig, names: Collection[str]) -> dict[str, Rearranged]:
    """Describe the matrix from latents to keys and values, which files store as two tensors."""
    latent, heads = config.latent, config.heads.num_query
    assert latent is not None
    found = {}
    for layer in range(config.num_layers):
        path = f"model.layers.{layer}.self_attn"
        if f"{path}.k_b_proj.weight" in names:
            parts = {
                f"{path}.k_b_proj.weight": (heads, latent.rank, latent.nope_dim),
                f"{path}.v_b_proj.weight": (heads, latent.value_dim, latent.rank),
            }
            shape = (heads * (latent.nope_dim + latent.value_dim), latent.rank)
            found[f"{path}.kv_b_proj.weight"] = Rearranged(parts, shape, restore=_join)
    return found


def _join(keys: Tensor, values: Tensor) -> Tensor:
    return torch.cat((keys.transpose(1, 2).float(), values.float()), dim=1)


_INNER = GGUF_INNER | GGUF_EXPERTS | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
V2 = GgufFamily(
    inner=_INNER,
    settings=frozenset(
        {
            _RANK, _QUERY_RANK, f"{_KEY}_mla", f"{_VALUE}_mla", _MAGNITUDE, gguf_config.DRAFT_LAYERS,
            *gguf_config.GROUPED_EXPERTS,
        }
    ),
    read=read_v2, whole=whole_heads, rearrange=rearrange,
)  # fmt: skip
V3 = replace(V2, read=read_v3)
