"""Maps the tensor names of a checkpoint's files, or of transformers' modules, to parts of the model's layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from quire.config.model import ModelConfig
from quire.runtime.models.build import describe_weights
from quire.runtime.models.family import STACKED, Family, Stacked, is_unread
from quire.runtime.models.registry import find_family

# A trainer sends the tensors of transformers' modules, whose names may differ from those that `save_pretrained` writes:
# all experts of a layer are in two tensors, and some modules have another name.
_RENAMED_MODULES = ((".mlp.", ".block_sparse_moe."), (".router.weight", ".router.layer.weight"))
_STACKED_MIXTRAL = {
    "gate_up_proj": Stacked(("w1.weight", "w3.weight")),
    "down_proj": Stacked(("w2.weight",)),
}


@dataclass(frozen=True, slots=True)
class PartNames:
    """`prefix`: the prefix of a complete model's names that the names in these files lack. `stacked`: tensors that hold
    all experts of a layer. `known`: the names of the model's parts if names of transformers' modules are read too."""

    config: ModelConfig
    family: Family
    prefix: str
    stacked: Mapping[str, Stacked] = field(default_factory=dict)
    known: Collection[str] = ()

    def of(self, stored: str) -> str | None:
        """Return the layers' name of a stored tensor, or None if no layer reads it."""
        name = self._of_file(stored)
        if name is None or not self.known or self._is_known(name):
            return name
        for module, file in _RENAMED_MODULES:
            other = self._of_file(stored.replace(module, file))
            if other is not None and self._is_known(other):
                return other
        return name

    def _of_file(self, stored: str) -> str | None:
        full = self.prefix + stored
        if (head := self.config.mtp) is not None:
            if not full.startswith(head.prefix):
                return None
            full = full.removeprefix(head.prefix)
        name = self.family.rename(full)
        if name is None or (self.family.drops_layers and _layer(name) >= self.config.num_layers):
            return None
        return None if is_unread(self.config, name) else name

    def _is_known(self, name: str) -> bool:
        path, dot, word = name.rpartition(".experts.")
        if dot and word in self.stacked:
            name = f"{path}.experts.0.{self.stacked[word].parts[0]}"
        return name in self.known


def part_names(config: ModelConfig, stored: Collection[str], *, of_modules: bool = False) -> PartNames:
    """Return the name mapping of a checkpoint. Checkpoints of embedding models omit the prefix of a complete model.
    `of_modules`: names of transformers' modules are read too."""
    family = find_family(config.architecture)
    prefix, _, rest = family.embedding.partition(".")
    is_known = family.embedding in stored or family.rename(rest) == family.embedding
    prefix = f"{prefix}." if rest in stored and not is_known else ""
    if not of_modules:
        return PartNames(config, family, prefix, family.stacked)
    known = describe_weights(config).keys()
    others = _STACKED_MIXTRAL if any(".experts.0.w1." in name for name in known) else STACKED
    return PartNames(config, family, prefix, {**others, **family.stacked}, known)


def _layer(name: str) -> int:
    """Return the layer number in a tensor's name, or -1."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1
