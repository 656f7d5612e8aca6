"""GGUF tensor names to Hugging Face's, and the row order of rotary projections."""

from __future__ import annotations

import re

from quire.config.model import Heads
from quire.runtime.loading.mapping import Bytes

ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies; not a weight

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)", re.ASCII)


def canonical_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for one that no supported model has."""
    if name in _OUTER:
        return _OUTER[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _INNER:
        return None
    return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"


def rotary_heads(architecture: str, name: str, heads: Heads) -> int | None:
    """How many heads' rows to bring back to half-split order; None where the order is right as stored.

    Files of architecture "llama" store each head's query and key rows as pairs (0, dim/2, 1, dim/2 + 1, ...).
    """
    if architecture != "llama":
        return None
    if ".self_attn.q_proj." in name:
        return heads.num_query
    return heads.num_kv if ".self_attn.k_proj." in name else None


def split_halves(raw: Bytes, num_heads: int, num_rows: int) -> Bytes:
    """Reorder stored rows, still quantized, from pairs to halves within each head. Copies."""
    pairs = raw.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(-1)
