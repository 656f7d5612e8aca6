"""GGUF files of LFM2: layers without key/value heads are convolutions, and the last norm is that of the embeddings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.config.recurrent import Recurrent
from quire.runtime.models import gguf_config
from quire.runtime.models.family import GGUF_INNER, GGUF_OUTER, GgufFamily
from quire.runtime.models.gguf_layout import Rearranged
from quire.runtime.models.hf_config import check_width

_KV_HEADS, _WIDTH, _DENSE = "attention.head_count_kv", "shortconv.l_cache", "leading_dense_block_count"


def read_dense(fields: Fields, config: ModelConfig) -> ModelConfig:
    counts, width = fields.integers(_KV_HEADS, config.num_layers), fields.integer(_WIDTH)
    check_width(fields, _WIDTH, width)
    layers = tuple(layer for layer, count in enumerate(counts) if count == 0)
    recurrent = Recurrent(1, config.hidden_size, 0, 1, width, layers, kind="convolution")
    return replace(config, recurrent=recurrent if layers else None)


def read_mixture(fields: Fields, config: ModelConfig) -> ModelConfig:
    if fields.integer(gguf_config.GATING) != gguf_config.SIGMOID:
        raise fields.refuse(gguf_config.GATING, f"must be {gguf_config.SIGMOID} (sigmoid)")
    dense = range(min(fields.integer(_DENSE, least=0), config.num_layers))
    experts = gguf_config.read_experts(fields, by_sigmoid=True, dense_layers=tuple(dense))
    return replace(read_dense(fields, config), experts=experts)


def rearrange(config: ModelConfig, names: Collection[str]) -> dict[str, Rearranged]:  # noqa: ARG001
    """Describe the convolutions, which files store as matrices."""
    found, recurrent, hidden = {}, config.recurrent, config.hidden_size
    for layer in () if recurrent is None else recurrent.layers:
        assert recurrent is not None
        name, width = f"model.layers.{layer}.conv.conv.weight", recurrent.width
        found[name] = Rearranged({name: (hidden, width)}, (hidden, 1, width))
    return found


_OUTER = GGUF_OUTER | {"token_embd_norm.weight": "model.norm.weight"}
_INNER = GGUF_INNER | {
    "attn_norm": "operator_norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
}
_EXPERTS = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.*.w1",
    "ffn_down_exps": "feed_forward.experts.*.w2",
    "ffn_up_exps": "feed_forward.experts.*.w3",
    "exp_probs_b.bias": "feed_forward.gate.e_score_correction_bias",
}
DENSE = GgufFamily(
    outer=_OUTER, inner=_INNER, qk_norm=True, settings=frozenset({_WIDTH}), read=read_dense,
    whole=gguf_config.heads_where_present, rearrange=rearrange,
)  # fmt: skip
MIXTURE = replace(
    DENSE, inner=_INNER | _EXPERTS, read=read_mixture,
    settings=frozenset({_WIDTH, _DENSE, gguf_config.GATING, *gguf_config.EXPERTS}),
)  # fmt: skip
