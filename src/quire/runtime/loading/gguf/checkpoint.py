"""The weights of a GGUF model under their Hugging Face names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quire.config.model import ModelConfig
from quire.runtime.loading.expected import check_tensors
from quire.runtime.loading.gguf.config import gguf_family, gguf_model_config
from quire.runtime.loading.gguf.dequantize import dequantize
from quire.runtime.loading.gguf.levels import read_levels
from quire.runtime.loading.gguf.names import ROPE_FACTORS, canonical_name, rotary_heads, split_halves
from quire.runtime.loading.gguf.reader import GgufTensor
from quire.runtime.loading.gguf.shards import GgufModel
from quire.runtime.loading.mapping import Bytes
from quire.runtime.loading.values import refuse_blank, refuse_non_finite
from quire.runtime.quantization.levels import LevelWeight
from quire.types.errors import ModelLoadError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class GgufCheckpoint:
    """Reads one tensor at a time: quantized ones to float32, others as stored, query and key rows in half-split order.

    A tensor read as stored is a view of the file; it stays valid after `close`.
    """

    def __init__(self, path: Path) -> None:
        self._model = GgufModel(path)
        try:
            self.file = self._model.name
            self.config: ModelConfig = gguf_model_config(self._model)
            self._family = gguf_family(self.config.architecture)
            self._stored = self._canonical_names()
            self.names = frozenset(self._stored)
            check_tensors(self.config, self.names, shape=self.shape, source=self.source, file=self.file)
        except ModelLoadError:
            self.close()
            raise

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def source(self, name: str) -> str:
        return self._model.owners[self._stored[name]].name

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU. Raises ModelLoadError when its numbers are damaged beyond doubt."""
        tensor, stored = self._tensor(name), self._stored[name]
        values = dequantize(torch.from_numpy(self._raw(name)), tensor.ggml_type).view(tensor.shape)
        if values.dtype == torch.float64:
            values = values.float()
        if values.dtype not in FLOATS:
            raise ModelLoadError(self.source(name), f"has type {tensor.ggml_type.name}, not a weight's", tensor=stored)
        refuse_non_finite(values, self.source(name), stored)
        offset = self._family.norm_offset
        return values.float() - offset if offset and name.endswith("norm.weight") else values

    def read_levels(self, name: str) -> LevelWeight | None:
        tensor = self._tensor(name)
        return read_levels(torch.from_numpy(self._raw(name)), tensor.ggml_type, tensor.shape)

    def close(self) -> None:
        """Unmap the files. Idempotent."""
        self._model.close()

    def _raw(self, name: str) -> Bytes:
        """The stored bytes, rows in the order the layers want them."""
        tensor, stored = self._tensor(name), self._stored[name]
        raw = self._model.owners[stored].raw(stored)
        refuse_blank(raw, len(tensor.shape), self.source(name), stored)
        num_heads = rotary_heads(self._family, name, self.config.heads)
        return raw if num_heads is None else split_halves(raw, num_heads, tensor.shape[0])

    def _tensor(self, name: str) -> GgufTensor:
        stored = self._stored[name]
        return self._model.owners[stored].tensors[stored]

    def _canonical_names(self) -> dict[str, str]:
        stored: dict[str, str] = {}
        for name, owner in self._model.owners.items():
            canonical = canonical_name(self._family, name)
            if canonical is not None:
                stored[canonical] = name
            elif name != ROPE_FACTORS:
                raise ModelLoadError(owner.name, f"has no place in a {self.config.architecture} model", tensor=name)
        return stored
