"""The base class of quantized checkpoint formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.runtime.loading.hf.safetensors import StoredTensor
from quire.runtime.quantization.region import Region
from quire.runtime.quantization.weight import QuantizedWeight

Shape = tuple[int, ...]
DTYPES: dict[str, torch.dtype] = {  # of the tensors that store quantized matrices
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip


class Layout(NamedTuple):
    """The sizes of a quantized matrix."""

    outputs: int
    inputs: int
    bits: int  # bits per value as held; 0: float8
    groups: int  # groups per output; each has a scale
    has_offsets: bool = True  # whether 0 may be another level than the middle one
    has_table: bool = False  # values come from a table of 16


class Method(ABC):
    """A quantized checkpoint format. A matrix is stored as several tensors, named by the layer's name, a dot, and a
    suffix (`word`).

    `words`: all suffixes of such a matrix. A tensor with a suffix in `main_words` identifies one. Tensors in
    `zero_words`, the zero points, may be all zeros. Those in `byte_words` are read as bytes, whatever their dtype. The
    content of those in `noted_words` is available to `layout`.
    """

    name: str
    words: frozenset[str]
    main_words: tuple[str, ...]
    zero_words: tuple[str, ...] = ()
    byte_words: tuple[str, ...] = ()
    noted_words: tuple[str, ...] = ()
    has_cache_scheme = False  # whether the config has KV cache quantization, which is ignored

    def split(self, name: str) -> tuple[str, str]:
        """Split a tensor's name into layer and suffix."""
        layer, _, word = name.rpartition(".")
        return layer, word

    def is_quantized(self, tensors: Mapping[str, StoredTensor]) -> bool:
        """Whether the layer with these tensors, keyed by suffix, has a quantized matrix."""
        return any(word in tensors for word in self.main_words)

    @abstractmethod
    def layout(self, layer: str, tensors: Mapping[str, StoredTensor]) -> Layout:
        """Return the matrix's sizes. Raises BadTensors if the tensors do not form a matrix."""

    def cut(
        self,
        layer: str,  # noqa: ARG002
        layout: Layout,  # noqa: ARG002
        tensors: Mapping[str, Tensor],  # noqa: ARG002
        region: Region,  # noqa: ARG002
    ) -> Mapping[str, Tensor] | None:
        """Return the tensors, mostly views, that store this region of the matrix, as `read` accepts them. None if the
        region cuts through a packed word or a group."""
        return None

    @abstractmethod
    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Return the matrix from tensors that `layout` has checked, or a region of it from the result of `cut`. Raises
        BadTensors for invalid values."""


class BadTensors(ValueError):
    """The tensors of a layer do not form a quantized matrix. `word`: the suffix of the faulty one."""

    def __init__(self, word: str, reason: str) -> None:
        super().__init__(f"{word}: {reason}")
        self.word, self.reason = word, reason


def need(tensors: Mapping[str, StoredTensor], word: str, rank: int, dtypes: tuple[str, ...]) -> Shape:
    """Return the shape of a required tensor. Raises BadTensors if it is missing or has another rank or dtype."""
    if word not in tensors:
        raise BadTensors(word, "is missing")
    tensor = tensors[word]
    if len(tensor.shape) != rank or tensor.dtype not in dtypes:
        wanted = f"expected {' or '.join(dtypes)} with {rank} dimensions"
        raise BadTensors(word, f"has {tensor.dtype} of shape {list(tensor.shape)}, {wanted}")
    return tensor.shape
