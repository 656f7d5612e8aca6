"""Families of DeepSeek's layers with other routers, rotary positions or limits: GLM-4.7-Flash, DeepSeek V3.2 and GLM-5,
Mistral 4.

DeepSeek V3.2 and GLM-5 attend to the `index_topk` tokens that an indexer chooses. In GLM-5 some layers attend to those
that the last layer with an indexer chose.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.config.fields import Fields
from quire.config.indexer import Indexer
from quire.config.model import QUERY_SCALE, Experts, ModelConfig
from quire.runtime.models.deepseek import Deepseek, read_latent_decoder, rename_deepseek
from quire.runtime.models.family import STACKED, Family
from quire.runtime.models.hf_config import check_experts
from quire.runtime.models.hf_experts import read_dense_layers, read_first_dense, read_sigmoid_experts

LITE_SIZES = {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}
GLM_SIZES = {"q_lora_rank": 2_048, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5}
MISTRAL_SIZES = {"kv_lora_rank": 256, "q_lora_rank": 1_024, "qk_nope_head_dim": 64}
LITE_EXPERTS = Experts(num=64, num_used=4, size=1_536, scale=1.8)
SPARSE_EXPERTS = Experts(num=256, num_used=8, size=2_048, scale=2.5)
FULL, SHARED = "full", "shared"  # values of `indexer_types`
LENGTH = "original_max_position_embeddings"
MISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, LENGTH: 8_192, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale_all_dim": 1.0, "mscale": 1.0, QUERY_SCALE: 0.1,
}  # fmt: skip
# Settings of Mistral 4's rotary positions that others have at the top of config.json, or that follow from others.
_ELSEWHERE = ("max_position_embeddings", "partial_rotary_factor")


def read_glm4_moe_lite(config: Fields) -> ModelConfig:
    given = with_usual(config, LITE_SIZES)
    return read_latent_decoder(
        given, "glm4_moe_lite", 202_752, in_pairs=config.flag("rope_interleave", True),
        experts=read_sigmoid_experts(config, LITE_EXPERTS, read_dense_layers(config, 1)),
        norm_eps=config.number("rms_norm_eps", 1e-5),
    )  # fmt: skip


def read_deepseek_v32(config: Fields) -> ModelConfig:
    return _read_indexed(config, "deepseek_v32", 163_840, read_indexer(config, num_heads=64, in_pairs=False))


def read_glm_moe_dsa(config: Fields) -> ModelConfig:
    given = with_usual(config, GLM_SIZES)
    return _read_indexed(given, "glm_moe_dsa", 202_752, read_indexer(given, num_heads=32, in_pairs=True))


def _read_indexed(config: Fields, name: str, max_position: int, indexer: Indexer) -> ModelConfig:
    experts = read_sigmoid_experts(config, SPARSE_EXPERTS, read_dense_layers(config, 3))
    pairs = config.flag("rope_interleave", True)
    made = read_latent_decoder(config, name, max_position, experts=experts, in_pairs=pairs, indexer=indexer)
    assert made.latent is not None
    if made.latent.query_rank is None:
        raise config.refuse("q_lora_rank", "must be there: the indexer reads compressed queries")
    least, most = made.latent.rope_dim, made.heads.dim
    if not least <= indexer.dim <= most:
        raise config.refuse("index_head_dim", f"must be from {least} (qk_rope_head_dim) to {most}, is {indexer.dim}")
    return made


def read_indexer(config: Fields, *, num_heads: int, in_pairs: bool) -> Indexer:
    """Read the indexer. `num_heads` and `in_pairs` are the defaults."""
    return Indexer(
        num_heads=config.integer("index_n_heads", num_heads, least=1),
        dim=config.integer("index_head_dim", 128, least=1),
        num_chosen=config.integer("index_topk", 2_048, least=1),
        layers=tuple(read_indexer_layers(config)),
        in_pairs=config.flag("indexer_rope_interleave", in_pairs),
    )


def read_indexer_layers(config: Fields) -> list[int]:
    """Return the layers that have an indexer, from `indexer_types`, `index_topk_pattern` or `index_topk_freq`."""
    count, names = config.integer("num_hidden_layers"), {"F": FULL, "S": SHARED}
    key = "indexer_types" if config.raw("indexer_types") is not None else "index_topk_pattern"
    kinds = config.raw(key)
    if kinds is None:
        every = max(config.integer("index_topk_freq", 1), 1)
        first = config.integer("index_skip_topk_offset", 2)
        kinds = [FULL if max(layer - first + 1, 0) % every == 0 else SHARED for layer in range(count)]
    kinds = [names.get(kind, kind) for kind in kinds] if isinstance(kinds, str | list) else []
    if len(kinds) != count or any(kind not in (FULL, SHARED) for kind in kinds) or kinds[0] != FULL:
        raise config.refuse(key, f"must be {FULL} or {SHARED} for each of {count} layers, and {FULL} for the first")
    return [layer for layer, kind in enumerate(kinds) if kind == FULL]


def read_mistral4(config: Fields) -> ModelConfig:
    """Read Mistral 4's config. From `original_max_position_embeddings` on, queries are scaled by their position."""
    given = config.raw("rope_parameters") or MISTRAL_ROPE
    if not isinstance(given, dict):
        raise config.refuse("rope_parameters", "must hold one set of parameters for all layers")
    rope = Fields(config.file, {f"rope_parameters.{key}": value for key, value in given.items()}, "rope_parameters.")
    if rope.number(QUERY_SCALE, 0.0) != 0:
        rope.number(LENGTH)  # must be there
        if config.integer("qk_nope_head_dim", MISTRAL_SIZES["qk_nope_head_dim"]) % 2:
            raise config.refuse("qk_nope_head_dim", "must be even where queries are scaled by their position")
    others = {key: value for key, value in given.items() if key not in _ELSEWHERE}
    return read_latent_decoder(
        with_usual(config.changed({"rope_parameters": others}), MISTRAL_SIZES), "mistral4", 1_048_576,
        in_pairs=config.flag("rope_interleave", True), experts=_read_softmax_experts(config),
        more=(QUERY_SCALE, LENGTH),
    )  # fmt: skip


def _read_softmax_experts(config: Fields) -> Experts:
    if config.integer("n_group", 1) != 1:
        raise config.refuse("n_group", "groups of experts are not supported", fix="supported: 1")
    size = config.integer("moe_intermediate_size", 2_048)
    experts = Experts(
        num=config.integer("n_routed_experts", 128),
        num_used=config.integer("num_experts_per_tok", 4),
        size=size,
        shared_size=size * config.integer("n_shared_experts", 1, least=0),
        is_normalized=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        dense_layers=read_first_dense(config, 0),
    )
    return check_experts(config, experts, ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"))


def with_usual(config: Fields, usual: Mapping[str, object]) -> Fields:
    """Return the settings with defaults for missing keys."""
    return config.changed({key: value for key, value in usual.items() if key not in config.values})


GLM4_MOE_LITE = Family(
    name="glm4_moe_lite", build=Deepseek, read=read_glm4_moe_lite, rename=rename_deepseek, drops_layers=True
)
DEEPSEEK_V32, GLM_MOE_DSA = (
    Family(name=name, build=Deepseek, read=read, rename=rename_deepseek, drops_layers=True)
    for name, read in (("deepseek_v32", read_deepseek_v32), ("glm_moe_dsa", read_glm_moe_dsa))
)
MISTRAL4 = Family(
    name="mistral4",
    build=Deepseek,
    read=read_mistral4,
    rename=rename_deepseek,
    stacked=STACKED,
    drops_layers=True,
    nested="text_config",
)
