"""Builds a model's layers and makes the choices that model files do not know: dtype, device, backend, ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.config.engine import DeviceConfig
from quire.config.model import Alibi, Heads, ModelConfig, QueryScaling, Rope
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.clamp import Clamp
from quire.runtime.accelerator import dependent_rows
from quire.runtime.attention.backend import AttentionBackend, LatentBackend
from quire.runtime.attention.registry import USUAL_BLOCK_SIZE, make_backend
from quire.runtime.device import torch_device
from quire.runtime.layers.attention import Attention, OutputGate, Sinks
from quire.runtime.layers.expert_layers import ExpertLayers
from quire.runtime.layers.gemm import multiplies_natively
from quire.runtime.layers.gemm_choice import choose_gemm
from quire.runtime.layers.head_linear import DenseHeads, HeadLinear, PackedHeads, TritonHeads
from quire.runtime.layers.latent import LatentAttention, LatentExpansion
from quire.runtime.layers.layer_norm import USUAL_LAYER_NORM, LayerNorm, LayerNormKind
from quire.runtime.layers.linear import KeysAsValues, Linear
from quire.runtime.layers.load_time_quantization import choose_quantizing_gemm
from quire.runtime.layers.mlp import MLP, GatedMLP, NormedGatedMLP, SideGate, SparseGatedMLP
from quire.runtime.layers.modules import (
    Embedding,
    HeadNorm,
    PositionEmbedding,
    ProjectionNorm,
    RMSNorm,
    Scalar,
    TiedHead,
)
from quire.runtime.layers.ops import choose_ops
from quire.runtime.layers.recurrent import RecurrentLayers
from quire.runtime.layers.rotary import Rotaries
from quire.runtime.layers.shared_norm import SharedNorm
from quire.runtime.layers.split import RankSplits, Split, concat_splits
from quire.runtime.layers.texts import TextAttention, text_attention_of
from quire.runtime.layers.weights import SAME_LAYOUT, Placement, Stored, stored_for
from quire.runtime.parallel.ranks import ALONE, Ranks

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,  # two values per byte
}
Names = tuple[str, str, str]  # of matrices
GATED = ("gate_proj", "up_proj", "down_proj")
QKV = ("q_proj", "k_proj", "v_proj")


class LayerBuilder:
    """Builds the layers of one model. Names passed to its methods are checkpoint names, relative to the parent
    module."""

    def __init__(
        self,
        config: DeviceConfig,
        heads: Heads,
        block_size: int = USUAL_BLOCK_SIZE,
        local_heads: Heads | None = None,
        *,
        many_rows: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """local_heads: heads of layers with a window, if they differ; many_rows: every step has many tokens, as with
        encoders; ranks: the ranks that share every layer."""
        self.ranks, self._splits = ranks, RankSplits(ranks.tensor, whole_experts=ranks.place.config.expert)
        heads, local_heads = self._splits.heads(heads), None if local_heads is None else self._splits.heads(local_heads)
        self.placement = Placement(TORCH_DTYPES[config.dtype], torch_device(config.device))
        dtype, device = self.placement.dtype, self.placement.device
        compute = dtype if multiplies_natively(dtype, device) else torch.float32
        self.backend: AttentionBackend = make_backend(
            config.attention_backend, heads, compute, self.placement, block_size, TORCH_DTYPES[config.kv_dtype],
            local_heads,
        )  # fmt: skip
        triton = self.backend.kernels == "triton"
        self._table_gemm = choose_gemm(  # never quantizes weights
            dtype, device, triton=triton, many_rows=many_rows, cpu_weights=config.cpu_weights
        )
        self._gemm = self._table_gemm
        self._float8 = config.quantization == "fp8"
        if config.quantization is not None:
            self._gemm = choose_quantizing_gemm(
                config.quantization, dtype, device, triton=triton, cpu_weights=config.cpu_weights
            )
        self._head_gemm = (
            self._table_gemm
            if triton
            else choose_gemm(dtype, device, keeps_weight=True, cpu_weights=config.cpu_weights)
        )
        self._ops = choose_ops(dtype, device, triton=triton)
        self._rotaries = Rotaries(self.placement)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self.placement.dtype

    @property
    def device(self) -> torch.device:
        return self.placement.device

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool) -> Linear:
        """Build a linear layer that every rank holds whole."""
        return Linear(inputs, {name: outputs}, bias, self._gemm, self.placement)

    def column_linear(
        self, name: str, inputs: int, outputs: int | Heads, *, bias: bool, stored: Stored = SAME_LAYOUT
    ) -> Linear:
        """Build a column-parallel layer: ranks share the outputs, an intermediate size or queries, keys and values."""
        split = self._splits.qkv(outputs) if isinstance(outputs, Heads) else self._splits.size(outputs)
        return Linear(inputs, {name: split}, bias, self._gemm, self.placement, stored)

    def query_linear(
        self, name: str, inputs: int, heads: Heads, *, bias: bool, dim: int | None = None, stored: Stored = SAME_LAYOUT
    ) -> Linear:
        """Build a column-parallel layer for queries alone, `dim` outputs per head."""
        split = self._splits.query(heads, dim)
        return Linear(inputs, {name: split}, bias, self._gemm, self.placement, stored)

    def row_linear(
        self, name: str, inputs: int | Heads, outputs: int, *, bias: bool, dim: int | None = None,
        stored: Stored = SAME_LAYOUT, reduces: bool = True,
    ) -> Linear:  # fmt: skip
        """Build a row-parallel layer: ranks share the inputs and all-reduce the result, unless `reduces` is False.
        Inputs are an intermediate size, or attention outputs with `dim` elements per query head."""
        split = self._splits.query(inputs, dim) if isinstance(inputs, Heads) else self._splits.size(inputs)
        return self._row_linear(name, split, outputs, bias=bias, stored=stored, reduces=reduces)

    def _row_linear(
        self, name: str, inputs: Split, outputs: int, *, bias: bool, stored: Stored = SAME_LAYOUT, reduces: bool = True
    ) -> Linear:
        group = self._splits.group
        if group is not None and group.size > 1 and inputs.is_whole:  # an expert that only this rank holds
            group = None
        layer = Linear(inputs, {name: outputs}, bias, self._gemm, self.placement, stored, group=group)
        layer.reduces = reduces and layer.reduces
        return layer

    def whole_linear(
        self, name: str | tuple[str, ...], inputs: int, outputs: int, *, bias: bool = True, transposed: bool = False
    ) -> Linear:
        """Build a linear layer that is whole on every rank and never quantized. `outputs`: of each of several parts."""
        names, stored = (name,) if isinstance(name, str) else name, Stored(transposed=transposed)
        return Linear(inputs, dict.fromkeys(names, outputs), bias, self._table_gemm, self.placement, stored)

    def patch_linear(self, name: str, kernel: tuple[int, ...], outputs: int, *, bias: bool = False) -> Linear:
        """Build a convolution over non-overlapping patches, as one gemm per patch. Never quantized."""
        inputs, stored = math.prod(kernel), Stored(kernel=kernel)
        return Linear(inputs, {name: outputs}, bias, self._table_gemm, self.placement, stored)

    def qkv_linear(
        self, inputs: int, heads: Heads, *, bias: bool, names: Names = QKV, keys_are_values: bool = False,
        rope: Rope | None = None,  # states whether checkpoints store rotated pairs side by side
    ) -> Linear:  # fmt: skip
        queries, keys, stored = self._splits.query(heads), self._splits.kv(heads), stored_for(rope, heads.dim)
        if keys_are_values:
            return KeysAsValues(inputs, queries, keys, bias, self._gemm, self.placement)
        outputs, each = zip(names, (queries, keys, keys), strict=True), (stored, stored, SAME_LAYOUT)
        return Linear(inputs, dict(outputs), bias, self._gemm, self.placement, dict(zip(names, each, strict=True)))

    def gated_qkv_linear(self, inputs: int, heads: Heads, *, bias: bool, gate_name: str | None = None) -> Linear:
        """Build the layer for queries, keys, values and the logits of the output gate. `gate_name`: the gate's matrix;
        None: q_proj has the gate rows of each head after its query rows."""
        keys, own = self._splits.kv(heads), self._splits.heads(heads)
        if gate_name is not None:
            queries = self._splits.query(heads)
            parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys, gate_name: queries}
            return Linear(inputs, parts, bias, self._gemm, self.placement)
        outputs = {"q_proj": self._splits.query(heads, 2 * heads.dim), "k_proj": keys, "v_proj": keys}
        query, gate = torch.arange(2 * own.query_size).view(own.num_query, 2, own.dim).transpose(0, 1).flatten(1)
        order = torch.cat((query, torch.arange(2 * own.query_size, 2 * (own.query_size + own.kv_size)), gate))
        return Linear(inputs, outputs, bias, self._gemm, self.placement, order=order)

    def output_gate(self) -> OutputGate:
        return OutputGate(self._ops)

    def stacked_linear(
        self,
        inputs: int,
        outputs: Mapping[str, int | Split],
        *,
        stored: Stored | Mapping[str, Stored] = SAME_LAYOUT,
    ) -> Linear:
        """Build one gemm for several matrices; `stored`: see Linear. Integer sizes are whole on every rank, Splits are
        shared."""
        return Linear(inputs, outputs, False, self._gemm, self.placement, stored)

    def ordered_linear(self, name: str, inputs: int, total: int, rows: Tensor) -> Linear:
        """Build a column-parallel layer whose outputs are these rows of a matrix with `total` rows, in this order."""
        held, order = torch.unique(rows, return_inverse=True)
        runs = torch.tensor_split(held, (torch.nonzero(held.diff() != 1).flatten() + 1).tolist())
        own = tuple(range(int(run[0]), int(run[-1]) + 1) for run in runs)
        return Linear(inputs, {name: Split(total, own)}, False, self._gemm, self.placement, order=order)

    def query_outputs(self, heads: Heads, dim: int) -> Split:
        """Return the split of query heads with `dim` outputs each, for `stacked_linear`."""
        return self._splits.query(heads, dim)

    @property
    def recurrent(self) -> RecurrentLayers:
        """The builder of recurrent layers."""
        return RecurrentLayers(self._splits, self._gemm, self._table_gemm, self.placement, self._row_linear, self._ops)

    @property
    def experts(self) -> ExpertLayers:
        """The builder of mixtures of experts."""
        return ExpertLayers(self, self._splits, self._table_gemm, self._ops, float8=self._float8)

    def gated_mlp(
        self,
        hidden: int,
        intermediate: int | Split,
        activation: str,
        *,
        bias: bool,
        names: Names = GATED,
        clamp: Clamp | None = None,
        sparsity: float = 0.0,
        reduces: bool = True,
    ) -> GatedMLP:
        """Build a gated MLP. `names`: the matrices for gate, up and down; gate and up may be one matrix. `clamp`:
        limits of the gate; `sparsity`: share of the gates that are cut to zero. An integer intermediate size is shared
        by the ranks; a Split is this rank's share. Without `reduces` the caller must all-reduce."""
        gate, up, down = names
        size = intermediate if isinstance(intermediate, Split) else self._splits.size(intermediate)
        both = {gate: concat_splits(size, size)} if gate == up else {gate: size, up: size}
        gate_up = Linear(hidden, both, bias, self._gemm, self.placement)
        down_proj = self._row_linear(down, size, hidden, bias=bias, reduces=reduces)
        if sparsity:
            group = None if size.is_whole else self._splits.group
            return SparseGatedMLP(gate_up, down_proj, activation, self._ops, sparsity, group)
        return GatedMLP(gate_up, down_proj, activation, self._ops, clamp)

    def normed_mlp(self, hidden: int, intermediate: int, activation: str, sub_norm: SharedNorm) -> NormedGatedMLP:
        """Build a gated MLP with a norm in front of `down_proj`."""
        size = self._splits.size(intermediate)
        gate_up = Linear(hidden, {"gate_proj": size, "up_proj": size}, False, self._gemm, self.placement)
        down_proj = self._row_linear("down_proj", size, hidden, bias=False)
        return NormedGatedMLP(gate_up, down_proj, activation, self._ops, sub_norm)

    def plain_mlp(
        self, hidden: int, intermediate: int | Split, activation: str, *, bias: bool, reduces: bool = True
    ) -> MLP:
        """Build an MLP without a gate. `intermediate` and `reduces`: as in `gated_mlp`."""
        size = intermediate if isinstance(intermediate, Split) else self._splits.size(intermediate)
        up = Linear(hidden, {"up_proj": size}, bias, self._gemm, self.placement)
        return self.mlp(up, self._row_linear("down_proj", size, hidden, bias=bias, reduces=reduces), activation)

    def mlp(self, up: Linear, down: Linear, activation: str) -> MLP:
        return MLP(up, down, activation, self._ops)

    def layer_norm(self, name: str, size: int, eps: float, kind: LayerNormKind = USUAL_LAYER_NORM) -> LayerNorm:
        return LayerNorm(name, size, eps, self._ops, self.placement, kind)

    def rms_norm(self, name: str, size: int, eps: float, offset: float = 0.0) -> RMSNorm:
        return RMSNorm(name, size, eps, self._ops, self.placement, offset)

    def shared_norm(self, name: str, size: int | Heads, eps: float) -> SharedNorm:
        """Build an RMSNorm of what a row-parallel layer reads: an intermediate size, or attention outputs."""
        split = self._splits.query(size) if isinstance(size, Heads) else self._splits.size(size)
        return SharedNorm(name, split, eps, self._ops, self.placement, self._splits.group)

    def head_norm(
        self, heads: Heads, eps: float, offset: float = 0.0, *, of_keys: bool = True, of_values: bool = False,
        is_last: bool = False,
    ) -> HeadNorm:  # fmt: skip
        own = self._splits.heads(heads)
        own = own if of_keys else replace(own, num_kv=0)
        return HeadNorm(own, eps, self.placement, offset, of_values=of_values, is_last=is_last)

    def scalar(self, name: str) -> Scalar:
        return Scalar(name, self.placement)

    def side_gate(self, column: int, activation: str) -> SideGate:
        return SideGate(column, activation, self._ops)

    def projection_norm(self, heads: Heads, eps: float) -> ProjectionNorm:
        splits = self._splits
        queries, keys, num = splits.query(heads), splits.kv(heads), splits.num_holders(heads)
        return ProjectionNorm(queries, keys, eps, self._ops, self.placement, splits.group, num)

    def rounded(self, number: float) -> float:
        """Return a number rounded to the model's dtype."""
        return torch.tensor(number, dtype=self.placement.dtype).item()

    def attention(
        self, heads: Heads, layer: int, rope: Rope | None, rule: AttentionRule | None = None,
        shared: tuple[bool, bool] = (False, False), scaling: QueryScaling | None = None,
    ) -> Attention:  # fmt: skip
        """Build attention. Without `rope` nothing is rotated. `rule`: scale, window, softcap and sinks of the layer; by
        default only the scale dim**-0.5. `shared`: whether it lends and borrows keys and values, see Attention.
        `scaling`: of queries without `rope`."""
        rule = rule or AttentionRule(heads.dim**-0.5)
        self.backend.accept(rule)
        rotary = None if rope is None else self._rotaries.rotary(rope, heads.dim if rope.dim is None else rope.dim)
        lends, borrows = shared
        scale = self._rotaries.query_scale(scaling if rope is None else rope, heads.dim)
        own = self._splits.heads(heads)
        return Attention(own, layer, rule, rotary, self._ops, lends=lends, borrows=borrows, query_scale=scale)

    def sinks(self, heads: Heads) -> Sinks:
        return Sinks(self._splits.query(heads, 1), self.placement)

    def _slopes(self, alibi: Alibi, heads: Heads) -> Tensor:  # [query heads]
        whole = torch.tensor(alibi.slopes(heads.num_query), device=self.placement.device)
        return self._splits.query(heads, 1).of(whole).contiguous()

    def attention_of(self, config: ModelConfig, layer: int, sinks: Sinks | None = None) -> Attention | TextAttention:
        """Build attention with the rotary positions, window, scale and softcap that the config has for the layer."""
        if config.encoder is not None:
            return text_attention_of(config, layer, self._splits.heads(config.heads), self._ops, self._rotaries)
        heads, scale = config.heads_of(layer), config.attention_scale
        scale = heads.dim**-0.5 if scale is None else scale
        held = None if sinks is None else sinks.weight.data
        window, softcap = config.window_of(layer), config.attention_softcap
        is_chunked = config.has_chunks and window is not None
        slopes = None if config.alibi is None else self._slopes(config.alibi, heads)
        rule = AttentionRule(scale, softcap, window, held, is_chunked=is_chunked, slopes=slopes)
        source = config.kv_layer_of(layer)
        shared = (config.kv_layers.count(layer) > 1, source != layer)
        place, rope = config.place_of(source), config.rope_of(layer)
        made = self.attention(heads, place, rope, rule, shared, config.query_scaling)
        made.sees_images = window is not None or config.vision is None or not config.vision.whole_in_windows
        return made

    def latent_expansion(self, config: ModelConfig) -> LatentExpansion:
        assert config.latent is not None
        queries = self._splits.query(config.heads, 1)
        return LatentExpansion(queries, config.latent, self._make_heads, self.placement)

    def latent_attention(self, config: ModelConfig, layer: int) -> LatentAttention:
        latent, factor = config.latent, config.attention_scale
        assert latent is not None
        rule = AttentionRule(latent.query_dim**-0.5 if factor is None else factor)
        self.backend.accept(rule)
        if isinstance(self.backend, LatentBackend):
            self.backend.accept_latent(latent, self.placement.dtype)
        rotary = self._rotaries.rotary(config.rope, latent.rope_dim)
        heads = self._splits.heads(config.heads)
        scale = self._rotaries.query_scale(config.rope, latent.scaled_dim)
        return LatentAttention(heads, latent, config.place_of(layer), rule, rotary, self._ops, scale)

    def _make_heads(self, weight: Tensor, rest: int) -> HeadLinear:
        if self.backend.kernels == "triton":
            return TritonHeads(weight, rest, dependent_rows=dependent_rows(self.placement.device))
        if self.backend.kernels == "native":
            return PackedHeads(weight, rest, self._table_gemm)
        return DenseHeads(weight, rest)

    def embedding(self, name: str, vocab_size: int, size: int) -> Embedding:
        vocab = self._splits.size(vocab_size)
        return Embedding(name, vocab, size, self._table_gemm, self.placement, self._splits.group)

    def whole_embedding(self, name: str, num: int, size: int) -> Embedding:
        """Build a small embedding table that every rank holds whole."""
        return Embedding(name, num, size, self._table_gemm, self.placement)

    def position_embedding(self, name: str, num_positions: int, size: int, *, offset: int = 0) -> PositionEmbedding:
        return PositionEmbedding(name, num_positions, size, self.placement, offset=offset)

    def label_head(self, name: str, config: ModelConfig) -> Linear:
        """Build the output head of a classifier. Never quantized."""
        return Linear(config.hidden_size, {name: config.num_labels}, False, self._table_gemm, self.placement)

    def lm_head(self, name: str, embedding: Embedding, config: ModelConfig, *, bias: bool = False) -> nn.Module:
        """Build the output head. A tied head must not have a bias."""
        if config.tie_word_embeddings:
            assert not bias
            return TiedHead(embedding, self._head_gemm)
        vocab = self._splits.size(config.vocab_size)
        return Linear(config.embedding_size, {name: vocab}, bias, self._table_gemm, self.placement)
