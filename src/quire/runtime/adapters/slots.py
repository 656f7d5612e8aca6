"""LoRA slots on the device: which layers can be adapted, and the slots' memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.config.adapter_memory import RANK_STEP, padded_rank
from quire.config.adapters import AdapterConfig
from quire.kernels.reference.lora import Runs
from quire.runtime.attention.branches import SideBranch
from quire.runtime.layers.adapted import (
    ActiveAdapters,
    AdaptedPart,
    LinearAdapters,
    NativeAdapters,
    SlotMemory,
    StackedAdapters,
    slot_tensors,
)
from quire.runtime.layers.expert_adapters import ExpertGemm, make_expert_adapters
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.modules import TiedHead
from quire.runtime.layers.split import as_split
from quire.runtime.layers.stacked_experts import ExpertLinear
from quire.runtime.layers.weights import Placement
from quire.runtime.models.base import BaseModel
from quire.runtime.transfer import to_device


class Target(NamedTuple):
    """A part of a linear layer, or of a gemm of routed experts, that an adapter can change."""

    layer: int  # index among the adapted layers
    part: int
    expert: int = -1  # index among this rank's experts; -1: no expert, or all of them


class Pair(NamedTuple):
    """A and B of one target. B is multiplied by the adapter's scale. Their dtype is that of the rows they multiply, or
    bfloat16. For experts: those of all experts of this rank."""

    target: Target
    a: Tensor  # [rank, inputs], or [experts, rank, inputs]
    b: Tensor  # [outputs, rank] or [experts, outputs, rank], in the order of the layer's outputs


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory."""

    digest: str
    rank: int  # the largest of its pairs
    pairs: tuple[Pair, ...]  # sorted by target

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for pair in self.pairs for tensor in (pair.a, pair.b))


class AdapterSlots:
    """Owns the device memory of all LoRA adapters of a model, and attaches it to the model's linear layers. `kernels`:
    the kernels that run the model. `rank_step`: ranks are padded to a multiple of it."""

    def __init__(
        self, model: BaseModel, config: AdapterConfig, placement: Placement, kernels: str, *, dependent_rows: int = 0
    ) -> None:
        self.config, self.device, self.dtype, self.kernels = config, placement.device, placement.dtype, kernels
        self.rank_step = RANK_STEP if kernels == "triton" else 1
        layers, experts = model.adapted_layers(), model.adapted_experts()
        experts = experts if config.experts else {}
        self.targets: dict[str, tuple[Target, ...]] = {}  # by the matrix's checkpoint name, without `.weight`
        self.gemms: dict[str, tuple[int, range]] = {}  # expert gemms by path: (layer, this rank's experts)
        self.num_experts: dict[int, int] = {}  # by layer: number of this rank's experts
        active, limits = ActiveAdapters(), (config.slots, padded_rank(config.max_rank))
        parts = [parts_of(path, layer) for path, layer in layers.items()]
        parts += [parts_of(path, gemm.first) for path, gemm in experts.items()]
        ends = np.cumsum([len(each) for each in parts]).tolist()
        self._host_ranks = np.zeros((config.slots, ends[-1] if ends else 0), dtype=np.int32)
        self._ranks = torch.zeros(self._host_ranks.shape, dtype=torch.int32, device=placement.device)
        spans = [slice(end - len(each), end) for end, each in zip(ends, parts, strict=True)]
        ranks = [(self._ranks[:, mine], self._host_ranks[:, mine]) for mine in spans]
        self.layers: list[SlotMemory] = []
        side = SideBranch(placement.device) if kernels == "triton" and placement.device.type == "cuda" else None
        for number, (path, layer) in enumerate(layers.items()):
            shape, each = (*limits, layer.num_inputs, layer.num_outputs), parts[number]
            if kernels == "native":
                self._attach(model, layer, NativeAdapters(each, shape, placement, active))
            else:
                memory, is_head = slot_tensors(each, shape, placement), layer is model.parts[3]
                made = StackedAdapters(each, memory, active, ranks[number], dependent_rows, side, is_seldom=is_head)
                self._attach(model, layer, made)
            self.targets |= _targets(path, layer, each, number)
        for number, (path, gemm) in enumerate(experts.items(), len(layers)):
            each = parts[number]
            self.layers.append(make_expert_adapters(gemm, each, limits, placement, active, kernels, ranks[number]))
            self.targets |= _expert_targets(path, gemm, each, number)
            self.gemms[path], self.num_experts[number] = (number, gemm.experts), len(gemm.experts)
        model.blocks.adapters = active

    def _attach(self, model: BaseModel, layer: Linear | TiedHead, made: LinearAdapters) -> None:
        """Attach slots to a layer."""
        if layer is model.parts[3]:
            model.head_adapters = made
        else:
            assert isinstance(layer, Linear)
            layer.adapters = made
        self.layers.append(made)

    def put(self, slot: int, adapter: HostAdapter) -> None:
        """Copy an adapter into a slot, after all work that was launched before. Does not wait for a GPU."""
        self.clear(slot)
        for number, pairs in groupby(adapter.pairs, key=lambda pair: pair.target.layer):
            self.layers[number].put(slot, {pair.target.part: (pair.a, pair.b) for pair in pairs})
        self._send_ranks(slot)

    def clear(self, slot: int) -> None:
        """Empty a slot: rows that use it are unchanged."""
        for layer in self.layers:
            layer.clear(slot)
        self._send_ranks(slot)

    def _send_ranks(self, slot: int) -> None:
        self._ranks[slot].copy_(to_device(torch.from_numpy(self._host_ranks[slot].copy()), self.device))


