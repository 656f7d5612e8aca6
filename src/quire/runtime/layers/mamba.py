"""Mamba-2 layers: a scan over tokens with a convolution and a recurrent state per sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.config.recurrent import Recurrent
from quire.kernels.mamba import GatedNorm, MambaWeights
from quire.kernels.native.program import Symbol
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.reference.convolution import convolve
from quire.kernels.reference.mamba import gate_and_norm, scan
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.split import RecurrentSplits, Split, concat_splits
from quire.runtime.layers.step import ForwardStep, StateStep
from quire.runtime.layers.stream import Normed, Projected, Value
from quire.runtime.layers.weights import Placement, WeightLayer
from quire.runtime.parallel.group import RankGroup


class MambaScan(WeightLayer):
    """Convolution, scan, gate and norm of one layer. Side effect: updates the layer's states in the step.

    If ranks share the elements that are normed together, `group` sums their squares."""

    def __init__(
        self, recurrent: Recurrent, splits: RecurrentSplits, place: int, eps: float, placement: Placement,
        group: RankGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        options, heads = recurrent.mamba, splits.value_heads.count
        assert options is not None
        self._splits, self._place, self._dtype = splits, place, placement.dtype
        self._sizes = sizes = RecurrentSizes(
            splits.groups.count, heads, recurrent.key_dim, recurrent.value_dim, recurrent.width
        )
        self._channels = concat_splits(splits.values, splits.keys, splits.keys)
        num = options.norm_groups
        self._norm = GatedNorm(None if num is None else splits.values.total // num, eps, options.norm_first)
        self._num_groups, self._group = num or 0, group
        self._options = options
        self.convolution = placement.empty(sizes.channels, 1, recurrent.width, dtype=torch.float32)
        self.convolution_bias = placement.empty(sizes.channels, dtype=torch.float32) if recurrent.has_bias else None
        self.of_heads = placement.empty(3, heads, dtype=torch.float32)  # A_log, dt_bias and D
        self.norm = placement.empty(sizes.value_size, dtype=torch.float32) if num is not None else None
        self.parts = (
            "conv1d.weight", *(("conv1d.bias",) if recurrent.has_bias else ()), "A_log", "dt_bias", "D",
            *(("norm.weight",) if num is not None else ()),
        )  # fmt: skip
        self._weights: MambaWeights | None = None
        self._factors: Tensor | None = None  # of the inputs [size]

    def load(self, part: str, tensor: Tensor) -> None:
        """Load a part in float32, rounded to the model's dtype. A_log, dt_bias and D keep full precision."""
        mine = self.own(part, tensor)
        self._part(part).copy_(mine.to(self._dtype) if part.startswith(("conv1d", "norm")) else mine)

    def whole_shape(self, part: str) -> tuple[int, ...]:
        return (self._split(part).total, *self.held_shape(part)[1:])

    def own(self, part: str, whole: Tensor) -> Tensor:
        return self._split(part).of(whole)

    def _split(self, part: str) -> Split:
        if part.startswith("conv1d"):
            return self._channels
        return self._splits.values if part == "norm.weight" else self._splits.value_heads

    def randomize(self, part: str, generator: torch.Generator, dtype: torch.dtype | None = None) -> None:
        super().randomize(part, generator, dtype)
        if part == "norm.weight":
            self._part(part).add_(1.0)

    def finish(self) -> None:
        convolution, (rate, bias, skip) = self.convolution.data.squeeze(1).T.contiguous(), self.of_heads.data.unbind()
        norm = convolution.new_ones(self._sizes.value_size) if self.norm is None else self.norm.data
        self._weights = MambaWeights(
            convolution, None if self.convolution_bias is None else self.convolution_bias.data, -rate.exp(),
            bias.contiguous(), skip.contiguous(), norm * self._options.output_factor,
        )  # fmt: skip
        if self._options.input_factors is not None:
            sizes = self._sizes
            counts = (sizes.value_size, sizes.value_size, sizes.key_size, sizes.key_size, sizes.value_heads)
            factors = convolution.new_tensor(self._options.input_factors)
            counted = torch.tensor(counts, device=factors.device)
            self._factors = factors.repeat_interleave(counted).to(self._dtype)
        del self.convolution, self.of_heads

    def forward(self, x: Value, step: ForwardStep) -> Value:
        """Run the layer on x: gates, x, B, C and step sizes of each token. Returns [tokens, heads * head dim]."""
        return self._trace(x) if isinstance(x, Symbol) else self._run(x, step)

    def _trace(self, x: Symbol) -> Symbol:
        """Append the layer to the program that is being traced."""
        if self._shares_norm:
            return x.writer.call(self._run, (x,), self._sizes.value_size)
        assert self._weights is not None, "finish() was not called"
        if self._factors is not None:
            x.writer.scale_columns(x, self._factors)
        return x.writer.mamba(x, self._place, self._sizes, self._weights, self._norm)

    def _run(self, x: Tensor, step: ForwardStep) -> Tensor:
        states, sizes, weights = step.states, self._sizes, self._weights
        assert weights is not None, "finish() was not called"
        assert states is not None, "a step without states"
        x = x if self._factors is None else x * self._factors
        z, inputs, pace = torch.split(x, [sizes.value_size, sizes.channels, sizes.value_heads], dim=1)
        if step.backend.kernels == "triton":
            return self._by_triton(z, inputs, pace, weights, states)
        assert states.segments is not None
        memory = (states.layers[self._place], states.segments.tolist(), sizes)
        mixed = convolve(inputs, weights.convolution, *memory, bias=weights.convolution_bias)
        return self._gated(scan(mixed, pace, weights, *memory), z, weights)

    def _by_triton(self, z: Tensor, inputs: Tensor, pace: Tensor, weights: MambaWeights, states: StateStep) -> Tensor:
        from quire.kernels.triton.convolution import convolve_segments
        from quire.kernels.triton.mamba import gate_rows, scan_segments

        assert states.spans is not None
        assert states.slots is not None
        memory, has_chunks = (states.layers[self._place], states.spans, states.slots, self._sizes), states.has_chunks
        bias = weights.convolution_bias
        mixed = convolve_segments(inputs, weights.convolution, *memory, has_chunks=has_chunks, bias=bias)
        read = scan_segments(mixed, pace, weights, *memory, has_chunks=has_chunks)
        if self._shares_norm:
            return self._gated(read, z, weights)
        return gate_rows(read, z, weights.norm, self._norm)

    @property
    def _shares_norm(self) -> bool:
        """Whether this rank holds only a part of the elements that are normed together."""
        return self._norm.group is not None and self._norm.group > self._sizes.value_size

    def _gated(self, read: Tensor, z: Tensor, weights: MambaWeights) -> Tensor:
        return gate_and_norm(read, z, weights.norm, self._norm, self._sum_squares if self._shares_norm else None)

    def _sum_squares(self, x: Tensor) -> Tensor:
        """Return the sums of squares [tokens, 1] of the group that this rank shares with others."""
        assert self._group is not None
        assert self._norm.group is not None
        own = self._splits.values.own[0].start // self._norm.group
        sums = x.new_zeros(len(x), self._num_groups)
        sums[:, own] = x.square().sum(dim=-1)
        return self._group.all_reduce(sums)[:, own, None] if len(x) else sums[:, own, None]

    def _part(self, part: str) -> Tensor:
        if part == "conv1d.weight":
            return self.convolution.data
        held = {"conv1d.bias": self.convolution_bias, "norm.weight": self.norm}
        if part in held:
            memory = held[part]
            assert memory is not None
            return memory.data
        return self.of_heads.data[("A_log", "dt_bias", "D").index(part)]


class MambaMixer(nn.Module):
    """The scan with its input gemm and its output gemm to the residual stream."""

    def __init__(self, in_proj: Linear, scan: MambaScan, out_proj: Linear) -> None:
        super().__init__()
        self.in_proj, self.scan, self.out_proj = in_proj, scan, out_proj

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        return self.out_proj.later(self.scan(self.in_proj(x.value()), step))
