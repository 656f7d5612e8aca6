"""Translates GGUF tensor names to Hugging Face's, and gives the row order of a tensor."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from quire.config.model import ModelConfig
from quire.runtime.models.family import GgufFamily

ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # likewise, for longrope
NO_WEIGHTS = frozenset({ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS})
EXPERT = "*"  # in a name: stands for the number of an expert
Order = NDArray[np.int64]

_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.((?:shortconv\.)?[a-z_0-9]+)(?:\.(weight|bias|scale))?", re.ASCII)

ONE_EXPERT = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(0|[1-9][0-9]{0,3})\.weight", re.ASCII)  # old files


def canonical_name(family: GgufFamily, name: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor, or None if the family has no such tensor."""
    if name in family.outer:
        return family.outer[name]
    match = _BLOCK.fullmatch(name)
    if match is None:
        return _name_of_expert(family, name)
    whole = family.inner.get(f"{match[2]}.{match[3] or ''}")
    if whole is not None or match[3] is None:
        return None if whole is None else f"{family.blocks}.{match[1]}.{whole}"
    return f"{family.blocks}.{match[1]}.{family.inner[match[2]]}.{match[3]}" if match[2] in family.inner else None


def _name_of_expert(family: GgufFamily, name: str) -> str | None:
    """Translate the name of a single expert's matrix, as old files store them."""
    match = ONE_EXPERT.fullmatch(name)
    inner = None if match is None else family.inner.get(f"{match[2]}_exps")
    if match is None or inner is None:
        return None
    return f"{family.blocks}.{match[1]}.{inner.replace(EXPERT, match[3])}.weight"


def row_order(family: GgufFamily, config: ModelConfig, name: str) -> Order | None:
    """Return the stored row index of each row of a tensor, or None if the stored order is right."""
    heads = config.heads
    if family.ungrouped is not None and f".{family.ungrouped}." in name:
        return _groups(heads.num_query, heads.num_kv, heads.dim)
    if family.has_pairs and ".self_attn.q_proj." in name:
        return _halves(heads.num_query, heads.dim)
    return _halves(heads.num_kv, heads.dim) if family.has_pairs and ".self_attn.k_proj." in name else None


def _halves(num_heads: int, dim: int) -> Order:
    """Reorder each head's rows from interleaved pairs to halves."""
    return np.arange(num_heads * dim).reshape(num_heads, dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _groups(num_query: int, num_kv: int, dim: int) -> Order:
    """Reorder rows from all queries, all keys, all values to groups of queries, one key and one value."""
    ends = num_query * dim, (num_query + num_kv) * dim
    parts = np.split(np.arange((num_query + 2 * num_kv) * dim), ends)
    return np.concatenate([part.reshape(num_kv, -1) for part in parts], axis=1).reshape(-1)
