"""The decoder's layers by Triton kernels: what the plain blocks do, with neighbours joined in one launch.

A layer is six launches for one row: norm and q, k, v; head norms, positions and cache; attention; output added to the
residual stream; norm, gate and up; down added to the stream. More rows have their norms apart, and by cuBLAS the gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.model import Heads, ModelConfig
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.embedding import embed_newest
from quire.kernels.triton.products import Norm
from quire.kernels.triton.rotary import HeadNorms, LayerMemory, rotate_and_store
from quire.runtime.attention.backend import LayerCache
from quire.runtime.attention.triton import TritonAttention, TritonPlan
from quire.runtime.layers.rotary import Rotary
from quire.runtime.layers.skinny import FusedMultiply
from quire.runtime.layers.step import ForwardStep
from quire.runtime.sampling.history import TokenHistory


@dataclass(frozen=True, slots=True)
class TritonLayer:
    """One block's weights."""

    input_norm: Norm
    qkv: FusedMultiply
    head_norms: HeadNorms | None
    output: FusedMultiply
    post_norm: Norm
    gate_up: FusedMultiply
    down: FusedMultiply


class TritonStack:
    """From tokens to hidden states. Nothing here waits for the device or depends on a token's value: it can be
    captured once `reserve` has seen the longest sequence."""

    def __init__(
        self,
        layers: Sequence[TritonLayer],
        embedding: Tensor,
        rotary: Rotary,
        attention: TritonAttention,
        heads: Heads,
        activation: str,
    ) -> None:
        self._layers, self._embedding, self._rotary, self._attention = layers, embedding, rotary, attention
        self._heads, self._activation = heads, activation
        self._angles = torch.empty(0)  # [positions, dim]: cos of dim / 2 frequencies, then sin

    def reserve(self, max_length: int) -> None:
        """Know the angles of sequences up to `max_length`; those known already stay where they are."""
        if max_length > len(self._angles):
            self._angles = self._rotary.angles(max_length)

    def takes(self, step: ForwardStep) -> bool:
        """Whether the step was planned for these kernels."""
        return isinstance(step.attention, TritonPlan)

    def __call__(self, step: ForwardStep) -> Tensor:  # [tokens, hidden]
        self.reserve(step.max_length)
        embedded = F.embedding(step.token_ids, self._embedding)
        return self.run(embedded, step.attention, step.caches, wanted=step.wanted)

    def newest(self, rows: Tensor, history: TokenHistory, positions: Tensor) -> Tensor:  # [entries, hidden]
        """The vectors of the newest tokens of `rows` [entries]; their places go into `positions` [entries]."""
        x = torch.empty(len(rows), self._embedding.shape[1], dtype=self._embedding.dtype, device=rows.device)
        embed_newest(rows, history.tokens, history.lengths, self._embedding, x, positions)
        return x

    def run(
        self,
        x: Tensor,
        plan: TritonPlan,
        caches: Sequence[LayerCache],
        layers: int | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """All layers, or only the first `layers`, over embedded tokens [tokens, hidden]; overwrites x.

        Of the last layer, the other tokens need only keys and values: what follows is computed for those `wanted`.
        """
        pending: Tensor | None = None
        *others, last = zip(self._layers[:layers], caches[:layers], strict=True)
        for layer, cache in others:
            pending = self._feed_forward(x, layer, self._attend(x, pending, layer, cache, plan))
        attended = self._attend(x, pending, *last, plan)
        if wanted is not None:
            x, attended = x.index_select(0, wanted), attended.index_select(0, wanted)
        if len(x):
            pending = self._feed_forward(x, last[0], attended)
            x = x if pending is None else x.add_(pending)
        return x

    def rehearse(self, step: ForwardStep) -> None:
        self.run(F.embedding(step.token_ids, self._embedding), step.attention, step.caches, layers=1)

    def _attend(
        self, x: Tensor, pending: Tensor | None, layer: TritonLayer, cache: LayerCache, plan: TritonPlan
    ) -> Tensor:  # [tokens, query heads * dim]
        """The first half of a layer up to the attention's result, from the residual stream x [tokens, hidden]. What is
        pending from the layer before is first added to x in place."""
        qkv = layer.qkv.after_norm(x, layer.input_norm, pending)  # [tokens, (query + 2 * kv heads) * dim]
        rotate_and_store(
            qkv, self._angles, plan.positions, plan.rows, plan.tables, LayerMemory(cache.key, cache.value),
            norms=layer.head_norms, dependent=len(x) >= self._attention.dependent_rows,
        )  # fmt: skip
        heads = self._heads
        by_head = qkv.view(len(x), -1, heads.dim)
        query, key, value = torch.split(by_head, [heads.num_query, heads.num_kv, heads.num_kv], dim=1)
        return self._attention.attend(query, key, value, cache, plan)

    def _feed_forward(self, x: Tensor, layer: TritonLayer, attended: Tensor) -> Tensor | None:  # [tokens, hidden]
        """The rest of a layer, added to the residual stream x [tokens, hidden] in place; what this returns is pending
        for the next layer."""
        pending = layer.output.add_to(x, attended)
        return layer.down.add_to(x, layer.gate_up.gated(x, layer.post_norm, self._activation, pending))


def join(stack: Any, config: ModelConfig, attention: Any) -> TritonStack | None:
    """The loaded blocks of `stack`, joined; None where the angles depend on more than a token's position."""
    if config.rope.kind == "dynamic" or config.activation not in ACTIVATIONS:
        return None
    layers = [_layer(block, config.norm_eps) for block in stack.layers]
    embedding = stack.embed_tokens.weight.data
    return TritonStack(layers, embedding, stack.rotary, attention, config.heads, config.activation)


def _layer(block: Any, eps: float) -> TritonLayer:
    attention, mlp = block.self_attn, block.mlp
    scales = getattr(attention.qk_norm, "weight", None)
    return TritonLayer(
        input_norm=Norm(block.input_layernorm.weight.data, eps),
        qkv=attention.qkv_proj.multiply,
        head_norms=None if scales is None else HeadNorms(scales.data[0], scales.data[1], eps),
        output=attention.o_proj.multiply,
        post_norm=Norm(block.post_attention_layernorm.weight.data, eps),
        gate_up=mlp.gate_up_proj.multiply,
        down=mlp.down_proj.multiply,
    )
