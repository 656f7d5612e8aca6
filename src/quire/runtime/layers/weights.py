"""How a layer takes its weights from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.config.model import Heads
from quire.runtime.layers.split import Split
from quire.runtime.quantization.region import Region
from quire.runtime.quantization.weight import StoredWeight

RANDOM_STD = 0.02  # the spread most published models are initialized with


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model lives and in which precision its activations run."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)

    def promise(self, *shape: int, dtype: torch.dtype) -> nn.Parameter:
        """A shape without memory, until `keep` gives it some."""
        return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)

    def keep(self, promised: nn.Parameter) -> nn.Parameter:
        """The promised memory, or the same parameter where it has it already."""
        return self.empty(*promised.shape, dtype=promised.dtype) if promised.is_meta else promised


@dataclass(frozen=True, slots=True)
class Stored:
    """How a checkpoint stores a matrix and its bias, where that is not by outputs, then inputs, in their order."""

    turned: bool = False  # by inputs, then outputs
    grouped: Heads | None = None  # for each key/value head: its query heads, itself, its values; not all queries first
    pairs: tuple[int, int] | None = (
        None  # of each head of so many outputs, the last ones, rotated: as pairs, not halves
    )
    kernel: tuple[int, ...] = ()  # by outputs, then these axes of inputs: the kernel of a convolution; (): flat

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As stored, of a part of this shape."""
        if self.kernel and len(shape) == 2:
            return (shape[0], *self.kernel)
        return shape[::-1] if self.turned else shape

    def in_order(self, tensor: Tensor) -> Tensor:
        """What was stored, as the layer has it."""
        if self.kernel:
            return tensor.reshape(len(tensor), -1) if tensor.dim() > 1 else tensor
        tensor = tensor.t() if self.turned else tensor
        if self.pairs is not None:
            return _halves(tensor, *self.pairs)
        if self.grouped is None:
            return tensor
        heads = self.grouped
        groups = tensor.reshape(heads.num_kv, -1, heads.dim, *tensor.shape[1:])  # kv heads; query heads of each + 2
        queries, key, value = torch.split(groups, [groups.shape[1] - 2, 1, 1], dim=1)
        return torch.cat([part.flatten(0, 2) for part in (queries, key, value)])

    def own_part(self, tensor: Tensor, outputs: Split, inputs: Split) -> Tensor:
        """What was stored of these outputs and inputs, as the layer has it: no other numbers are read."""
        if outputs.is_whole and inputs.is_whole:
            return self.in_order(tensor)
        flat = tensor.reshape(len(tensor), -1) if self.kernel else tensor.t() if self.turned else tensor
        if self.pairs is not None or self.grouped is not None:
            flat = flat.index_select(0, outputs.of(self.in_order(torch.arange(outputs.total))))
        else:
            flat = outputs.of(flat)
        return inputs.of(flat, 1) if flat.dim() > 1 else flat

    def outputs_in_order(self, outputs: int) -> Tensor | None:
        """Which stored output each of the layer's is; None: the one of the same number. Only of a matrix that is not
        stored by inputs first."""
        return None if self == AS_IT_IS else self.in_order(torch.arange(outputs))


AS_IT_IS = Stored()


def _halves(tensor: Tensor, dim: int, turned: int) -> Tensor:
    """The last `turned` rows of each head of `dim`: first, third, ..., then second, fourth, ..."""
    heads = tensor.reshape(-1, dim, *tensor.shape[1:])
    kept, paired = heads[:, : dim - turned], heads[:, dim - turned :]
    return torch.cat((kept, paired[:, 0::2], paired[:, 1::2]), dim=1).reshape(tensor.shape)


class WeightLayer(nn.Module):
    """A layer filled part by part, then finished once.

    A part's checkpoint name is the path of the layer's parent module, a dot, and the part. Loading may change dtype
    and device; `finish` may repack the weights and drop the form they were loaded in.
    """

    parts: tuple[str, ...] = ()
    random_mean = 0.0
    shrinks = False  # where a model's weights are quantized
    expands = False  # whether quantized matrices are always expanded to numbers
    weight: nn.Parameter

    def part_shape(self, part: str) -> tuple[int, ...]:
        """As the checkpoint has it."""
        return self.whole_shape(part)

    def held_shape(self, part: str) -> tuple[int, ...]:
        """Of what this rank holds of a part."""
        return tuple(self._part(part).shape)

    def whole_shape(self, part: str) -> tuple[int, ...]:
        """Of a part on all ranks together, in the layer's order."""
        return self.held_shape(part)

    def own(self, part: str, whole: Tensor) -> Tensor:  # noqa: ARG002
        """What this rank holds of a part, given in the layer's order."""
        return whole

    def checked(self, part: str, tensor: Tensor) -> Tensor:  # noqa: ARG002
        """The numbers that `load` takes of a tensor of the checkpoint."""
        return tensor

    def copies(self, part: str) -> int:  # noqa: ARG002
        """How often the finished layer holds a part."""
        return 1

    def load(self, part: str, tensor: Tensor) -> None:
        self._part(part).copy_(tensor)

    def region(self, part: str) -> Region | None:  # noqa: ARG002
        """What `load_quantized` needs of a matrix, where that is one region of it and not all."""
        return None

    def load_quantized(self, part: str, weight: StoredWeight) -> bool:
        """Like `load`, for a matrix that the checkpoint stores quantized: the whole, or its `region`. Returns whether
        the layer holds it so; else it is expanded to numbers."""
        self.load(part, weight.values())
        return False

    def randomize(self, part: str, generator: torch.Generator, dtype: torch.dtype | None = None) -> None:
        """Fill a part with noise of a sane scale around `random_mean`, made on the layer's own device. `dtype`: that of
        the checkpoint which it stands for; where it is smaller than the layer's, noise is rounded to it."""
        memory, shape = self._part(part), self.whole_shape(part)
        if memory.shape == shape:
            memory.normal_(self.random_mean, RANDOM_STD, generator=generator)
        else:  # all ranks draw the same numbers
            noise = memory.new_empty(shape).normal_(self.random_mean, RANDOM_STD, generator=generator)
            memory.copy_(self.own(part, noise))
        if dtype is not None and dtype.itemsize < memory.dtype.itemsize:
            memory.copy_(memory.to(dtype))

    def finish(self) -> None:
        """Called once, after every part is filled and before the first forward."""

    def _part(self, part: str) -> Tensor:
        """The memory a part is loaded into. A layer of one part keeps it in `weight`."""
        if part not in self.parts:
            raise KeyError(part)
        return self.weight.data


def weight_layers(model: nn.Module) -> Iterator[tuple[WeightLayer, dict[str, str]]]:
    """Every layer that holds weights, with its parts by checkpoint name."""
    for path, module in model.named_modules():
        if isinstance(module, WeightLayer):
            parent = path.rpartition(".")[0]
            yield module, {f"{parent}.{part}" if parent else part: part for part in module.parts}
