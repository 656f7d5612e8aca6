"""Locates layer tensors inside the stored tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from quire.runtime.models.family import Stacked

BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the two tensors that store an MXFP4 matrix
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored tensor, or the part of one that belongs to an expert."""

    tensor: str  # name in the files
    expert: int | None = None  # None: all of it
    transposed: bool = False  # stored transposed
    number: int = 0  # index among the `count` pieces of the same expert
    count: int = 1
    interleaved: bool = False  # whether the pieces' outputs are interleaved, or concatenated
    exponents: str | None = None  # name of the MXFP4 exponents' tensor
    either_way: bool = False  # `transposed` is to be found from the shape
    flat_experts: int = 0  # experts whose rows are concatenated in the stored tensor; 0: experts are an axis

    def by_expert(self, stored: Shape) -> Shape:
        """Return the shape of the stored tensor with an axis for experts, given the stored shape."""
        num = self.flat_experts
        return stored if not num or not stored or stored[0] % num else (num, stored[0] // num, *stored[1:])

    def shape(self, stored: Shape) -> Shape:
        """Return the piece's shape, given that of the stored tensor."""
        if self.expert is None:
            return stored
        stored = self.by_expert(stored)
        inner = stored[1:][::-1] if self.transposed else stored[1:]
        return (len(range(*self._outputs(inner[0]).indices(inner[0]))), *inner[1:]) if inner else ()

    def transposed_to(self, stored: Shape, wanted: Shape | None) -> Piece:
        """Return the piece, transposed if only then a tensor of shape `stored` gives one of shape `wanted`."""
        if not self.either_way or wanted is None or self.shape(stored) == wanted:
            return self
        return replace(self, transposed=not self.transposed)

    def of_expert(self, values: Tensor) -> Tensor:
        """Return the piece, given its expert's part of the stored tensor."""
        values = values.t() if self.transposed else values
        return values[self._outputs(len(values))]

    def _outputs(self, total: int) -> slice:
        if self.interleaved:
            return slice(self.number, None, self.count)
        return slice(self.number * total // self.count, (self.number + 1) * total // self.count)


def pieces_of(name: str, stored: str, stacked: Mapping[str, Stacked], num_experts: int) -> Iterator[tuple[str, Piece]]:
    """Yield the layer tensors that a stored tensor contains, as (name, piece).

    `name`: the family's name; `stored`: the name in the files. MXFP4 blocks and their exponents form one piece.
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
            transposed = found.transposed and not is_packed  # MXFP4 blocks run along the inputs, which are last
            count, either_way = len(found.parts), found.either_way
            flat = num_experts if found.flat else 0
            piece = Piece(stored, expert, transposed, number, count, found.interleaved, exponents, either_way, flat)
            yield f"{path}.experts.{expert}.{part}", piece
