"""PEFT adapters of parameters that stack a matrix of all experts of a block (`target_parameters`).

PEFT wraps the module of all experts once per parameter, so tensors are named `experts.lora_A.weight` and
`experts.base_layer.lora_A.weight`; their shapes show which parameter they change. A [experts * rank, inputs] stacks the
experts; in B [outputs, rank * experts] the experts' columns are interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.config.model import ModelConfig
from quire.runtime.models.family import STACKED, Family

GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
_EXPERTS, _WRAPPED = ".experts", ".base_layer"
Shape = tuple[int, ...]


def experts_module(module: str) -> str | None:
    """Return the module of all experts that a module of the file is or wraps, or None."""
    inner = module
    while inner.endswith(_WRAPPED):
        inner = inner.removesuffix(_WRAPPED)
    return inner if inner.endswith(_EXPERTS) else None


@dataclass(frozen=True, slots=True)
class FusedSizes:
    """The sizes of one parameter. `inputs_first`: the file swaps inputs and outputs, as PEFT before 0.19 did for
    parameters [experts, outputs, inputs]."""

    experts: int
    inputs: int
    outputs: int
    inputs_first: bool
    interleaved: bool  # outputs of gate and up are interleaved

    def shapes(self, rank: int) -> tuple[Shape, Shape]:
        """Return the shapes of A and B in the file."""
        inputs, outputs = (self.outputs, self.inputs) if self.inputs_first else (self.inputs, self.outputs)
        return (rank * self.experts, inputs), (outputs, rank * self.experts)

    def matrices(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return A [experts, rank, inputs] and B [experts, outputs, rank] from the file's tensors."""
        first = a.reshape(self.experts, -1, a.shape[1])
        second = b.reshape(len(b), -1, self.experts).permute(2, 0, 1)
        return (second.transpose(1, 2), first.transpose(1, 2)) if self.inputs_first else (first, second)

    def part(self, b: Tensor, place: int, count: int) -> Tensor:
        """Return the B of one of the `count` matrices that the parameter stacks along the outputs."""
        if self.interleaved:
            return b[:, place::count]
        size = self.outputs // count
        return b[:, place * size : (place + 1) * size]


def fused_sizes(config: ModelConfig, family: Family, *, inputs_first: bool) -> dict[str, FusedSizes]:
    """Return the sizes of the experts' parameters in transformers, by name. `inputs_first`:
    `PeftConfig.takes_inputs_first`."""
    experts = config.experts
    if experts is None:
        return {}
    first, outputs = (GATE_UP, 2 * experts.size) if experts.is_gated else (UP, experts.size)
    width = experts.width(config.hidden_size)
    sizes = {first: (width, outputs), DOWN: (experts.size, width)}
    found = {}
    for name, (inputs, outputs) in sizes.items():
        stored = (family.stacked or STACKED)[name]
        swapped = inputs_first and not stored.transposed
        found[name] = FusedSizes(experts.num, inputs, outputs, swapped, stored.interleaved)
    return found


def find_parameter(sizes: dict[str, FusedSizes], a: Shape, b: Shape) -> str | None:
    """Return the parameter that an A and B of these shapes change, or None. Parameters differ in inputs or outputs."""
    for name, each in sizes.items():
        (_, inputs), (outputs, _) = each.shapes(1)
        if (a[1:], b[:1]) == ((inputs,), (outputs,)):
            return name
    return None
