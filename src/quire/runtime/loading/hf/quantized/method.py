"""What the loader knows of a way to store quantized matrices."""

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
DTYPES: dict[str, torch.dtype] = {  # of the tensors that quantized matrices are made of
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip


class Layout(NamedTuple):
    """Of a quantized matrix."""

    outputs: int
    inputs: int
    bits: int  # of an entry as it is held; 0: they are float8
    groups: int  # of the inputs of an output: each has a scale
    has_offsets: bool = True  # the middle level need not be the number 0
    has_table: bool = False  # an entry is one of 16 levels


class Method(ABC):
    """A way to store a quantized matrix: as several tensors, named by the layer's name, a dot, and a word each.

    `words`: all that belong to such a matrix. The tensor of one of `main_words` marks it. Those of `zero_words`, its
    zero points, may be nothing but zeros. Those of `byte_words` are read as bytes, whatever their dtype. The content of
    those of `noted_words` is known to `layout`.
    """

    name: str
    words: frozenset[str]
    main_words: tuple[str, ...]
    zero_words: tuple[str, ...] = ()
    byte_words: tuple[str, ...] = ()
    noted_words: tuple[str, ...] = ()
    has_cache_scheme = False  # whether the config says how keys and values are quantized, which is not used

    def split(self, name: str) -> tuple[str, str]:
        """The layer of a tensor, and its word."""
        layer, _, word = name.rpartition(".")
        return layer, word

    def is_quantized(self, tensors: Mapping[str, StoredTensor]) -> bool:
        """Whether a layer with these tensors, by their words, has a quantized matrix."""
        return any(word in tensors for word in self.main_words)

    @abstractmethod
    def layout(self, layer: str, tensors: Mapping[str, StoredTensor]) -> Layout:
        """What the tensors hold. Raises BadTensors for those that make no matrix."""

    def cut(
        self,
        layer: str,  # noqa: ARG002
        layout: Layout,  # noqa: ARG002
        tensors: Mapping[str, Tensor],  # noqa: ARG002
        region: Region,  # noqa: ARG002
    ) -> Mapping[str, Tensor] | None:
        """What of the tensors holds this region of the matrix: tensors, views mostly, that `read` takes; None: it has
        a part of what is stored as one."""
        return None

    @abstractmethod
    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """The matrix, of tensors that `layout` has checked, or a region of it, of what `cut` gave. Raises BadTensors
        for numbers that make none."""


class BadTensors(ValueError):
    """The tensors of a layer make no quantized matrix. `word`: of the one at fault."""

    def __init__(self, word: str, reason: str) -> None:
        super().__init__(f"{word}: {reason}")
        self.word, self.reason = word, reason


def need(tensors: Mapping[str, StoredTensor], word: str, rank: int, dtypes: tuple[str, ...]) -> Shape:
    """The shape of a tensor that must be there."""
    if word not in tensors:
        raise BadTensors(word, "is missing")
    tensor = tensors[word]
    if len(tensor.shape) != rank or tensor.dtype not in dtypes:
        wanted = f"expected {' or '.join(dtypes)} with {rank} dimensions"
        raise BadTensors(word, f"has {tensor.dtype} of shape {list(tensor.shape)}, {wanted}")
    return tensor.shape
