"""Which parts of a model's layers the tensors of a checkpoint's files are."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from quire.config.model import ModelConfig
from quire.runtime.models.family import Family, is_unread
from quire.runtime.models.registry import find_family


@dataclass(frozen=True, slots=True)
class PartNames:
    """`prefix`: what stands before the names of a whole model, and not before those in the files."""

    config: ModelConfig
    family: Family
    prefix: str

    def of(self, stored: str) -> str | None:
        """The layers' name of a tensor in the files; None: no layer reads it."""
        name = self.family.rename(self.prefix + stored)
        if name is None or (self.family.drops_layers and _layer(name) >= self.config.num_layers):
            return None
        return None if is_unread(self.config, name) else name


def part_names(config: ModelConfig, stored: Collection[str]) -> PartNames:
    """Checkpoints of embedding models hold the layers of a model alone: their names lack its prefix."""
    family = find_family(config.architecture)
    prefix, _, rest = family.embedding.partition(".")
    is_known = family.embedding in stored or family.rename(rest) == family.embedding
    return PartNames(config, family, f"{prefix}." if rest in stored and not is_known else "")


def _layer(name: str) -> int:
    """The number of the layer that a tensor is of; -1: of none."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1
