"""The weights of a Hugging Face directory."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from quire.config.model import ModelConfig
from quire.runtime.loading.expected import check_tensors
from quire.runtime.loading.hf.config import hf_model_config
from quire.runtime.loading.hf.directory import INDEX, weight_files
from quire.runtime.loading.hf.safetensors import SafetensorsFile
from quire.runtime.loading.values import refuse_blank, refuse_non_finite
from quire.runtime.models.registry import find_family
from quire.runtime.quantization.levels import LevelWeight
from quire.types.errors import ModelLoadError

WEIGHT_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}


class HfCheckpoint:
    """Reads one tensor at a time, as stored (float64 as float32): a view of its file that outlives `close`.

    Tensors have the names that the family's layers give them.
    """

    def __init__(self, directory: Path) -> None:
        self.file = str(directory)
        self.config: ModelConfig = hf_model_config(directory)
        self._files: list[SafetensorsFile] = []
        try:
            self._owners, self._stored = self._name(self._open(directory))
            self.names = frozenset(self._owners)
            check_tensors(self.config, self.names, shape=self.shape, source=self.source, file=self.file)
        except ModelLoadError:
            self.close()
            raise

    def shape(self, name: str) -> tuple[int, ...]:
        return self._owners[name].tensors[self._stored[name]].shape

    def source(self, name: str) -> str:
        return self._owners[name].name

    def read_levels(self, name: str) -> LevelWeight | None:  # noqa: ARG002
        return None  # safetensors hold numbers

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU. Raises ModelLoadError when its numbers are damaged beyond doubt."""
        owner = self._owners[name]
        tensor, raw = owner.tensors[self._stored[name]], owner.raw(self._stored[name])
        dtype = WEIGHT_DTYPES.get(tensor.dtype)
        if dtype is None:
            raise ModelLoadError(
                owner.name, f"has dtype {tensor.dtype}", tensor=name, fix=f"weights may be {', '.join(WEIGHT_DTYPES)}"
            )
        refuse_blank(raw, len(tensor.shape), owner.name, name)
        if tensor.offset % dtype.itemsize:
            raw = raw.copy()  # torch wants numbers at multiples of their size
        values = torch.from_numpy(raw).view(dtype).view(tensor.shape)
        refuse_non_finite(values, owner.name, name)
        return values.float() if dtype == torch.float64 else values

    def close(self) -> None:
        """Unmap the files. Idempotent."""
        for file in self._files:
            file.close()

    def _name(self, owners: dict[str, SafetensorsFile]) -> tuple[dict[str, SafetensorsFile], dict[str, str]]:
        """By the layers' names: the tensors' files, and their names there."""
        family = find_family(self.config.architecture)
        stored: dict[str, str] = {}
        for name, file in owners.items():
            known = family.rename(name)
            if family.drops_layers and known is not None and _layer(known) >= self.config.num_layers:
                continue
            if known in stored:
                raise ModelLoadError(file.name, f"is the same tensor as {stored[known]}", tensor=name)
            if known is not None:
                stored[known] = name
        return {known: owners[name] for known, name in stored.items()}, stored

    def _open(self, directory: Path) -> dict[str, SafetensorsFile]:
        paths, index = weight_files(directory)
        owners: dict[str, SafetensorsFile] = {}
        for path in paths:
            file = SafetensorsFile(path)
            self._files.append(file)
            for name in file.tensors:
                if name in owners:
                    raise ModelLoadError(file.name, f"is also in {owners[name].name}", tensor=name)
                owners[name] = file
        for name, place in (index or {}).items():
            if name not in owners or Path(owners[name].name).name != place:
                raise ModelLoadError(str(directory / place), f"is not there, though {INDEX} says so", tensor=name)
        return owners


def _layer(name: str) -> int:
    """The number of the layer that a tensor is of; -1: of none."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1
