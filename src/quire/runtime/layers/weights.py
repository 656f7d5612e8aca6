"""The base class of layers with weights: how they load their parts from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.config.model import Heads, Rope
from quire.runtime.layers.split import Split
from quire.runtime.quantization.region import Region
from quire.runtime.quantization.weight import StoredWeight

RANDOM_STD = 0.02  # the initializer's standard deviation in most published models


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of a model and the dtype of its activations."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)

    def unallocated(self, *shape: int, dtype: torch.dtype) -> nn.Parameter:
        """Return a parameter with a shape and no memory; `allocate` allocates it."""
        return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)

    def allocate(self, parameter: nn.Parameter) -> nn.Parameter:
        """Allocate a parameter of `unallocated`, or return it unchanged if it has memory."""
        return self.empty(*parameter.shape, dtype=parameter.dtype) if parameter.is_meta else parameter


@dataclass(frozen=True, slots=True)
class Stored:
    """How a checkpoint stores a matrix and its bias, if not as [outputs, inputs] in the layer's order."""

    transposed: bool = False  # [inputs, outputs]
    grouped: Heads | None = None  # fused qkv by kv head: its queries, its key, its value
    # (head dim, rotated dim): the last `rotated dim` outputs of each head are interleaved pairs, not halves.
    pairs: tuple[int, int] | None = None
    pairs_lead: bool = False  # the first `rotated dim` outputs are these pairs
    kernel: tuple[int, ...] = ()  # [outputs, *kernel]: a convolution; (): a plain matrix

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the stored shape of a part whose shape in the layer is `shape`."""
        if self.kernel and len(shape) == 2:
            return (shape[0], *self.kernel)
        return shape[::-1] if self.transposed else shape

    def in_order(self, tensor: Tensor) -> Tensor:
        """Convert a stored tensor to the layer's order."""
        if self.kernel:
            return tensor.reshape(len(tensor), -1) if tensor.dim() > 1 else tensor
        tensor = tensor.t() if self.transposed else tensor
        if self.pairs is not None:
            return _halves(tensor, *self.pairs, lead=self.pairs_lead)
        if self.grouped is None:
            return tensor
        heads = self.grouped
        groups = tensor.reshape(heads.num_kv, -1, heads.dim, *tensor.shape[1:])  # kv heads; query heads of each + 2
        queries, key, value = torch.split(groups, [groups.shape[1] - 2, 1, 1], dim=1)
        return torch.cat([part.flatten(0, 2) for part in (queries, key, value)])

    def own_part(self, tensor: Tensor, outputs: Split, inputs: Split) -> Tensor:
        """Return the part of a stored tensor that belongs to these outputs and inputs, in the layer's order. Reads
        nothing else."""
        if outputs.is_whole and inputs.is_whole:
            return self.in_order(tensor)
        flat = tensor.reshape(len(tensor), -1) if self.kernel else tensor.t() if self.transposed else tensor
        if self.pairs is not None or self.grouped is not None:
            flat = flat.index_select(0, outputs.of(self.in_order(torch.arange(outputs.total))))
        else:
            flat = outputs.of(flat)
        return inputs.of(flat, 1) if flat.dim() > 1 else flat

    def outputs_in_order(self, outputs: int) -> Tensor | None:
        """Return the stored output index for each output of the layer, or None if they are equal. Only for a matrix
        that is not stored transposed."""
        return None if self == SAME_LAYOUT else self.in_order(torch.arange(outputs))


SAME_LAYOUT = Stored()


def stored_for(rope: Rope | None, dim: int) -> Stored:
    """Return how a checkpoint stores queries or keys of heads of size `dim` with these rotary positions."""
    if rope is None or not rope.in_pairs:
        return SAME_LAYOUT
    return Stored(pairs=(dim, dim if rope.dim is None else rope.dim), pairs_lead=True)


def _halves(tensor: Tensor, dim: int, rotated: int, *, lead: bool) -> Tensor:
    """Reorder the last (or first) `rotated` rows of each head of `dim` rows from interleaved pairs to halves: even
    rows, then odd rows."""
    heads, begin = tensor.reshape(-1, dim, *tensor.shape[1:]), 0 if lead else dim - rotated
    paired, rest = heads[:, begin : begin + rotated], heads[:, begin + rotated :]
    return torch.cat((heads[:, :begin], paired[:, 0::2], paired[:, 1::2], rest), dim=1).reshape(tensor.shape)


class WeightLayer(nn.Module):
    """A layer that is loaded part by part, then finished once.

    A part's checkpoint name is the path of the layer's parent module, a dot, and the part. Loading may convert dtype
    and device; `finish` may repack the weights and free the form in which they were loaded.
    """

    parts: tuple[str, ...] = ()
    random_mean = 0.0
    is_quantizable = False  # whether the engine's weight quantization applies
    is_always_dequantized = False  # whether quantized matrices are always dequantized
    weight: nn.Parameter

    def part_shape(self, part: str) -> tuple[int, ...]:
        """Return a part's shape in the checkpoint."""
        return self.whole_shape(part)

    def held_shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of the part that this rank holds."""
        return tuple(self._part(part).shape)

    def whole_shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of a part over all ranks, in the layer's order."""
        return self.held_shape(part)

    def own(self, part: str, whole: Tensor) -> Tensor:  # noqa: ARG002
        """Return this rank's share of a whole part in the layer's order."""
        return whole

    def used_part(self, part: str, tensor: Tensor) -> Tensor:  # noqa: ARG002
        """Return the elements of a checkpoint tensor that `load` uses."""
        return tensor

    def copies(self, part: str) -> int:  # noqa: ARG002
        """Return how many times the finished layer holds a part."""
        return 1

    def load(self, part: str, tensor: Tensor) -> None:
        self._part(part).copy_(tensor)

    def region(self, part: str) -> Region | None:  # noqa: ARG002
        """Return the region of a matrix that `load_quantized` needs, or None if it needs all of it."""
        return None

    def load_quantized(self, part: str, weight: StoredWeight) -> bool:
        """Load a matrix that the checkpoint stores quantized: all of it, or its `region`. Returns whether the layer
        keeps it quantized; otherwise it is dequantized."""
        self.load(part, weight.values())
        return False

    def randomize(self, part: str, generator: torch.Generator, dtype: torch.dtype | None = None) -> None:
        """Fill a part with normal noise around `random_mean`, generated on the layer's device. `dtype`: that of the
        checkpoint being imitated; if it is smaller than the layer's, the noise is rounded to it."""
        memory, shape = self._part(part), self.whole_shape(part)
        if memory.shape == shape:
            memory.normal_(self.random_mean, RANDOM_STD, generator=generator)
        else:  # all ranks draw the same noise
            noise = memory.new_empty(shape).normal_(self.random_mean, RANDOM_STD, generator=generator)
            memory.copy_(self.own(part, noise))
        if dtype is not None and dtype.itemsize < memory.dtype.itemsize:
            memory.copy_(memory.to(dtype))

    def finish(self) -> None:
        """Repack the weights. Called once, after every part is loaded and before the first forward."""

    def _part(self, part: str) -> Tensor:
        """Return the memory that a part is loaded into. A layer with one part keeps it in `weight`."""
        if part not in self.parts:
            raise KeyError(part)
        return self.weight.data


def weight_layers(model: nn.Module) -> Iterator[tuple[WeightLayer, dict[str, str]]]:
    """Yield every layer that holds weights, with its parts by checkpoint name."""
    for path, module in model.named_modules():
        if isinstance(module, WeightLayer):
            parent = path.rpartition(".")[0]
            yield module, {f"{parent}.{part}" if parent else part: part for part in module.parts}
