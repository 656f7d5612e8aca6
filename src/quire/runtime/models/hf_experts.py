"""Reads mixtures of experts from config.json, as several families store them."""

from __future__ import annotations

from quire.config.fields import Fields
from quire.config.model import Experts
from quire.runtime.models.hf_config import check_experts, read_groups, refuse_other

_DENSE, _SPARSE = "dense", "sparse"  # values of `mlp_layer_types`
_GROUPS = ("n_group", "topk_group")
_METHOD = "noaux_tc"  # of ranking experts: by sigmoids and a learned bias


def read_qwen_experts(config: Fields, size: int) -> Experts:
    """Read the experts. `size`: default size of an expert."""
    dense, step = config.raw("mlp_only_layers") or [], config.integer("decoder_sparse_step", 1, least=1)
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise config.refuse("mlp_only_layers", "must be a list of layers")
    layers, num = range(config.integer("num_hidden_layers")), "num_experts"
    num = num if num in config.values else "num_local_experts"
    experts = Experts(
        num=config.integer(num),
        num_used=config.integer("num_experts_per_tok"),
        size=config.integer("moe_intermediate_size", size),
        is_normalized=config.flag("norm_topk_prob", False),
        dense_layers=tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
    )
    return check_experts(config, experts, (num, "num_experts_per_tok", "moe_intermediate_size"))


def read_sigmoid_experts(
    config: Fields, usual: Experts, dense_layers: tuple[int, ...], *, num: str = "n_routed_experts",
    shared: str | None = "n_shared_experts",
) -> Experts:  # fmt: skip
    """Read experts that are ranked by sigmoids and a learned bias, perhaps in groups. `usual`: the defaults; `num` and
    `shared`: the keys of the number of experts and of shared experts (None: there are none)."""
    if config.raw("scoring_func") != _METHOD:  # dots.llm1 names the method there
        refuse_other(config, "scoring_func", "sigmoid")
    refuse_other(config, "topk_method", _METHOD)
    size = config.integer("moe_intermediate_size", usual.size)
    experts = Experts(
        num=config.integer(num, usual.num or None),
        num_used=config.integer("num_experts_per_tok", usual.num_used or None),
        size=size,
        shared_size=0 if shared is None else size * config.integer(shared, 1, least=0),
        is_normalized=config.flag("norm_topk_prob", usual.is_normalized),
        scale=config.number("routed_scaling_factor", usual.scale),
        by_sigmoid=True,
        dense_layers=dense_layers,
    )
    experts = check_experts(config, experts, (num, "num_experts_per_tok", "moe_intermediate_size"))
    return read_groups(config, experts, _GROUPS, num=1, used=1)


def read_first_dense(config: Fields, usual: int) -> tuple[int, ...]:
    """Return the layers with a plain MLP: the first `first_k_dense_replace` ones, by default `usual`."""
    first = config.integer("first_k_dense_replace", usual, least=0)
    return tuple(range(min(first, config.integer("num_hidden_layers"))))


def read_dense_layers(config: Fields, usual: int) -> tuple[int, ...]:
    """Return the layers with a plain MLP, from `mlp_layer_types`; if that is missing, as `read_first_dense` does."""
    kinds, count = config.raw("mlp_layer_types"), config.integer("num_hidden_layers")
    if kinds is None:
        return read_first_dense(config, usual)
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (_DENSE, _SPARSE) for kind in kinds):
        raise config.refuse("mlp_layer_types", f"must be {_DENSE} or {_SPARSE} for each of {count} layers")
    return tuple(layer for layer in range(count) if kinds[layer] == _DENSE)
