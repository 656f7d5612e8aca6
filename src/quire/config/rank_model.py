"""A model as one of the ranks that share its layers sees it: the heads and sizes of its part."""

from __future__ import annotations

from dataclasses import replace

from quire.config.model import Experts, Heads, ModelConfig, Recurrent
from quire.config.parallel import RankPlace, share_heads, share_size


def rank_model(model: ModelConfig, place: RankPlace) -> ModelConfig:
    """Return the model with the heads, intermediate sizes and recurrent heads of a rank: what its cache and its
    activations are made of. The vocabulary stays whole, as ranks sample from all of it. Raises ValueError if there are
    fewer heads than ranks."""
    index, size = place.shard, place.config.tensor
    if size == 1:
        return model
    local = model.local_heads
    return replace(
        model,
        heads=_heads(model.heads, index, size),
        local_heads=None if local is None else _heads(local, index, size),
        intermediate_size=len(share_size(model.intermediate_size, index, size)),
        experts=None if model.experts is None else _experts(model.experts, index, size),
        recurrent=None if model.recurrent is None else _recurrent(model.recurrent, index, size),
    )


def _heads(heads: Heads, index: int, size: int) -> Heads:
    share = share_heads(heads.num_query, heads.num_kv, index, size)
    return replace(heads, num_query=len(share.query), num_kv=len(share.kv))


def _experts(experts: Experts, index: int, size: int) -> Experts:
    shared = len(share_size(experts.shared_size, index, size)) if experts.shared_size else 0
    return replace(experts, size=len(share_size(experts.size, index, size)), shared_size=shared)


def _recurrent(recurrent: Recurrent, index: int, size: int) -> Recurrent:
    share = share_heads(recurrent.value_heads, recurrent.key_heads, index, size)
    return replace(recurrent, value_heads=len(share.query), key_heads=len(share.kv))
