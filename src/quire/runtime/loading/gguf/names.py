"""GGUF tensor names to Hugging Face's, and the row order of rotary projections."""

from __future__ import annotations

import re

from quire.config.model import Heads
from quire.runtime.loading.mapping import Bytes
from quire.runtime.models.family import GgufFamily

ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies; not a weight
EXPERT = "*"  # in a name: the number of an expert

_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_0-9]+)(?:\.(weight|bias|scale))?", re.ASCII)


def canonical_name(family: GgufFamily, name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for one that the family does not have."""
    if name in family.outer:
        return family.outer[name]
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    whole = family.inner.get(f"{match[2]}.{match[3] or ''}")
    if whole is not None or match[3] is None:
        return None if whole is None else f"model.layers.{match[1]}.{whole}"
    return f"model.layers.{match[1]}.{family.inner[match[2]]}.{match[3]}" if match[2] in family.inner else None


def rotary_heads(family: GgufFamily, name: str, heads: Heads) -> int | None:
    """How many heads' rows to bring back to half-split order; None where the order is right as stored."""
    if not family.has_pairs:
        return None
    if ".self_attn.q_proj." in name:
        return heads.num_query
    return heads.num_kv if ".self_attn.k_proj." in name else None


def split_halves(raw: Bytes, num_heads: int, num_rows: int) -> Bytes:
    """Reorder stored rows, still quantized, from pairs to halves within each head. Copies."""
    pairs = raw.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(-1)
