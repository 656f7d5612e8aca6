"""MiniMax M2: experts ranked by sigmoids and a learned bias in every layer; half of each head is rotated, and queries
and keys are normed over all heads together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.runtime.models import gguf_config
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import (
    read_decoder,
    read_heads,
    read_window,
    refuse_other,
    refuse_set,
    refuse_windows,
)
from quire.runtime.models.hf_experts import read_sigmoid_experts
from quire.runtime.models.hf_rope import read_rope
from quire.runtime.models.mixture import MIXTRAL_GGUF, MixtralBlock
from quire.runtime.models.olmo import Olmo2Attention

MINIMAX_EXPERTS = Experts(num=256, num_used=8, size=1_536)


class MiniMaxBlock(MixtralBlock):
    attention = Olmo2Attention


class MiniMax(Decoder):
    block = MiniMaxBlock


def read_minimax_m2(config: Fields) -> ModelConfig:
    """Read MiniMax M2's config. Its published files call the size of an expert `intermediate_size`, and the rotated
    part of a head `rotary_dim`."""
    refuse_windows(config)
    refuse_set(config, "use_routing_bias", usual=True)
    refuse_set(config, "use_qk_norm", usual=True)
    refuse_other(config, "qk_norm_type", "per_layer")
    if config.integer("shared_intermediate_size", 0) != 0:
        raise config.refuse("shared_intermediate_size", "must be 0: shared experts are not supported")
    if read_window(config, None) is not None:
        raise config.refuse("sliding_window", "sliding-window attention is not supported")
    kinds = config.raw("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        raise config.refuse("attn_type_list", "only layers with full attention (1) are supported")
    heads, length = read_heads(config, 8, 128), config.integer("max_position_embeddings", 196_608)
    share = config.integer("rotary_dim", heads.dim, least=2) / heads.dim
    given = config.changed({
        "moe_intermediate_size": config.integer("intermediate_size", 1_536),
        "n_routed_experts": config.integer("num_local_experts", 256),
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    })  # fmt: skip
    return read_decoder(
        config, "minimax_m2", length, heads=heads,
        experts=read_sigmoid_experts(given, MINIMAX_EXPERTS, (), shared=None),
        rope=read_rope(config, length, 5_000_000.0, head_dim=heads.dim, share=share),
    )  # fmt: skip


def rename_minimax(name: str) -> str:
    """transformers 5 names the experts' module `mlp`, also in LoRA adapters."""
    name = name.replace(".mlp.", ".block_sparse_moe.", 1)
    return name.replace(".block_sparse_moe.e_score", ".block_sparse_moe.gate.e_score")


GGUF = replace(
    MIXTRAL_GGUF, has_pairs=False, settings=gguf_config.GROUPED_EXPERTS,
    inner={**MIXTRAL_GGUF.inner, "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias"},
    read=partial(gguf_config.read_sigmoid_experts, is_normalized=True),
)  # fmt: skip
MINIMAX_M2 = Family(
    name="minimax_m2", build=MiniMax, read=read_minimax_m2, rename=rename_minimax, drops_layers=True, gguf=GGUF
)
