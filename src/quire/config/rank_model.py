"""The model as one rank under tensor parallelism holds it: the heads and sizes of its shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from quire.config.kv_cache import lay_out, stored_specs
from quire.config.model import MXFP4, SUPER_BLOCK, Experts, Heads, ModelConfig
from quire.config.mxfp4 import mxfp4_experts
from quire.config.parallel import ParallelConfig, RankPlace, share_heads, share_of, share_size
from quire.config.recurrent import Recurrent
from quire.config.weight_counts import StoredLevels, WeightCounts
from quire.types.errors import ConfigError

_SETTING = "tensor_parallel_size"


def rank_model(model: ModelConfig, place: RankPlace) -> ModelConfig:
    """Return the model with the heads, intermediate sizes and recurrent heads of a rank, which determine its cache and
    activations.

    The vocabulary stays whole, because ranks sample from all of it. Raises ValueError if there are fewer heads than
    ranks.
    """
    index, size, whole = place.shard, place.config.tensor, place.config.expert
    if size == 1:
        return model
    local = model.local_heads
    return replace(
        model,
        heads=_heads(model.heads, index, size),
        local_heads=None if local is None else _heads(local, index, size),
        intermediate_size=len(share_size(model.intermediate_size, index, size)),
        experts=None if model.experts is None else _experts(model.experts, index, size, whole=whole),
        recurrent=None if model.recurrent is None else _recurrent(model.recurrent, index, size),
    )


def check_shares(model: ModelConfig, parallel: ParallelConfig, kv_dtype: str) -> None:
    """Raise ConfigError if ranks cannot share the layers: a rank would have nothing, or another block layout."""
    if parallel.tensor == 1:
        return
    num = None if model.experts is None or not parallel.expert else model.experts.num
    if num is not None and num < parallel.tensor:
        reason = f"{parallel.tensor} ranks cannot share {num} experts, of which each has whole ones"
        raise ConfigError(_SETTING, reason, f"set it to {num} or less, or leave enable_expert_parallel out")
    ranks = models_of_ranks(model, parallel)
    sizes = _sizes(model, whole_experts=parallel.expert)
    if 0 in [len(share_size(size, parallel.tensor - 1, parallel.tensor)) for size in sizes]:
        reason = f"{parallel.tensor} ranks cannot share a layer size of {min(sizes)}"
        raise ConfigError(_SETTING, reason, "lower it")
    layouts = [lay_out(stored_specs(rank.kv_specs, kv_dtype), split=split) for rank in ranks for split in (False, True)]
    if len({(layout.places, layout.num_planes, layout.sources) for layout in layouts[::2]}) > 1 or (
        len({(layout.places, layout.num_planes, layout.sources) for layout in layouts[1::2]}) > 1
    ):
        reason = f"{parallel.tensor} ranks would divide the two kinds of heads of this model differently"
        raise ConfigError(_SETTING, reason, "choose a number that divides the key/value heads of both kinds")


def models_of_ranks(model: ModelConfig, parallel: ParallelConfig) -> list[ModelConfig]:
    """Return the model of each rank. Raises ConfigError if there are more ranks than heads."""
    try:
        return _rank_models(model, parallel)
    except ValueError:
        raise ConfigError(_SETTING, *_too_many(model, parallel.tensor)) from None


def planned_rank(model: ModelConfig, draft: ModelConfig | None, parallel: ParallelConfig, kv_dtype: str) -> ModelConfig:
    """Return the model for which memory is planned. Raises ConfigError if ranks cannot share the model or the draft
    model."""
    for each in (model,) if draft is None else (model, draft):
        check_shares(each, parallel, kv_dtype)
    return largest_rank(model, parallel)


def largest_rank(model: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """Return a model with the largest heads, sizes and weights of any rank, each taken separately.

    The memory of every rank is planned for it, because all ranks have equally many blocks.
    """
    if parallel.tensor == 1:
        return model
    ranks = _rank_models(model, parallel)
    first, weights = ranks[0], model.rank_weights or _most_weights(model, ranks, parallel)
    levels = _levels(model.levels, weights.in_blocks / max(model.weights.in_blocks, 1))
    levels = replace(levels, integer_bytes=levels.integer_bytes + _cut_bytes(model, parallel))
    return replace(
        first,
        heads=_most_heads([rank.heads for rank in ranks]),
        local_heads=None if first.local_heads is None else _most_heads([rank.all_heads[1] for rank in ranks]),
        recurrent=max((rank.recurrent for rank in ranks), key=lambda each: 0 if each is None else each.state_numbers),
        weights=weights,
        levels=mxfp4_experts(first) if model.quantization == MXFP4 else levels,
    )


def _rank_models(model: ModelConfig, parallel: ParallelConfig) -> list[ModelConfig]:
    return [rank_model(model, parallel.place(rank)) for rank in range(parallel.tensor)]


def _too_many(model: ModelConfig, size: int) -> tuple[str, str]:
    counts = [heads.num_query for heads in model.all_heads]
    if model.recurrent is not None:
        counts.append(model.recurrent.value_heads)
    return f"{size} ranks cannot share {min(counts)} query heads", f"set it to {min(counts)} or less"


def _sizes(model: ModelConfig, *, whole_experts: bool) -> list[int]:
    """Return the sizes that ranks share, besides heads and whole experts."""
    return [model.head_vocab_size, *_inner_sizes(model, whole_experts=whole_experts)]


def _inner_sizes(model: ModelConfig, *, whole_experts: bool) -> list[int]:
    """Return the intermediate sizes that ranks share."""
    experts = model.experts
    if experts is None:
        return [model.intermediate_size]
    shared = [experts.shared_size] if experts.shared_size else []
    return [*shared, *([] if whole_experts else [experts.size])]


def _most_heads(ranks: Sequence[Heads]) -> Heads:
    num_query, num_kv = max(each.num_query for each in ranks), max(each.num_kv for each in ranks)
    return replace(ranks[0], num_query=num_query, num_kv=num_kv)


def _most_weights(model: ModelConfig, ranks: Sequence[ModelConfig], parallel: ParallelConfig) -> WeightCounts:
    """Return an upper bound of a rank's weights: all weights are counted with the largest share of any size."""
    shares = [max(rank.heads.num_query for rank in ranks) / model.heads.num_query]
    shares += [max(rank.heads.num_kv for rank in ranks) / model.heads.num_kv] if model.latent is None else []
    shares += [len(share_size(size, 0, len(ranks))) / size for size in _sizes(model, whole_experts=parallel.expert)]
    width = model.weights.adapter_expert_width
    if model.experts is not None and parallel.expert:
        shares.append(len(share_of(model.experts.num, 0, len(ranks))) / model.experts.num)
        width = ceil(width * shares[-1])
    divided = ("parameters", "in_blocks", "int4_parameters", "int4_bytes", "plain_linears")
    numbers = {name: ceil(getattr(model.weights, name) * max(shares)) for name in divided}
    numbers["parameters"] += ceil(model.weights.tower * (1 - max(shares)))  # every rank has the whole tower
    return replace(model.weights, **numbers, adapter_expert_width=width)


