"""Maps the tensor names of a checkpoint's files to parts of the model's layers."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from quire.config.model import ModelConfig
from quire.runtime.models.family import Family, is_unread
from quire.runtime.models.registry import find_family


@dataclass(frozen=True, slots=True)
class PartNames:
    """`prefix`: the prefix of a complete model's names that the names in these files lack."""

    config: ModelConfig
    family: Family
    prefix: str

    def of(self, stored: str) -> str | None:
        """Return the layers' name of a stored tensor, or None if no layer reads it."""
        full = self.prefix + stored
        if (head := self.config.mtp) is not None:
            if not full.startswith(head.prefix):
                return None
            full = full.removeprefix(head.prefix)
        name = self.family.rename(full)
        if name is None or (self.family.drops_layers and _layer(name) >= self.config.num_layers):
            return None
        return None if is_unread(self.config, name) else name


def part_names(config: ModelConfig, stored: Collection[str]) -> PartNames:
    """Return the name mapping of a checkpoint. Checkpoints of embedding models omit the prefix of a complete model."""
    family = find_family(config.architecture)
    prefix, _, rest = family.embedding.partition(".")
    is_known = family.embedding in stored or family.rename(rest) == family.embedding
    return PartNames(config, family, f"{prefix}." if rest in stored and not is_known else "")


def _layer(name: str) -> int:
    """Return the layer number in a tensor's name, or -1."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1
