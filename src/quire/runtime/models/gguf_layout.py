"""Describes layer tensors that GGUF files store in another layout than Hugging Face's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.config.model import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from quire.runtime.models.gguf_orders import Order

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rearranged:
    """A layer tensor that is computed from stored tensors.

    `parts`: their names, as `GgufFamily` translates them, and the shapes they must have; dimensions of size 1 may be
    missing. `rows` and `columns`: the stored row or column of each row or column of the tensor, if it has a single
    part; None: in order. `restore` computes the tensor from the dequantized parts, after reordering; without it the
    values are unchanged and a quantized matrix stays quantized.
    """

    parts: Mapping[str, Shape]
    shape: Shape
    rows: Order | None = None
    columns: Order | None = None
    restore: Callable[..., Tensor] | None = None

    @property
    def first(self) -> str:
        return next(iter(self.parts))


def shared_gates(config: ModelConfig, names: Collection[str]) -> dict[str, Rearranged]:
    """Describe the gates of shared experts: matrices of one row, which files may store as vectors."""
    shape = (1, config.hidden_size)
    return {name: Rearranged({name: shape}, shape) for name in names if name.endswith(".mlp.shared_expert_gate.weight")}
