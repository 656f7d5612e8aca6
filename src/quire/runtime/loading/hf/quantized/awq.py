"""AWQ: 4 bits, packed along the outputs in the order of its kernels (`version: gemm`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.config.fields import Fields
from quire.runtime.loading.hf.quantized.integers import FLOATS, Integers
from quire.runtime.loading.hf.quantized.method import BadTensors, Layout, Method, need
from quire.runtime.loading.hf.safetensors import StoredTensor
from quire.runtime.quantization.levels import LevelWeight
from quire.runtime.quantization.packing import unpack
from quire.runtime.quantization.region import Region, blocks_of, narrow

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each of eight consecutive outputs in its word
_IN_A_WORD = len(ORDER)


class Awq(Method):
    """`modules_to_not_convert` is not read, because each matrix's tensors show how it is stored."""

    name = "awq"
    words = frozenset(("qweight", "qzeros", "scales"))
    main_words = ("qweight",)
    zero_words = ("qzeros",)

    def __init__(self, config: Fields) -> None:
        bits = config.integer("bits", config.integer("w_bit", 4))
        if bits != 4:
            raise config.refuse("bits", f"{bits} is not supported", fix="supported: 4")
        version = config.text("version", "gemm").lower()
        if version != "gemm":
            raise config.refuse("version", f"{version!r} is not supported", fix="supported: gemm")
        if not config.flag("zero_point", True):
            raise config.refuse("zero_point", "weights without zero points are not supported")

    def layout(self, layer: str, tensors: Mapping[str, StoredTensor]) -> Layout:  # noqa: ARG002
        inputs, words = need(tensors, "qweight", 2, ("I32",))
        groups, outputs = need(tensors, "scales", 2, FLOATS)
        if words * _IN_A_WORD != outputs or not groups or inputs % groups:
            raise BadTensors("scales", f"has shape {(groups, outputs)}, of {inputs} x {words * _IN_A_WORD} levels")
        if need(tensors, "qzeros", 2, ("I32",)) != (groups, words):
            raise BadTensors("qzeros", f"has shape {tensors['qzeros'].shape}, expected {(groups, words)}")
        return Layout(outputs, inputs, 4, groups)

    def cut(
        self,
        layer: str,  # noqa: ARG002
        layout: Layout,
        tensors: Mapping[str, Tensor],
        region: Region,
    ) -> Mapping[str, Tensor] | None:
        words = blocks_of(region.outputs, layout.outputs, _IN_A_WORD)
        groups = blocks_of(region.inputs, layout.inputs, layout.inputs // layout.groups)
        if words is None or groups is None:
            return None
        return {
            "qweight": narrow(tensors["qweight"], region.inputs, words),
            "qzeros": narrow(tensors["qzeros"], groups, words),
            "scales": narrow(tensors["scales"], groups, region.outputs),
        }

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> LevelWeight:  # noqa: ARG002
        scales = tensors["scales"]
        levels, zeros = (_outputs(tensors[word]) for word in ("qweight", "qzeros"))
        return Integers(levels.t().contiguous(), scales.t(), zeros.t(), 4).weight()


def _outputs(words: Tensor) -> Tensor:  # [n, words] -> [n, outputs], uint8
    stored = unpack(words, 4, words.shape[1] * _IN_A_WORD).view(len(words), -1, _IN_A_WORD)
    return stored.index_select(2, torch.tensor(ORDER)).flatten(1)
