"""Where a tensor of a layer lies in a checkpoint: it may be a part of a larger one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from quire.runtime.models.family import Stacked

BLOCKS, SCALES = "_blocks", "_scales"  # behind the name of a matrix that is stored as MXFP4: two tensors
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored tensor, or what of it belongs to one expert."""

    tensor: str  # its name in the files
    expert: int | None = None  # None: all of it
    turned: bool = False  # by inputs, then outputs
    number: int = 0  # of the piece among `count` of the same expert
    count: int = 1
    in_turns: bool = False  # whether their outputs are, or they lie one behind the other
    exponents: str | None = None  # the tensor beside it, of MXFP4

    def shape(self, stored: Shape) -> Shape:
        """Of the piece, where the whole has this shape."""
        if self.expert is None:
            return stored
        inner = stored[1:][::-1] if self.turned else stored[1:]
        return (len(range(*self._outputs(inner[0]).indices(inner[0]))), *inner[1:]) if inner else ()

    def of_expert(self, values: Tensor) -> Tensor:
        """The piece, of what is stored of its expert."""
        values = values.t() if self.turned else values
        return values[self._outputs(len(values))]

    def _outputs(self, total: int) -> slice:
        if self.in_turns:
            return slice(self.number, None, self.count)
        return slice(self.number * total // self.count, (self.number + 1) * total // self.count)


def pieces_of(name: str, stored: str, stacked: Mapping[str, Stacked], num_experts: int) -> Iterator[tuple[str, Piece]]:
    """The tensors of layers that a tensor holds: their names, and where they lie.

    `name`: as the family has it; `stored`: as the files do. The exponents of MXFP4 come with its blocks.
    """
    path, dot, word = name.rpartition(".experts.")
    is_packed = word.endswith(BLOCKS)
    found = stacked.get(word.removesuffix(BLOCKS))
    if not dot or found is None:
        yield name, Piece(stored)
        return
    exponents = stored.removesuffix(BLOCKS) + SCALES if is_packed else None
    for expert in range(num_experts):
        for number, part in enumerate(found.parts):
            turned = found.turned and not is_packed  # blocks are of inputs: these come last
            piece = Piece(stored, expert, turned, number, len(found.parts), found.in_turns, exponents)
            yield f"{path}.experts.{expert}.{part}", piece
