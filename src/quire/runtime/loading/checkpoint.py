"""Opens a model's weights, whatever files they are in."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.config.model import ModelConfig
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.gguf.checkpoint import GgufCheckpoint
from quire.runtime.loading.hf.checkpoint import HfCheckpoint
from quire.runtime.loading.values import UsedPart, whole_tensor
from quire.runtime.quantization.region import Region
from quire.runtime.quantization.weight import StoredWeight


class Checkpoint(Protocol):
    """Weights under their Hugging Face names. `names` contains all that a model of `config` needs."""

    file: str
    config: ModelConfig
    names: frozenset[str]

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, own: UsedPart = whole_tensor) -> Tensor:
        """Return the tensor on the CPU: float32 if it was quantized, otherwise in the stored dtype, possibly as a view
        of the file. Checks only the part that `own` returns for damage, so that the rest of a view is not read."""

    def read_quantized(self, name: str, region: Region | None = None) -> StoredWeight | None:
        """Return the matrix in its quantized form; only `region` if that cuts no block, group or packed word. None if
        it is stored unquantized, or in a form that only `read` supports."""

    def source(self, name: str) -> str:
        """Return the file that contains the tensor."""

    def close(self) -> None:
        """Close the files; tensors already read stay valid. Idempotent."""


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Open a model's files and check that every tensor exists with the right shape, before reading any."""
    return GgufCheckpoint(files.path) if files.kind == "gguf" else HfCheckpoint(files.path, is_head=files.is_head)
