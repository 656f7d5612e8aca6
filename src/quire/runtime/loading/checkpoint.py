"""A model's weights, one tensor at a time, whatever files they lie in."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.config.model import ModelConfig
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.gguf.checkpoint import GgufCheckpoint
from quire.runtime.loading.hf.checkpoint import HfCheckpoint
from quire.runtime.loading.values import Own, all_of_it
from quire.runtime.quantization.region import Region
from quire.runtime.quantization.weight import StoredWeight


class Checkpoint(Protocol):
    """Weights under their Hugging Face names. `names` holds all that a model of `config` needs."""

    file: str
    config: ModelConfig
    names: frozenset[str]

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, own: Own = all_of_it) -> Tensor:
        """The tensor on the CPU: float32 where it was quantized, else as stored. It may be a view of the file. Only
        `own`, the part of it that is used, is looked at for damage: nothing else is read of a view."""

    def read_quantized(self, name: str, region: Region | None = None) -> StoredWeight | None:
        """The matrix as it is stored, or only a region of it where nothing that is stored as one is cut by that; None
        where it is stored as numbers, or in a form that only `read` knows."""

    def source(self, name: str) -> str:
        """The file the tensor lies in."""

    def close(self) -> None:
        """Give the files back; tensors already read stay valid. Idempotent."""


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Open a model's files and check that every tensor is there with the right shape, before reading any."""
    return GgufCheckpoint(files.path) if files.kind == "gguf" else HfCheckpoint(files.path)
