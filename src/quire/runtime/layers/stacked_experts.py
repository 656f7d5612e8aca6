"""The experts of a layer as stacked weights, multiplied by one grouped gemm per launch on a GPU. Without Triton they
can be built on the meta device but not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quire.config.model import Experts
from quire.runtime.layers.experts import clamp_of
from quire.runtime.layers.ops import LayerOps
from quire.runtime.layers.split import Split, as_split
from quire.runtime.layers.weights import SAME_LAYOUT, Placement, WeightLayer
from quire.runtime.parallel.expert_sum import NO_SUM, ExpertSum
from quire.runtime.parallel.group import RankGroup
from quire.runtime.quantization.mxfp4 import GROUP, SCALES, Mxfp4Weight
from quire.runtime.quantization.weight import StoredWeight

if TYPE_CHECKING:
    from quire.kernels.triton.gemm_w4 import PackedW4
    from quire.kernels.triton.grouped import Routing
    from quire.runtime.layers.expert_adapters import StackedExpertAdapters
    from quire.runtime.layers.expert_gemms import AnyStack


class ExpertLinear(WeightLayer):
    """One projection of all experts: their checkpoint matrices, stacked by rows per expert. Usable after `finish`.

    Allocates no memory before its first part is loaded.
    """

    is_quantizable = True

    def __init__(
        self, experts: range, inputs: int | Split, outputs: Mapping[str, int | Split], placement: Placement,
        *, bias: bool, float8: bool, group: RankGroup | None = None,
    ) -> None:  # fmt: skip
        """`experts`: those of this rank. `group`: the ranks that share the inputs; only the first of them adds the
        bias."""
        super().__init__()
        self.inputs, self.outputs = as_split(inputs), {name: as_split(each) for name, each in outputs.items()}
        self._has_bias = group is None or group.index == 0
        self.experts, num = experts, len(experts)
        rows = sum(each.count for each in self.outputs.values())
        self.num_parts, self.num_inputs, self.num_outputs = len(outputs), self.inputs.count, rows  # per expert
        self.order, self.stored = None, dict.fromkeys(outputs, SAME_LAYOUT)  # as in Linear
        self.adapters: StackedExpertAdapters | None = None  # LoRA adapters that tokens may use
        kinds = ("weight", "bias") if bias else ("weight",)
        self.weight = placement.unallocated(num, rows, self.inputs.count, dtype=placement.dtype)
        self.bias = placement.unallocated(num, rows, dtype=placement.dtype) if bias else None
        self.parts = tuple(f"{expert}.{name}.{kind}" for expert in experts for name in outputs for kind in kinds)
        self._placement, self._float8 = placement, float8
        self.spans: dict[str, slice] = {}
        begin = 0
        for name, each in self.outputs.items():
            self.spans[name] = slice(begin, begin + each.count)
            begin += each.count
        self._stack: AnyStack | None = None
        self._coming: dict[str, Mxfp4Weight] = {}  # matrices of the expert being loaded, by name
        self._packed: list[PackedW4] = []  # of the experts loaded before it

    @property
    def stack(self) -> AnyStack:
        assert self._stack is not None, "finish() was not called"
        return self._stack

    def whole_shape(self, part: str) -> tuple[int, ...]:
        _, name, kind = part.split(".")
        total = self.outputs[name].total
        return (total, self.inputs.total) if kind == "weight" else (total,)

    def own(self, part: str, whole: Tensor) -> Tensor:
        mine = self.outputs[part.split(".")[1]].of(whole)
        if whole.dim() > 1:
            return self.inputs.of(mine, 1)
        return mine if self._has_bias else torch.zeros_like(mine)

    def used_part(self, part: str, tensor: Tensor) -> Tensor:
        return self.own(part, tensor)

    def load(self, part: str, tensor: Tensor) -> None:
        self._allocate(part)
        super().load(part, self.own(part, tensor))

    def load_quantized(self, part: str, weight: StoredWeight) -> bool:
        """Keep MXFP4 in its format if this rank's inputs are whole groups. Experts must be loaded in order."""
        runs = self.inputs.own
        fits = all(run.start % GROUP == len(run) % GROUP == 0 for run in runs)
        if not isinstance(weight, Mxfp4Weight) or self._float8 or not fits:
            return super().load_quantized(part, weight)
        name = part.split(".")[1]
        groups = Split(self.inputs.total // GROUP, tuple(range(r.start // GROUP, r.stop // GROUP) for r in runs))
        parts = (groups.of(self.outputs[name].of(each), 1) for each in (weight.blocks, weight.exponents))
        self._coming[name] = Mxfp4Weight(*(each.to(self._placement.device) for each in parts))
        if len(self._coming) == len(self.outputs):
            self._packed.append(_packed([self._coming[each] for each in self.outputs]))
            self._coming.clear()
        return True

    def randomize(self, part: str, generator: torch.Generator, dtype: torch.dtype | None = None) -> None:
        self._allocate(part)
        super().randomize(part, generator, dtype)

    def finish(self) -> None:
        from quire.kernels.triton.grouped import Stack
        from quire.kernels.triton.quantize import quantize_rows
        from quire.runtime.layers.expert_gemms import stack_packed

        weight, bias = self.weight.data, None if self.bias is None else self.bias.data
        self._stack = Stack(weight, None, bias)
        if self._packed:
            gated, dtype = self.num_parts > 1, self._placement.dtype
            self._stack = stack_packed(self._packed, bias, dtype, interleaved=gated)
            self._packed.clear()
        elif self._float8:
            numbers, scale = quantize_rows(weight.flatten(0, 1))
            self._stack = Stack(numbers.view(weight.shape), scale.view(weight.shape[:2]), bias)
        del self.weight, self.bias

    def _allocate(self, part: str) -> None:
        if part.endswith(".weight"):
            self.weight = self._placement.allocate(self.weight)
        elif self.bias is not None:
            self.bias = self._placement.allocate(self.bias)

    def _part(self, part: str) -> Tensor:
        expert, name, kind = part.split(".")
        whole = self.weight if kind == "weight" else self.bias
        if whole is None:
            raise KeyError(part)
        return whole.data[int(expert) - self.experts.start, self.spans[name]]


def _packed(parts: list[Mxfp4Weight]) -> PackedW4:
    """Pack one expert's matrices, outputs concatenated."""
    from quire.kernels.triton.gemm_w4 import pack_w4

    blocks, exponents = torch.cat([each.blocks for each in parts]), torch.cat([each.exponents for each in parts])
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    scales = SCALES.to(exponents.device).bfloat16()[exponents.int()]  # powers of two: exact
    return pack_w4(codes, scales, None)


def _add_adapters(out: Tensor, x: Tensor, linear: ExpertLinear, routing: Routing, *, dependent: bool) -> None:
    """Add the LoRA change of the step's tokens to a gemm's result [pairs, outputs], in place."""
    from quire.kernels.triton.lora_experts import add_to_pairs

    adapters = linear.adapters
    assert adapters is not None
    tiles = adapters.active.rows.tiles
    assert tiles is not None, "only Triton multiplies by stacked experts"
    add_to_pairs(out, x, adapters.a, adapters.b, adapters.ranks, tiles.slots, routing, dependent=dependent)


class StackedExperts(nn.Module):
    """down(activation(gate(x)) * up(x)) of each expert, for the tokens routed to it; down(activation(up(x))) if the
    first gemm has no gate.

    `dependent_rows`: fewest tokens of a step with programmatic dependent launch.
    """

    def __init__(
        self, first: ExpertLinear, down_proj: ExpertLinear, activation: str, ops: LayerOps,
        *, dependent_rows: int, total: ExpertSum = NO_SUM,
    ) -> None:  # fmt: skip
        super().__init__()
        self._total = total  # over ranks
        self.first, self.down_proj, self._is_gated = first, down_proj, first.num_parts > 1
        self._activation, self._ops, self._dependent_rows = activation, ops, dependent_rows

    @property
    def gemms(self) -> dict[str, tuple[ExpertLinear, ...]]:
        """The linear layers of all experts, by the name of the gemm."""
        return {"gate_up_proj" if self._is_gated else "up_proj": (self.first,), "down_proj": (self.down_proj,)}

    @property
    def own(self) -> range:
        """The experts of this rank."""
        return self.first.experts

    def mix(
        self, x: Tensor, logits: Tensor, experts: Experts, shared: tuple[Tensor, ...] = (),
        rows: Tensor | None = None, factors: Tensor | None = None, score_bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        from quire.kernels.triton.grouped import combine, route
        from quire.runtime.layers.expert_gemms import multiply, multiply_gated, plan_experts, takes_gated

        up, down, used = self.first.stack, self.down_proj.stack, experts.num_used
        plan = plan_experts(up, down, len(x) * used, experts.num, x)
        dependent = len(x) >= self._dependent_rows
        routing = route(
            logits, used, plan.first,
            is_normalized=experts.is_normalized, scale=experts.scale, factors=factors, rows=rows,
            groups=(experts.num_groups, experts.groups_used), score_bias=score_bias, dependent=dependent,
            own=self.first.experts,
        )  # fmt: skip
        senders = self._total.senders(routing.chosen)
        adapters, clamp, kind = self.first.adapters, clamp_of(experts), self._activation
        is_adapted = adapters is not None and adapters.active.is_on
        if is_adapted or not self._is_gated or not takes_gated(up, down, plan):  # LoRA changes come before the gate
            expanded = plan.expanded
            both = multiply(x, up, routing, plan.first, num_used=used, expanded=expanded, dependent=dependent)
            if is_adapted:
                _add_adapters(both, x, self.first, routing, dependent=dependent)
            ops = self._ops
            inner = ops.gate(both, kind, clamp) if self._is_gated else ops.activate(both, kind)
            del both
            y = multiply(inner, down, routing, plan.second, num_used=1, expanded=expanded, dependent=dependent)
            if is_adapted:
                _add_adapters(y, inner, self.down_proj, routing, dependent=dependent)
            del inner
        else:
            y = multiply_gated(
                x, up, down, routing, plan, num_used=used, activation=kind, clamp=clamp, dependent=dependent
            )
        output, gate = (*shared, None, None)[:2]
        mixed = combine(y, routing, shared=output, gate=gate, dependent=dependent)
        del y  # free its memory for the sum over ranks
        return self._total.of(mixed, senders)
