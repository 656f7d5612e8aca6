"""Multi-head latent attention (MLA): the cache holds one latent vector per token, which all heads read.

Only latents are cached. In the absorbed form, the matrix that would expand latents to keys is multiplied into the
queries, and the one that would expand them to values into the attention output, so keys and values are never computed.
On a GPU, prompt chunks that see a latent often enough expand it instead (`attend_expanded` of the backend).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.config.model import Heads, Latent
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.native.program import Symbol
from quire.runtime.layers.head_linear import HeadLinear, heads_of
from quire.runtime.layers.indexer import HeadRotation, TokenChooser
from quire.runtime.layers.modules import RMSNorm
from quire.runtime.layers.ops import LayerOps
from quire.runtime.layers.rotary import QueryScale, Rotary, Rotation
from quire.runtime.layers.split import Split
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Value
from quire.runtime.layers.weights import Placement, WeightLayer

Choice = tuple[TokenChooser, tuple[Value, ...]]  # and the inputs of its `choose`
MakeHeads = Callable[[Tensor, int], HeadLinear]  # weight [heads, outputs, inputs], `rest`


class LatentExpansion(WeightLayer):
    """The matrix that expands latents to keys and values of all heads, split by `finish` into two matrices per head.
    Never quantized, because it is small."""

    parts = ("kv_b_proj.weight",)
    is_always_dequantized = True

    def __init__(self, heads: Split, latent: Latent, make: MakeHeads, placement: Placement) -> None:
        super().__init__()
        self._heads, self._latent, self._make = heads, latent, make
        self._num_heads, self._width = heads.count, latent.nope_dim + latent.value_dim
        self.weight = placement.empty(self._num_heads * self._width, latent.rank)
        self.to_latents: HeadLinear | None = None  # query [nope] -> [rank]; its rotary part passes through
        self.to_values: HeadLinear | None = None  # latent [rank] -> value

    def whole_shape(self, part: str) -> tuple[int, ...]:  # noqa: ARG002
        return (self._heads.total * self._width, self._latent.rank)

    def own(self, part: str, whole: Tensor) -> Tensor:  # noqa: ARG002
        return self._heads.times(self._width).of(whole)

    def used_part(self, part: str, tensor: Tensor) -> Tensor:
        return self.own(part, tensor)

    def load(self, part: str, tensor: Tensor) -> None:
        super().load(part, self.own(part, tensor))

    def finish(self) -> None:
        latent = self._latent
        by_head = self.weight.data.view(self._num_heads, -1, latent.rank)
        keys, values = by_head[:, : latent.nope_dim], by_head[:, latent.nope_dim :]
        self.to_latents = self._make(keys.transpose(1, 2), latent.rope_dim)
        self.to_values = self._make(values, 0)
        del self.weight


class LatentAttention(nn.Module):
    """Causal attention of `heads` over latents. Side effect: writes the step's slots of the layer's cache."""

    def __init__(
        self, heads: Heads, latent: Latent, layer: int, rule: AttentionRule, rotary: Rotary, ops: LayerOps,
        query_scale: QueryScale | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._heads, self._latent, self._layer, self.rule, self._ops = heads, latent, layer, rule, ops
        self.rotary, self.query_scale, self._rotate_heads = rotary, query_scale, HeadRotation(rotary, ops)

    def forward(
        self, query: Value, latents: Value, step: ForwardStep, norm: RMSNorm, expansion: LatentExpansion,
        choice: Choice | None = None,
    ) -> Value:  # fmt: skip
        """Attend. query: [tokens, at least query heads * (nope + rope)]; latents: [tokens, ...], whose last rank + rope
        elements are the token's latent before its norm. Both are overwritten. choice: chooses the tokens that are
        attended to. Returns [tokens, query heads * value dim]."""
        assert expansion.to_latents is not None, "finish() was not called"
        assert expansion.to_values is not None
        if isinstance(query, Symbol):
            return expansion.to_values(self._trace_program(query, latents, step, norm, expansion.to_latents, choice))
        heads, latent, cache = self._heads, self._latent, step.caches[self._layer]
        plan, is_triton = step.attention_of(cache), step.backend.kernels == "triton"
        if is_triton and self.rotary.is_static:
            self._store_by_triton(query, latents, step, norm)
        else:
            self._store_by_parts(query, latents, step, norm)
        if self.query_scale is not None:
            heads_of(query, heads.num_query, latent.query_dim).mul_(self.query_scale(step).cos[..., :1])
        chosen = None if choice is None else choice[0].choose(step, cache, self._rotate_heads, *choice[1])
        if is_triton and plan.expanded is not None and chosen is None:
            attended: Tensor = step.backend.attend_expanded(query, cache, plan, self.rule, expansion)
            return attended
        compared = expansion.to_latents(query).view(len(query), heads.num_query, heads.dim)
        key = latents[:, None, -heads.dim :]  # [tokens, 1, dim]; rotated, unless the backend reads it from the cache
        if chosen is not None:
            return expansion.to_values(chosen.attend(compared, key, cache, self.rule))
        attended = step.backend.attend(compared, key, key[..., : latent.rank], cache, plan, self.rule)
        return expansion.to_values(attended)

    def _store_by_parts(self, query: Tensor, latents: Tensor, step: ForwardStep, norm: RMSNorm) -> None:
        """Rotate queries and latents in place, and write latents to the cache."""
        heads, latent, cache = self._heads, self._latent, step.caches[self._layer]
        key, rotation = latents[:, -heads.dim :], self.rotary(step)
        norm.of_part(key, 0)
        key = key.unsqueeze(1)  # [tokens, 1, dim]
        self._rotate(key[..., latent.rank :], rotation)
        self._rotate(heads_of(query, heads.num_query, latent.query_dim)[..., latent.nope_dim :], rotation)
        self._ops.write(key, None, cache, step.slots_of(cache))

    def _rotate(self, x: Tensor, rotation: Rotation) -> None:
        x.copy_(self._ops.rotate(x.clone(memory_format=torch.contiguous_format), *rotation))

    def _store_by_triton(self, query: Tensor, latents: Tensor, step: ForwardStep, norm: RMSNorm) -> None:
        """Norm latents and write them to the cache, and rotate queries in place, by one launch."""
        from quire.kernels.triton.latent import store_latents

        heads, latent, cache = self._heads, self._latent, step.caches[self._layer]
        plan = step.attention_of(cache)
        by_head = heads_of(query, heads.num_query, latent.query_dim)
        store_latents(
            latents[:, -heads.dim :], by_head[..., latent.nope_dim :], norm.as_norm,
            self.rotary.angles(step.max_length), plan.positions, plan.rows, plan.tables, cache.key,
            dependent=step.backend.is_dependent(len(query)),
        )  # fmt: skip

    def _trace_program(
        self, query: Symbol, latents: Symbol, step: ForwardStep, norm: RMSNorm, to_latents: HeadLinear,
        choice: Choice | None,
    ) -> Symbol:  # fmt: skip
        """Append the operations to the program that is being traced."""
        heads, latent, writer, cache = self._heads, self._latent, query.writer, step.caches[self._layer]
        column, place = latents.width - heads.dim, (self._layer, cache.table)
        quantized = cache.key if cache.rounds else None
        norm.of_part(latents, column)
        writer.rotate(latents, self.rotary, 1, latent.rope_dim, column=column + latent.rank)
        writer.rotate(query, self.rotary, heads.num_query, latent.query_dim, column=latent.nope_dim)
        if self.query_scale is not None:
            parts = heads.num_query * latent.query_dim // latent.scaled_dim
            writer.rotate(query, self.query_scale, parts, latent.scaled_dim)
        writer.write(latents, place, column, 1, heads.dim, latent=latent.rank, cache=quantized)
        if choice is not None:
            call = partial(self._call_chosen, choice[0])
            return writer.call(call, (to_latents(query), *choice[1]), heads.num_query * latent.rank)
        sizes = (heads.num_query, 1, heads.dim)
        return writer.attend(
            to_latents(query), place, sizes, (cache.key.shape[2], 1), self.rule, latent=latent.rank, cache=quantized
        )

    def _call_chosen(self, chooser: TokenChooser, compared: Tensor, *rest: Any) -> Tensor:
        """Run inside a program as a Python call. rest: the inputs of `choose`, then the step."""
        *inputs, step = rest
        cache = step.caches[self._layer]
        by_head = compared.reshape(len(compared), self._heads.num_query, self._heads.dim)
        chosen = chooser.choose(step, cache, self._rotate_heads, *inputs)
        if chosen is not None:
            return chosen.attend(by_head, by_head[:, :1], cache, self.rule)  # keys are cached
        plan = step.attention_of(cache)
        attended: Tensor = step.backend.attend(by_head, by_head, by_head, cache, plan, self.rule)  # keys are cached
        return attended
