"""Operations on queries, keys and values in front of attention that only few models have: layer norms of heads, and
limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config.model import Heads, ModelConfig
from quire.kernels.native.program import Symbol
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.split import Split
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Projected, Value
from quire.runtime.layers.weights import Placement, Stored, WeightLayer, stored_for

if TYPE_CHECKING:
    from quire.runtime.layers.builder import LayerBuilder


class HeadLayerNorm(WeightLayer):
    """Layer norm of each query and key head, without a bias. Every head has its own weights. Ranks hold those of all
    heads, and use those of theirs.

    Checkpoints store a tensor of all query heads and one of all key heads, or with `names` one of each head. `stored`:
    the order of a head's elements.
    """

    random_mean = 1.0

    def __init__(
        self, heads: Heads, splits: tuple[Split, Split], eps: float, placement: Placement, stored: Stored,
        names: tuple[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`splits`: of the elements of query heads and of key heads. `names`: of tensors of a head, before its
        number."""
        super().__init__()
        counts = (heads.num_query, heads.num_kv)
        self._dim, self._num_query, self._eps, self._splits, self._stored = heads.dim, counts[0], eps, splits, stored
        self.weight = placement.empty(sum(counts), heads.dim)
        queries = slice(0, counts[0])
        self._spans: dict[str, slice | int] = {"q_norm.weight": queries, "k_norm.weight": slice(counts[0], None)}
        if names is not None:
            each = (f"{name}.{head}.weight" for name, count in zip(names, counts, strict=True) for head in range(count))
            self._spans = {part: row for row, part in enumerate(each)}
        self.parts = tuple(self._spans)
        self._own: Tensor | None = None  # [heads of this rank, dim]

    def load(self, part: str, tensor: Tensor) -> None:
        super().load(part, self._stored.in_order(tensor.flatten()).view(tensor.shape))

    def finish(self) -> None:
        whole = (self.weight.data[: self._num_query], self.weight.data[self._num_query :])
        rows = (split.of(each.flatten()) for split, each in zip(self._splits, whole, strict=True))
        self._own = torch.cat([row.view(-1, self._dim) for row in rows])

    def forward(self, qkv: Value) -> Value:
        """Norm the heads of qkv [tokens, (query + 2 * kv heads) * dim] in place and return it."""
        if isinstance(qkv, Symbol):
            return qkv.writer.call(self._call, (qkv,), qkv.width)
        return self._call(qkv)

    def _call(self, qkv: Tensor, given: object = None) -> Tensor:  # noqa: ARG002
        assert self._own is not None, "finish() was not called"
        heads = qkv[:, : self._own.numel()].unflatten(1, self._own.shape)  # type: ignore[no-untyped-call]
        heads.copy_(F.layer_norm(heads.float(), (self._dim,), eps=self._eps) * self._own)
        return qkv

    def _part(self, part: str) -> Tensor:
        return self.weight.data[self._spans[part]]


class QkvLimit(nn.Module):
    """Limits queries, keys and values to [-limit, limit], in place."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit

    def forward(self, qkv: Value) -> Value:
        return qkv.writer.call(self._call, (qkv,), qkv.width) if isinstance(qkv, Symbol) else self._call(qkv)

    def _call(self, qkv: Tensor, given: object = None) -> Tensor:  # noqa: ARG002
        return qkv.clamp_(-self._limit, self._limit)


class ChangedAttention(DecoderAttention):
    """Attention that changes queries, keys and values first, if the config says so."""

    head_names: tuple[str, str] | None = None  # see HeadLayerNorm

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__(config, layer, build)
        self.change: HeadLayerNorm | QkvLimit | None = None
        if config.head_layer_norms:
            outputs = self.qkv_proj.outputs
            self.change = HeadLayerNorm(
                config.heads, (outputs["q_proj"], outputs["k_proj"]), config.norm_eps, build.placement,
                stored_for(config.rope, config.heads.dim), self.head_names,
            )  # fmt: skip
        elif config.qkv_limit is not None:
            self.change = QkvLimit(config.qkv_limit)

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        if self.change is None:
            return super().forward(x, step)
        return self.o_proj.later(self.attention(self.change(self.qkv_proj(x)), step))
