"""Tensors in memory, in the place of a safetensors file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.runtime.loading.hf.safetensors import StoredTensor
from quire.types.errors import InvalidRequest

if TYPE_CHECKING:
    from quire.runtime.loading.mapping import Bytes

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class GivenFile:
    """Has the interface of SafetensorsFile over tensors on any device."""

    name = "the given weights"

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._given = tensors
        self.tensors = {name: _stored(name, tensor) for name, tensor in tensors.items()}

    def raw(self, name: str) -> Bytes:
        """Return the bytes of a tensor; a copy if it is not in the host's memory in one piece."""
        found: Bytes = self._given[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return found

    def close(self) -> None:
        """Forget the tensors."""
        self._given = {}


def tensors_of(given: object) -> dict[str, Tensor]:
    """Return tensors by name, from a mapping or from (name, tensor) pairs. Raises InvalidRequest."""
    pairs = given.items() if isinstance(given, dict) else given
    if not isinstance(pairs, Iterable):
        raise InvalidRequest("weights", f"cannot be a {type(given).__name__}", "give (name, tensor) pairs")
    found: dict[str, Tensor] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidRequest("weights", f"holds {pair!r:.80}", "give (name, tensor) pairs")
        name, tensor = pair
        if not isinstance(tensor, Tensor) or tensor.dtype not in _NAMES:
            raise InvalidRequest("weights", f"{name!r:.80} is no tensor of numbers", "give (name, tensor) pairs")
        if name in found:
            raise InvalidRequest("weights", f"hold {name!r:.80} twice", "give each name once")
        found[name] = tensor
    return found


def _stored(name: str, tensor: Tensor) -> StoredTensor:
    return StoredTensor(name, _NAMES[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)
