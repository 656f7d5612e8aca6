"""Builds the recurrent layers of a model: gated delta nets, Mamba and Mamba-2 layers, RG-LRUs, short convolutions."""

from __future__ import annotations

from typing import Protocol

from quire.config.model import Heads
from quire.config.recurrent import Recurrent, Selective
from quire.runtime.layers.convolution import Convolution, ShortConvolution
from quire.runtime.layers.delta import DeltaRule, GatedDeltaNet, ungrouped_rows
from quire.runtime.layers.experts import Router
from quire.runtime.layers.gemm import Gemm
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.mamba import MambaMixer, MambaScan
from quire.runtime.layers.modules import RMSNorm
from quire.runtime.layers.ops import LayerOps
from quire.runtime.layers.rglru import RgLru, RgLruMixer
from quire.runtime.layers.selective import SelectiveMixer, SelectiveScan
from quire.runtime.layers.split import RankSplits, Split, concat_splits
from quire.runtime.layers.weights import Placement


class MakeRowLinear(Protocol):
    def __call__(self, name: str, inputs: Split, outputs: int, *, bias: bool) -> Linear:
        """Build a row-parallel layer."""


class RecurrentLayers:
    """Builds recurrent layers for a LayerBuilder. `place` is a layer's index among the recurrent layers.
    `table_gemm`: the gemm of layers that are never quantized."""

    def __init__(
        self, splits: RankSplits, gemm: Gemm, table_gemm: Gemm, placement: Placement,
        row_linear: MakeRowLinear, ops: LayerOps,
    ) -> None:  # fmt: skip
        self._splits, self._placement, self._row_linear, self._ops = splits, placement, row_linear, ops
        self._gemm, self._table_gemm = gemm, table_gemm

    def delta_net(self, hidden: int, sizes: Recurrent, place: int, eps: float) -> GatedDeltaNet:
        in_proj, gate_proj = self._delta_linears(hidden, sizes)
        each = self._splits.recurrent(sizes)
        out_proj = self._row_linear("o_proj" if sizes.separate else "out_proj", each.values, hidden, bias=False)
        return GatedDeltaNet(in_proj, gate_proj, DeltaRule(sizes, each, place, eps, self._placement), out_proj)

    def mamba(self, hidden: int, sizes: Recurrent, place: int, eps: float) -> MambaMixer:
        each, options = self._splits.recurrent(sizes), sizes.mamba
        assert options is not None
        outputs = concat_splits(each.values, each.values, each.keys, each.keys, each.value_heads)
        in_proj = Linear(hidden, {"in_proj": outputs}, options.has_bias, self._gemm, self._placement)
        out_proj = self._row_linear("out_proj", each.values, hidden, bias=options.has_bias)
        return MambaMixer(in_proj, MambaScan(sizes, each, place, eps, self._placement, self._splits.group), out_proj)

    def selective(self, hidden: int, sizes: Recurrent, place: int) -> SelectiveMixer:
        options, channels, state = sizes.selective, self._splits.size(sizes.value_size), sizes.key_dim
        assert options is not None
        both = {"in_proj": concat_splits(channels, channels)}
        in_proj = Linear(hidden, both, options.has_bias, self._gemm, self._placement)
        x_proj = self._row_linear("x_proj", channels, options.rank + 2 * state, bias=False)
        dt_proj = Linear(options.rank, {"dt_proj": channels}, False, self._gemm, self._placement)
        out_proj = self._row_linear("out_proj", channels, hidden, bias=options.has_bias)
        normed = {"dt_layernorm": options.rank, "b_layernorm": state, "c_layernorm": state}
        norms = [] if options.norm_eps is None else [self._norm(*each, options) for each in normed.items()]
        scan = SelectiveScan(sizes, channels, place, self._placement)
        return SelectiveMixer(in_proj, x_proj, dt_proj, out_proj, scan, tuple(norms))

    def rg_lru(self, hidden: int, sizes: Recurrent, place: int) -> RgLruMixer:
        num = sizes.blocks
        blocks = self._splits.query(Heads(num, num, 1))
        channels = blocks.times(sizes.value_heads // num)
        both = {"linear_x": channels, "linear_y": channels}
        in_proj = Linear(hidden, both, True, self._gemm, self._placement)
        out_proj = self._row_linear("linear_out", channels, hidden, bias=True)
        return RgLruMixer(in_proj, RgLru(sizes, blocks, place, self._placement), out_proj)

    def _norm(self, name: str, size: int, options: Selective) -> RMSNorm:
        assert options.norm_eps is not None
        norm = RMSNorm(name, size, options.norm_eps, self._ops, self._placement)
        if not options.learned_norms:
            norm.drop_weights()
        return norm

    def short_convolution(self, hidden: int, sizes: Recurrent, place: int) -> ShortConvolution:
        channels, bias = self._splits.size(hidden), sizes.has_bias
        three = {"in_proj": concat_splits(channels, channels, channels)}
        in_proj = Linear(hidden, three, bias, self._gemm, self._placement)
        out_proj = self._row_linear("out_proj", channels, hidden, bias=bias)
        return ShortConvolution(in_proj, Convolution(channels, sizes, place, self._placement), out_proj)

    def _delta_linears(self, hidden: int, sizes: Recurrent) -> tuple[Linear, Linear]:
        """Build a delta net's layer for queries, keys, values and gates, and its layer for strength and decay, which is
        never quantized."""
        each, shared = self._splits.recurrent(sizes), sizes.value_heads // sizes.key_heads
        keys, values, heads, groups = each.keys, each.values, each.value_heads, each.groups
        if sizes.separate:
            wide = {"q_proj": keys, "k_proj": keys, "v_proj": values, "g_proj": values}
            in_proj, narrow = (
                Linear(hidden, wide, False, self._gemm, self._placement),
                {"b_proj": heads, "a_proj": heads},
            )
            return in_proj, Router(hidden, narrow, False, self._table_gemm, self._placement)
        if not sizes.joined:
            wide = {"in_proj_qkv": concat_splits(keys, keys, values), "in_proj_z": values}
            in_proj = Linear(hidden, wide, False, self._gemm, self._placement)
            narrow = {"in_proj_b": heads, "in_proj_a": heads}
            return in_proj, Router(hidden, narrow, False, self._table_gemm, self._placement)
        parts = (sizes.key_dim, sizes.key_dim, shared * sizes.value_dim, shared * sizes.value_dim)
        of_group, order = groups.times(sum(parts)), ungrouped_rows(groups.count, parts)
        in_proj = Linear(hidden, {"in_proj_qkvz": of_group}, False, self._gemm, self._placement, order=order)
        of_group, order = groups.times(2 * shared), ungrouped_rows(groups.count, (shared, shared))
        gates = Router(hidden, {"in_proj_ba": of_group}, False, self._table_gemm, self._placement, order=order)
        return in_proj, gates