def _levels(levels: StoredLevels, share: float) -> StoredLevels:
    names = ("parameters", "num_bytes", "integer_bytes", "gpu_parameters", "gpu_bytes", "table_bytes", "expanded")
    return replace(levels, **{name: ceil(getattr(levels, name) * share) for name in names})


def _cut_bytes(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the additional bytes of the integer kernels on a rank, for matrices whose super-blocks do not align with
    the input shards of the ranks."""
    levels, size = model.levels, parallel.tensor
    heads = [share_heads(model.heads.num_query, model.heads.num_kv, index, size).query for index in range(size)]
    of_heads = [range(each.start * model.heads.dim, each.stop * model.heads.dim) for each in heads]
    counts = _inner_sizes(model, whole_experts=parallel.expert)
    of_sizes = [[share_size(count, index, size) for index in range(size)] for count in counts]
    found = _largest_cut(of_heads) * levels.cut_heads_bytes
    return ceil(found + max(map(_largest_cut, of_sizes), default=0.0) * levels.cut_sizes_bytes)


def _largest_cut(shares: Sequence[range]) -> float:
    """Return the largest share of the inputs among ranks whose shard cuts a super-block, as a fraction of all
    inputs."""
    cut = [len(share) for share in shares if share.start % SUPER_BLOCK or len(share) % SUPER_BLOCK]
    return max(cut, default=0) / shares[-1].stop


def _heads(heads: Heads, index: int, size: int) -> Heads:
    share = share_heads(heads.num_query, heads.num_kv, index, size)
    return replace(heads, num_query=len(share.query), num_kv=len(share.kv))


def _experts(experts: Experts, index: int, size: int, *, whole: bool) -> Experts:
    """Return the experts of a rank. `whole`: the rank has whole experts. Routing still ranks all experts, so any number
    of a token's experts may be on this rank."""
    shared = len(share_size(experts.shared_size, index, size)) if experts.shared_size else 0
    if whole:
        return replace(experts, shared_size=shared, held=len(share_of(experts.num, index, size)))
    return replace(experts, size=len(share_size(experts.size, index, size)), shared_size=shared)


def _recurrent(recurrent: Recurrent, index: int, size: int) -> Recurrent:
    if recurrent.kind == "rg_lru":
        blocks = len(share_heads(recurrent.blocks, recurrent.blocks, index, size).kv)
        return replace(recurrent, value_heads=blocks * recurrent.value_heads // recurrent.blocks, blocks=blocks)
    if recurrent.kind in ("convolution", "selective"):
        return replace(recurrent, value_heads=len(share_size(recurrent.value_heads, index, size)))
    share = share_heads(recurrent.value_heads, recurrent.key_heads, index, size)
    return replace(recurrent, value_heads=len(share.query), key_heads=len(share.kv))
