"""Attention of one layer over the paged cache, and modules that add the gemms around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quire.config.model import Heads, ModelConfig
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.native.program import Symbol
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.modules import HeadNorm
from quire.runtime.layers.ops import LayerOps
from quire.runtime.layers.rotary import QueryScale, Rotary
from quire.runtime.layers.row_writer import RowSymbol, Untraceable
from quire.runtime.layers.split import Split
from quire.runtime.layers.step import ForwardStep, ImageBlock
from quire.runtime.layers.stream import Normed, Projected, Value
from quire.runtime.layers.texts import TextAttention, Texts
from quire.runtime.layers.weights import Placement, WeightLayer
from quire.runtime.layers.whole_images import see_whole_images

if TYPE_CHECKING:
    from quire.runtime.layers.builder import LayerBuilder

_LENT = "lent"  # memo key, with a layer: the step's keys and values [tokens, kv heads, dim]


class Attention(nn.Module):
    """Causal attention over a paged cache, after optional head norms and rotary positions. Side effect: writes the
    step's slots of the layer's cache.

    `lends`: other layers reuse this layer's keys and values. A layer that `borrows` gets queries alone, and `layer` is
    the layer whose cache it reads.
    """

    def __init__(
        self, heads: Heads, layer: int, rule: AttentionRule, rotary: Rotary | None, ops: LayerOps,
        *, lends: bool = False, borrows: bool = False, query_scale: QueryScale | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._heads, self._layer, self.rule, self._ops = heads, layer, rule, ops
        self.rotary, self._lends, self._borrows, self.query_scale = rotary, lends, borrows, query_scale
        self._num_rotated = heads.num_query + (0 if borrows else heads.num_kv)
        self.sees_images = True  # tokens of the step's image blocks see the whole of their image

    @property
    def variant(self) -> tuple[Heads, bool, bool]:
        """Layers with equal values launch the same kernels."""
        return self._heads, self.rule.window is None, self._borrows

    def forward(
        self, qkv: Value, step: ForwardStep, norm: HeadNorm | None = None, change: Tensor | None = None
    ) -> Value:
        """Attend. qkv: [tokens, (query + 2 * kv heads) * dim or more], or queries alone; overwritten. `change` (same
        shape) is a LoRA change that has yet to be added to it. Returns [tokens, query heads * dim]."""
        if isinstance(qkv, Symbol):
            return self._trace_program(qkv, step, norm)
        if isinstance(qkv, RowSymbol):
            return self._trace_phase(qkv, step, norm)
        size = self._heads.query_size + 2 * self._heads.kv_size
        qkv, change = qkv[:, :size], None if change is None else change[:, :size]
        if step.backend.kernels == "triton" and (self.rotary is None or self.rotary.is_static):
            return self._by_triton(qkv, step, norm, change)
        return self._by_parts(qkv if change is None else qkv.add_(change), step, norm)

    def _by_parts(self, qkv: Tensor, step: ForwardStep, norm: HeadNorm | None) -> Tensor:
        heads = self._heads
        by_head = qkv.view(len(qkv), -1, heads.dim)
        if norm is not None and norm.of_values:
            by_head, norm = norm(by_head), None
        qk, value = by_head[:, : self._num_rotated], by_head[:, self._num_rotated :]
        qk = qk if norm is None or norm.is_last else norm(qk)
        if self.rotary is not None:
            qk = self._ops.rotate(qk, *self.rotary(step))
        qk = norm(qk) if norm is not None and norm.is_last else qk
        query, key = qk[:, : heads.num_query], qk[:, heads.num_query :]
        if self.query_scale is not None:
            query = self._ops.rotate(query, *self.query_scale(step))
        cache = step.caches[self._layer]
        if self._borrows:
            key, value = step.memo[_LENT, self._layer]
        else:
            self._ops.write(key, value, cache, step.slots_of(cache))
        if self._lends:
            step.memo[_LENT, self._layer] = key, value
        attended: Tensor = step.backend.attend(query, key, value, cache, step.attention_of(cache), self.rule)
        return self._with_images(attended, query, step)

    def _by_triton(self, qkv: Tensor, step: ForwardStep, norm: HeadNorm | None, change: Tensor | None) -> Tensor:
        """Add the change, norm, rotate and write the cache in one launch, then attend. Queries of chunks are left to
        their attention kernel if nothing else reads or changes them, and it can norm and rotate them itself."""
        from quire.kernels.triton.rotary import HeadNorms, LayerMemory, QueryRotary, rotate_and_store

        heads, cache = self._heads, step.caches[self._layer]
        plan = step.attention_of(cache)
        norms = (
            None if norm is None else HeadNorms(norm.of_queries, norm.of_keys, norm.eps, norm.of_values, norm.is_last)
        )
        table, lines = (None, None) if self.rotary is None else self.rotary.angles_of(step)
        memory = LayerMemory(cache.key, cache.value, scales=cache.scales)
        is_dependent = step.backend.is_dependent(len(qkv))
        by_head, stored = qkv.view(len(qkv), -1, heads.dim), 0 if self._borrows else heads.num_kv
        query, key, value = torch.split(by_head, [heads.num_query, stored, stored], dim=1)
        if change is None and self.query_scale is None and not self._image_blocks(step):
            plan = step.backend.defer_rotary(query, cache, plan, self.rule, QueryRotary(table, lines, norms))
        rotate_and_store(
            qkv, table, plan.positions, plan.rows, plan.tables, memory, norms=norms, angles=lines,
            stores=not self._borrows, dependent=is_dependent, change=change,
            decodes=None if plan.rotary is None else plan.lengths,
        )  # fmt: skip
        if self.query_scale is not None:
            table, lines = self.query_scale.angles_of(step)
            rotate_and_store(
                qkv[:, : heads.query_size], table, plan.positions, plan.rows, plan.tables, memory, angles=lines,
                stores=False, dependent=is_dependent,
            )  # fmt: skip
        attended: Tensor = step.backend.attend(query, key, value, cache, plan, self.rule)
        return self._with_images(attended, query, step)

    def _image_blocks(self, step: ForwardStep) -> tuple[ImageBlock, ...]:
        """Return the images of the step whose tokens see the whole of them in this layer."""
        return step.features.blocks if self.sees_images and step.features is not None else ()

    def _with_images(self, attended: Tensor, query: Tensor, step: ForwardStep) -> Tensor:
        """Let the images of the step see the whole of themselves."""
        if blocks := self._image_blocks(step):
            see_whole_images(attended, query, blocks, step.caches[self._layer], self.rule)
        return attended

    def _trace_program(self, qkv: Symbol, step: ForwardStep, norm: HeadNorm | None) -> Symbol:
        """Append the operations to the program that is being traced."""
        heads, writer, cache = self._heads, qkv.writer, step.caches[self._layer]
        place = (self._layer, cache.table)
        if norm is not None and not norm.is_last:
            writer.norm_heads(qkv, norm.scales, norm.eps)
        if self.rotary is not None:
            writer.rotate(qkv, self.rotary, self._num_rotated, heads.dim)
        if norm is not None and norm.is_last:
            writer.norm_heads(qkv, norm.scales, norm.eps)
        if self.query_scale is not None:
            writer.rotate(qkv, self.query_scale, heads.num_query, heads.dim)
        scaled = None if cache.key_scales is None else cache.key
        if not self._borrows:
            writer.write(qkv, place, heads.query_size, heads.num_kv, heads.dim, cache=scaled)
        sizes = (heads.num_query, heads.num_kv, heads.dim)
        found = writer.attend(qkv, place, sizes, (cache.key.shape[2], cache.block_heads), self.rule, cache=scaled)
        if self._image_blocks(step):
            writer.call(self._call_with_images, (qkv, found), 1)
        return found

    def _call_with_images(self, qkv: Tensor, attended: Tensor, given: ForwardStep) -> Tensor:
        """Run inside a program as a Python call. A call must return a tensor; this one is not used."""
        query = qkv[:, : self._heads.query_size].view(len(qkv), -1, self._heads.dim)
        return self._with_images(attended, query, given)[:, :1]

    def _trace_phase(self, qkv: RowSymbol, step: ForwardStep, norm: HeadNorm | None) -> RowSymbol:
        """Append the attention phase to the row kernel that is being traced."""
        if self._lends or self._borrows:
            raise Untraceable("layers share keys and values")
        if self.query_scale is not None or (norm is not None and norm.is_last):
            raise Untraceable("queries are scaled by position, or heads normed after they are rotated")
        if self.rule.slopes is not None:
            raise Untraceable("scores have biases (ALiBi)")
        if self.rule.is_chunked:
            raise Untraceable("layers attend within chunks of the text")
        angles = None
        if self.rotary is not None:
            if not self.rotary.is_static:
                raise Untraceable("rotary positions change with the length of the sequence")
            angles = self.rotary.angles(step.max_length)
        return qkv.writer.attend(qkv, self._heads, step.caches[self._layer], self.rule, norm, angles)


class Sinks(WeightLayer):
    """Attention sinks: a score per query head, without a value. Never reallocated: attention rules refer to it."""

    parts = ("sinks",)

    def __init__(self, heads: Split, placement: Placement) -> None:
        super().__init__()
        self._heads = heads  # query heads
        self.weight = placement.empty(heads.count)

    def whole_shape(self, part: str) -> tuple[int, ...]:  # noqa: ARG002
        return (self._heads.total,)

    def own(self, part: str, whole: Tensor) -> Tensor:  # noqa: ARG002
        return self._heads.of(whole)

    def load(self, part: str, tensor: Tensor) -> None:
        super().load(part, self.own(part, tensor))


class OutputGate(nn.Module):
    """Multiplies the attention output by the sigmoid of gate logits."""

    def __init__(self, ops: LayerOps) -> None:
        super().__init__()
        self._ops = ops

    def forward(self, attended: Value, wide: Value) -> Value:
        """Gate `attended` [tokens, size], which is overwritten. Its logits are the last `size` elements of each row of
        `wide`."""
        return self._ops.gate_by(attended, wide)


class DecoderAttention(nn.Module):
    """Attention of most decoders, by the config's flags: head norms, sinks, windows, an output gate, values that equal
    keys. A layer that reads the keys and values of another layer projects queries alone."""

    norm_offset = 0.0  # the checkpoint stores norm weights minus this
    norms_values = False  # query, key and value heads are all normed
    norms_last = False  # heads are normed after the rotary positions
    gate_name: str | None = None  # of the output gate's matrix; None: its rows are in q_proj

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, heads, bias = config.hidden_size, config.heads_of(layer), config.qkv_bias
        is_own, rope = config.kv_layer_of(layer) == layer, config.rope_of(layer)
        if not is_own:
            self.qkv_proj = build.query_linear("q_proj", hidden, heads, bias=bias)
        elif config.attention_gate:
            self.qkv_proj = build.gated_qkv_linear(hidden, heads, bias=bias, gate_name=self.gate_name)
        else:
            is_twice = config.keys_are_values and config.window_of(layer) is None
            self.qkv_proj = build.qkv_linear(hidden, heads, bias=bias, keys_are_values=is_twice, rope=rope)
        has_norm = config.qk_norm or self.norms_values
        which = {"of_keys": is_own, "of_values": is_own and self.norms_values, "is_last": self.norms_last}
        norm = build.head_norm(heads, config.norm_eps, self.norm_offset, **which) if has_norm else None
        self.qk_norm, self.sinks = norm, build.sinks(heads) if config.attention_sinks else None
        self.attention = build.attention_of(config, layer, self.sinks)
        self.gate = build.output_gate() if config.attention_gate else None
        self.o_proj = build.row_linear("o_proj", heads, hidden, bias=config.o_bias)

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        if self.gate is None:
            qkv, change = self.qkv_proj.gemm_and_change(x)
            return self.o_proj.later(self.attention(qkv, step, self.qk_norm, change))
        qkv = self.qkv_proj(x)
        return self.o_proj.later(self.gate(self.attention(qkv, step, self.qk_norm), qkv))


class SelfAttention(nn.Module):
    """Attention with its q, k, v gemm and its output gemm."""

    def __init__(self, qkv_proj: Linear, attention: Attention | TextAttention, out_proj: Linear) -> None:
        super().__init__()
        self.qkv_proj, self.attention, self.out_proj = qkv_proj, attention, out_proj

    def forward(self, x: Value | Normed, step: ForwardStep | Texts) -> Projected:  # x: [tokens, hidden]
        return self.out_proj.later(self.attention(self.qkv_proj(x), step))
