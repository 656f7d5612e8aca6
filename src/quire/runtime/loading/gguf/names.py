"""Translates GGUF tensor names to Hugging Face's."""

from __future__ import annotations

import re

from quire.runtime.models.family import GgufFamily

ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # likewise, for longrope
NO_WEIGHTS = frozenset({ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS})
EXPERT = "*"  # in a name: stands for the number of an expert

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
