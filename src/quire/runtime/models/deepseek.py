"""DeepSeek V2 and V3: multi-head latent attention, and mixtures of many small experts with shared experts.

V2 ranks experts by a softmax, V3 by sigmoids and a learned bias; both may first select groups of experts. Kimi K2 is
stored as V3, Kimi K2.5 as V3 within a model for images.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from quire.config.fields import Fields
from quire.config.model import Experts, Heads, Latent, ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.indexer import chooser_of
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.modules import RMSNorm
from quire.runtime.layers.split import Split
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Projected
from quire.runtime.layers.weights import Stored
from quire.runtime.models import gguf_deepseek
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family, text_model_name
from quire.runtime.models.hf_config import check_experts, read_decoder, read_groups, refuse_other, refuse_set
from quire.runtime.models.hf_rope import read_rope, score_scale
from quire.runtime.models.mixture import QwenMoeBlock

GROUPS = ("n_group", "topk_group")
LATENT_EPS = 1e-6  # of the norms of compressed queries and latents, whatever rms_norm_eps is


class DeepseekAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        latent, hidden = config.latent, config.hidden_size
        assert latent is not None
        paired = latent.rope_dim if config.rope.in_pairs else 0
        query_heads = Stored(pairs=(latent.query_dim, paired))
        latents = {"kv_a_proj_with_mqa": Stored(pairs=(config.heads.dim, paired))}
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: Linear | None = None
        if latent.query_rank is None:
            queries: int | Split = build.query_outputs(config.heads, latent.query_dim)
            first, stored = {"q_proj": queries}, {"q_proj": query_heads}
        else:
            first, stored = {"q_a_proj": latent.query_rank}, {"q_a_proj": Stored()}
            self.q_a_layernorm = build.rms_norm("q_a_layernorm", latent.query_rank, LATENT_EPS)
            self.q_b_proj = build.query_linear(
                "q_b_proj", latent.query_rank, config.heads, bias=False, dim=latent.query_dim, stored=query_heads
            )
        self.qkv_a_proj = build.stacked_linear(
            hidden, first | {"kv_a_proj_with_mqa": config.heads.dim}, stored=stored | latents
        )
        self.kv_a_layernorm = build.rms_norm("kv_a_layernorm", latent.rank, LATENT_EPS)
        self.kv_b_proj = build.latent_expansion(config)
        self.attention, self.indexer = build.latent_attention(config, layer), chooser_of(config, layer, build)
        self.o_proj = build.row_linear("o_proj", config.heads, hidden, bias=False, dim=latent.value_dim)

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        both = self.qkv_a_proj(x)  # queries (or compressed queries), then latents
        queries, chosen = both, None
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            compressed = self.q_a_layernorm.of_first(both)
            queries = self.q_b_proj(compressed)
            chosen = None if self.indexer is None else (self.indexer, self.indexer(x, compressed))
        return self.o_proj.later(self.attention(queries, both, step, self.kv_a_layernorm, self.kv_b_proj, chosen))


class DeepseekBlock(QwenMoeBlock):
    attention = DeepseekAttention


class Deepseek(Decoder):
    block = DeepseekBlock


def read_deepseek_v2(config: Fields) -> ModelConfig:
    """Read DeepSeek V2's config. transformers never normalizes its expert weights: norm_topk_prob=true is refused."""
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.refuse("topk_method", f"{method!r} is not supported", "supported: greedy, group_limited_greedy")
    refuse_set(config, "norm_topk_prob", usual=False)
    experts = read_experts(config, "softmax", size=1_407, num_shared=2, first=0)
    experts = experts if method == "greedy" else read_groups(config, experts, GROUPS)
    return read_latent_decoder(config, "deepseek_v2", 2_048, experts=experts)