def parts_of(path: str, linear: Linear | TiedHead | ExpertLinear) -> list[AdaptedPart]:
    """Return the matrices that a layer stacks and the outputs of each. For a layer that stacks experts: those of one
    expert."""
    if isinstance(linear, TiedHead):
        vocab, inputs = linear.table.vocab, as_split(linear.num_inputs)
        index = None if vocab.is_whole else vocab.index
        return [AdaptedPart(path, [(0, vocab.count)], index, False, (vocab.total, inputs.total), inputs)]
    order = torch.arange(linear.num_outputs) if linear.order is None else linear.order.cpu()
    parts = []
    for name, span in linear.spans.items():
        outputs = torch.nonzero((order >= span.start) & (order < span.stop)).flatten()
        split, stored = linear.outputs[name], linear.stored[name]
        index = split.index[order[outputs] - span.start]
        if (inside := stored.outputs_in_order(split.total)) is not None:
            index = inside[index]
        is_same = split.is_whole and bool((index == torch.arange(len(index))).all())
        shape, held = (split.total, linear.inputs.total), None if is_same else index
        parts.append(AdaptedPart(name, _runs(outputs.tolist()), held, stored.transposed, shape, linear.inputs))
    return parts


def _runs(numbers: Sequence[int]) -> Runs:
    """Convert ascending indices to ranges of consecutive ones."""
    breaks = [place for place in range(1, len(numbers)) if numbers[place] != numbers[place - 1] + 1]
    return [
        (numbers[begin], numbers[end - 1] + 1)
        for begin, end in zip([0, *breaks], [*breaks, len(numbers)], strict=True)
        if end > begin
    ]


def _targets(
    path: str, linear: Linear | TiedHead, parts: Sequence[AdaptedPart], number: int
) -> dict[str, tuple[Target, ...]]:
    if isinstance(linear, TiedHead):
        return {path: (Target(number, 0),)}
    parent, places = path[: path.rfind(".") + 1], {part.name: place for place, part in enumerate(parts)}
    weights = [part for part in linear.parts if part.endswith(".weight")]
    return {
        parent + weight.removesuffix(".weight"): tuple(
            Target(number, places[held.removesuffix(".weight")]) for held in linear.held(weight)
        )
        for weight in weights
    }


def _expert_targets(
    path: str, gemm: ExpertGemm, parts: Sequence[AdaptedPart], number: int
) -> dict[str, tuple[Target, ...]]:
    parent = path[: path.rfind(".")]
    return {
        f"{parent}.{expert}.{part.name}": (Target(number, place, expert - gemm.experts.start),)
        for expert in gemm.experts
        for place, part in enumerate(parts)
    }
