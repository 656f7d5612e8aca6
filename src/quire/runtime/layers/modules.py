"""RMS norms, embeddings and the tied output head."""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config.model import Heads
from quire.kernels.native.int8_panels import HALF_GROUP, is_int8_format
from quire.kernels.native.ops import PackedWeight, read_rows
from quire.kernels.native.program import Symbol
from quire.kernels.norm import Norm
from quire.runtime.layers.gemm import Gemm, Multiply
from quire.runtime.layers.native import IntegerGemm, NativeMultiply
from quire.runtime.layers.ops import LayerOps, normalize
from quire.runtime.layers.received import ReceivedStream
from quire.runtime.layers.split import Split, as_split
from quire.runtime.layers.stream import Normed, PostNormed, Projected, Stream, Value
from quire.runtime.layers.weights import Placement, WeightLayer
from quire.runtime.parallel.group import RankGroup
from quire.runtime.quantization.levels import LevelWeight
from quire.runtime.quantization.weight import StoredWeight


class RMSNorm(WeightLayer):
    """RMSNorm over the last dimension, computed in float32.

    Of a residual stream it is computed by the layer that reads it; of a layer's output, when that is added to the
    stream. Checkpoints may store weights minus `offset` or divided by `factor`; these are held in float32 for
    precision.
    """

    random_mean = 1.0

    def __init__(
        self, name: str, size: int, eps: float, ops: LayerOps, placement: Placement, offset: float = 0.0,
        factor: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self._changes = offset != 0.0 or factor != 1.0
        self.weight = placement.empty(size, dtype=torch.float32 if self._changes else None)
        self.parts = (f"{name}.weight",)
        self._eps, self._ops, self._offset, self._factor = eps, ops, offset, factor
        self.as_norm = Norm(self.weight.data, eps)

    @overload
    def forward(self, x: Stream) -> Normed: ...
    @overload
    def forward(self, x: Projected) -> PostNormed: ...
    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    def forward(self, x: Stream | Projected | Tensor) -> Normed | PostNormed | Tensor:  # [tokens, size]
        if isinstance(x, Projected):
            return PostNormed(x, self)
        return Normed(x, self) if isinstance(x, Stream) else self.of(x)

    def load(self, part: str, tensor: Tensor) -> None:
        super().load(part, (tensor.float() + self._offset) * self._factor if self._changes else tensor)

    def drop_weights(self) -> None:
        """Norm without weights: checkpoints store none."""
        self.parts = ()
        self.weight.data.fill_(1.0)

    def of(self, x: Value) -> Value:
        return self._ops.rms_norm(x, self.weight.data, self._eps)

    def of_sum(self, x: Tensor, change: Tensor) -> Tensor:
        return self._ops.add_rms_norm(x, change, self.weight.data, self._eps)

    def of_first(self, x: Value) -> Value:
        """Return the norm of the first elements of each row: [tokens, at least size] -> [tokens, size]."""
        if isinstance(x, Symbol):
            return x.writer.norm(x, self.weight.data, self._eps)
        return self.of(x[:, : len(self.weight)])

    def of_part(self, x: Value, column: int) -> None:
        """Norm `size` elements of each row in place, from `column` on."""
        if isinstance(x, Symbol):
            x.writer.norm_part(x, self.weight.data, self._eps, column)
        else:
            part = x[:, column : column + len(self.weight)]
            part.copy_(self.of(part))


class HeadNorm(WeightLayer):
    """RMSNorm of each query and key head (Qwen3) in one pass; of queries alone if `num_kv` is 0. With `of_values`
    (Gemma 4) also of value heads, without weights. `is_last`: after the rotary positions (HunYuan). Checkpoints may
    store weights minus `offset`."""

    random_mean = 1.0

    def __init__(
        self, heads: Heads, eps: float, placement: Placement, offset: float = 0.0, *, of_values: bool = False,
        is_last: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.is_last = is_last
        self.parts = ("q_norm.weight", "k_norm.weight") if heads.num_kv else ("q_norm.weight",)
        self.weight = placement.empty(len(self.parts), heads.dim, dtype=torch.float32 if offset else None)
        self.eps, self._offset, self.of_values = eps, offset, of_values
        self._counts = (heads.num_query, heads.num_kv)
        self._scales: Tensor | None = None

    @property
    def scales(self) -> Tensor:  # [query + kv (+ value) heads, dim]
        assert self._scales is not None, "finish() was not called"
        return self._scales

    def drop_weights(self) -> None:
        """Norm without weights: checkpoints store none."""
        self.parts = ()
        self.weight.data.fill_(1.0)

    def load(self, part: str, tensor: Tensor) -> None:
        super().load(part, tensor if self._offset == 0.0 else tensor.float() + self._offset)

    def finish(self) -> None:
        weight = self.weight.data
        counts = torch.tensor(self._counts[: len(weight)], device=weight.device)
        values = weight.new_ones(self._counts[1] if self.of_values else 0, weight.shape[1])
        self._scales = torch.cat((weight.repeat_interleave(counts, dim=0), values))
        self.of_queries, self.of_keys = weight[0], weight[-1]  # [dim] each

    def forward(self, qk: Tensor) -> Tensor:  # [tokens, normed heads, dim]
        return normalize(qk, self.eps).mul_(self.scales)

    def _part(self, part: str) -> Tensor:
        return self.weight.data[self.parts.index(part)]


class Scalar(WeightLayer):
    """A scalar of the checkpoint."""

    random_mean = 1.0

    def __init__(self, name: str, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(1)
        self.parts = (name,)
        self.number = 1.0

    def finish(self) -> None:
        self.number = self.weight.data.item()


class ProjectionNorm(WeightLayer):
    """RMSNorm over all query heads of a token together, and over all its key heads (OLMo 2). Ranks of `group` sum the
    squares of their heads; `num_holders` ranks hold the same key heads."""

    parts = ("q_norm.weight", "k_norm.weight")
    random_mean = 1.0

    def __init__(
        self, queries: Split, keys: Split, eps: float, ops: LayerOps, placement: Placement,
        group: RankGroup | None = None, num_holders: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self._splits, self._num_holders, self._group = (queries, keys), num_holders, group
        self._spans = (slice(0, queries.count), slice(queries.count, queries.count + keys.count))
        self.weight = placement.empty(queries.count + keys.count)
        self._eps, self._ops = eps, ops

    def whole_shape(self, part: str) -> tuple[int, ...]:
        return (self._splits[self.parts.index(part)].total,)

    def own(self, part: str, whole: Tensor) -> Tensor:
        return self._splits[self.parts.index(part)].of(whole)

    def load(self, part: str, tensor: Tensor) -> None:
        super().load(part, self.own(part, tensor))

    def forward(self, qkv: Value) -> Value:
        """Norm qkv [tokens, (query + 2 * kv heads) * dim] in place and return it."""
        if self._group is not None:
            return qkv.writer.call(self._call, (qkv,), qkv.width) if isinstance(qkv, Symbol) else self._shared(qkv)
        for span in self._spans:
            if isinstance(qkv, Symbol):
                qkv.writer.norm_part(qkv, self.weight.data[span], self._eps, span.start)
            else:
                qkv[:, span] = self._ops.rms_norm(qkv[:, span].contiguous(), self.weight.data[span], self._eps)
        return qkv

    def _shared(self, qkv: Tensor) -> Tensor:
        assert self._group is not None
        squares = torch.stack([qkv[:, span].float().square().sum(dim=1) for span in self._spans])  # [2, tokens]
        squares[1] /= self._num_holders
        squares = self._group.all_reduce(squares) if len(qkv) else squares
        for span, split, total in zip(self._spans, self._splits, squares, strict=True):
            factor = torch.rsqrt(total / split.total + self._eps).unsqueeze(1)
            qkv[:, span] = (qkv[:, span].float() * factor).to(qkv.dtype) * self.weight.data[span]
        return qkv

    def _call(self, qkv: Tensor, given: object) -> Tensor:  # noqa: ARG002
        return self._shared(qkv)

    def _part(self, part: str) -> Tensor:
        return self.weight.data[self._spans[self.parts.index(part)]]


class Embedding(WeightLayer):
    """An embedding table, unquantized or quantized as in its file. Ranks of `group` share its rows: each looks up the
    tokens it holds, uses zeros for the others, and the vectors are summed over ranks."""

    def __init__(
        self,
        name: str,
        vocab: int | Split,
        size: int,
        gemm: Gemm,
        placement: Placement,
        group: RankGroup | None = None,
    ) -> None:
        super().__init__()
        self.vocab, self.size, self._group = as_split(vocab), size, group
        self.weight = placement.empty(self.vocab.count, size, dtype=gemm.held)
        self.levels: LevelWeight | None = None
        self.panels: PackedWeight | None = None  # in place of levels; shared with a tied output head
        self.parts = (f"{name}.weight",)
        self._gemm, self._placement = gemm, placement

    def load_quantized(self, part: str, weight: StoredWeight) -> bool:
        on_cpu = self._placement.device.type == "cpu"
        keeps = on_cpu and isinstance(weight, LevelWeight) and self._gemm.keeps(weight)
        native = weight.as_native(HALF_GROUP) if keeps and isinstance(weight, LevelWeight) else None
        if native is None:
            return super().load_quantized(part, weight)
        self.levels = native if self.vocab.is_whole else native.rows(self.vocab.index)
        self.weight = nn.Parameter(self.weight.data[:0].clone(), requires_grad=False)
        return True

    def whole_shape(self, part: str) -> tuple[int, ...]:
        return (self.vocab.total, *self.held_shape(part)[1:])

    def own(self, part: str, whole: Tensor) -> Tensor:  # noqa: ARG002
        return self.vocab.of(whole)

    def used_part(self, part: str, tensor: Tensor) -> Tensor:
        return self.own(part, tensor)

    def load(self, part: str, tensor: Tensor) -> None:
        self._part(part).copy_(self.own(part, tensor).to(self._placement.dtype))

    def finish(self) -> None:
        """Repack quantized weights into panels, which have the bits of the file, if gemms are in integers."""
        if self.levels is not None and isinstance(self._gemm, IntegerGemm):
            packed = self._gemm.pack_quantized(self.levels, None)
            if isinstance(packed, NativeMultiply) and is_int8_format(packed.weight):
                self.levels, self.panels = None, packed.weight

    def forward(self, token_ids: Tensor) -> Tensor:  # [tokens] -> [tokens, size]
        if self._group is None:
            return self._lines(token_ids)
        own = self.vocab.own[0]
        is_own = (token_ids >= own.start) & (token_ids < own.stop)
        vectors = self._lines(torch.where(is_own, token_ids - own.start, 0)) * is_own.unsqueeze(1)
        return self._group.all_reduce(vectors) if len(vectors) else vectors

    @property
    def dtype(self) -> torch.dtype:
        return self._placement.dtype

    def _lines(self, places: Tensor) -> Tensor:
        if self.panels is not None:
            return read_rows(self.panels, places).to(self._placement.dtype)
        if self.levels is not None:
            return self.levels.rows(places).values().to(self._placement.dtype)
        return F.embedding(places, self.weight).to(self._placement.dtype)

    def newest(self, rows: Tensor, tokens: Tensor, lengths: Tensor, positions: Tensor) -> Tensor:  # [entries, size]
        """Look up the newest token of each of `rows` [entries], by Triton. Reads tokens [all rows, capacity] and
        lengths [all rows]; writes the tokens' positions to `positions` [entries]."""
        from quire.kernels.triton.embedding import embed_newest

        x = torch.empty(len(rows), self.weight.shape[1], dtype=self._placement.dtype, device=rows.device)
        embed_newest(rows, tokens, lengths, self.weight.data, x, positions, first=self.vocab.own[0].start)
        return x if self._group is None else self._group.all_reduce(x)


class PairedEmbedding(nn.Module):
    """Concatenates the vectors of two tables. Owns no weights: both tables are layers of the model. Tokens that the
    second table lacks have its first vector."""

    def __init__(self, first: Embedding, second: Embedding) -> None:
        super().__init__()
        self._tables = (first, second)  # in a tuple, so that they are not children of this module
        self.dtype = first.dtype
        self._fewer = second.vocab.total if second.vocab.total < first.vocab.total else None

    def forward(self, token_ids: Tensor) -> Tensor:  # [tokens] -> [tokens, sizes of both]
        first, second = self._tables
        return torch.cat((first(token_ids), second(self._known(token_ids))), dim=1)

    def newest(self, rows: Tensor, tokens: Tensor, lengths: Tensor, positions: Tensor) -> Tensor:
        """See Embedding."""
        first, second = self._tables
        vectors = first.newest(rows, tokens, lengths, positions)
        if self._fewer is None:
            return torch.cat((vectors, second.newest(rows, tokens, lengths, positions)), dim=1)
        own = rows.clamp(min=0)  # negative: padding
        newest = tokens[own, (lengths[own] - 1).clamp(min=0)]
        return torch.cat((vectors, second(self._known(newest))), dim=1)

    def _known(self, token_ids: Tensor) -> Tensor:
        return token_ids if self._fewer is None else torch.where(token_ids < self._fewer, token_ids, 0)


class LentEmbedding(nn.Module):
    """Uses the embedding table of another model. Owns no weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._lent: tuple[TokenTable, ...] = ()  # in a tuple, so that it is not a child of this module

    def lend(self, table: TokenTable) -> None:
        self._lent = (table,)

    def forward(self, token_ids: Tensor) -> Tensor:  # [tokens] -> [tokens, size]
        vectors: Tensor = self._lent[0](token_ids)
        return vectors

    def newest(self, rows: Tensor, tokens: Tensor, lengths: Tensor, positions: Tensor) -> Tensor:
        """See Embedding."""
        return self._lent[0].newest(rows, tokens, lengths, positions)


class LentModule(nn.Module):
    """Calls a module of another model. Owns no weights."""

    def __init__(self) -> None:
        super().__init__()
        self._lent: tuple[nn.Module, ...] = ()  # in a tuple, so that it is not a child of this module

    def lend(self, module: nn.Module) -> None:
        self._lent = (module,)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self._lent[0](x)
        return found


TokenTable = Embedding | PairedEmbedding | ReceivedStream | LentEmbedding


class PositionEmbedding(WeightLayer):
    """A learned vector per position. The first `offset` rows of the table are unused."""

    def __init__(self, name: str, num_positions: int, size: int, placement: Placement, *, offset: int = 0) -> None:
        super().__init__()
        self.weight = placement.empty(offset + num_positions, size)
        self.parts = (f"{name}.weight",)
        self._offset = offset

    def forward(self, positions: Tensor) -> Tensor:  # [tokens] -> [tokens, size]
        """Look up the vectors. Positions past the end, of rows that ran ahead, get the last one."""
        return F.embedding((positions + self._offset).clamp_(0, len(self.weight) - 1), self.weight)


class TiedHead(WeightLayer):
    """Output head that multiplies by the embedding table, which `finish` finishes too. Has no checkpoint parts."""

    def __init__(self, embedding: Embedding, gemm: Gemm) -> None:
        super().__init__()
        self._embedding, self._gemm = (embedding,), gemm  # in a tuple, so that it is not a child of this module
        self.multiply: Multiply | None = None
        self.num_parts, self.num_inputs, self.num_outputs = 1, embedding.size, embedding.vocab.count

    @property
    def table(self) -> Embedding:
        return self._embedding[0]

    def finish(self) -> None:
        table, gemm = self._embedding[0], self._gemm
        table.finish()
        if table.panels is not None:
            self.multiply = NativeMultiply(table.panels, None)
        elif table.levels is None:
            self.multiply = gemm.pack(table.weight.data, None)
        else:
            self.multiply = gemm.pack_quantized(table.levels, None)

    def forward(self, x: Tensor) -> Tensor:  # [tokens, size] -> [tokens, vocab]
        assert self.multiply is not None, "finish() was not called"
        return self.multiply(x)