def read_deepseek_v3(config: Fields) -> ModelConfig:
    refuse_other(config, "topk_method", "noaux_tc")
    some = read_experts(config, "sigmoid", size=2_048, num_shared=1, first=3)
    some = replace(some, by_sigmoid=True, is_normalized=config.flag("norm_topk_prob", True))
    experts, pairs = read_groups(config, some, GROUPS, num=8, used=4), config.flag("rope_interleave", True)
    return read_latent_decoder(config, "deepseek_v3", 4_096, experts=experts, in_pairs=pairs)


def read_latent_decoder(
    config: Fields, name: str, max_position: int, *, experts: Experts | None, in_pairs: bool = True,
    more: tuple[str, ...] = (), **fields: Any,
) -> ModelConfig:  # fmt: skip
    """Read the config of a decoder with latent attention. `more`: further parameters of its rotary positions. `fields`:
    further fields of ModelConfig."""
    num_heads = config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", num_heads) != num_heads:
        raise config.refuse("num_key_value_heads", f"must be {num_heads}, as many as query heads")
    refuse_set(config, "attention_bias", usual=False)
    refuse_set(config, "mlp_bias", usual=False)
    latent = Latent(
        rank=config.integer("kv_lora_rank", 512),
        nope_dim=config.integer("qk_nope_head_dim", 128),
        rope_dim=config.integer("qk_rope_head_dim", 64),
        value_dim=config.integer("v_head_dim", 128),
        query_rank=config.optional_integer("q_lora_rank") if "q_lora_rank" in config.values else 1_536,
    )
    names = {
        "kv_lora_rank": latent.rank, "qk_nope_head_dim": latent.nope_dim, "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim, "q_lora_rank": 1 if latent.query_rank is None else latent.query_rank,
    }  # fmt: skip
    for key, size in names.items():
        if size < 1 or (key == "qk_rope_head_dim" and size % 2):
            raise config.refuse(key, f"must be above 0{', and even' if size > 0 else ''}, is {size}")
    heads = Heads(num_heads, 1, latent.rank + latent.rope_dim, latent.rank)
    rope = read_rope(config, config.integer("max_position_embeddings", max_position), more=more)
    rope = replace(rope, in_pairs=in_pairs)
    scale = latent.query_dim**-0.5 * score_scale(rope)
    own = {"heads": heads, "rope": rope, "latent": latent, "attention_scale": scale, "experts": experts}
    return read_decoder(config, name, max_position, **own | fields)


def read_experts(config: Fields, scoring: str, *, size: int, num_shared: int, first: int) -> Experts:
    """Read the experts. `size`, `num_shared` and `first` (first layer with experts) are the defaults of config.json."""
    refuse_other(config, "scoring_func", scoring)
    first, every = config.integer("first_k_dense_replace", first), config.integer("moe_layer_freq", 1, least=1)
    size, layers = config.integer("moe_intermediate_size", size), range(config.integer("num_hidden_layers"))
    experts = Experts(
        num=config.integer("n_routed_experts", 64 if scoring == "softmax" else 256),
        num_used=config.integer("num_experts_per_tok", 8),
        size=size,
        shared_size=size * config.integer("n_shared_experts", num_shared),
        is_normalized=False,
        scale=config.number("routed_scaling_factor", 1.0 if scoring == "softmax" else 2.5),
        dense_layers=tuple(layer for layer in layers if layer < first or layer % every),
    )
    return check_experts(config, experts, ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"))


def rename_deepseek(name: str) -> str | None:
    text = text_model_name(name, ("vision_tower.", "mm_projector.", "multi_modal_projector."))
    return None if text is None else text.replace(".mlp.shared_experts.", ".mlp.shared_expert.")


DEEPSEEK_V2 = Family(
    name="deepseek_v2", build=Deepseek, read=read_deepseek_v2, rename=rename_deepseek, gguf=gguf_deepseek.V2
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3", build=Deepseek, read=read_deepseek_v3, rename=rename_deepseek, drops_layers=True,
    nested="text_config", gguf=gguf_deepseek.V3,
)  # fmt: skip
