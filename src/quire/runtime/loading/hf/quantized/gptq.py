"""GPTQ: 2, 3, 4 or 8 bits, packed along the inputs; groups may contain inputs in any order (`desc_act`)."""

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
from quire.runtime.quantization.region import Region, blocks_of, narrow, words_of_region

BITS = (2, 3, 4, 8)
ZERO_SHIFT = {"gptq": 1, "gptq_v2": 0}  # added to stored zero points, by `checkpoint_format`


class Gptq(Method):
    """The rules of `dynamic` and `modules_to_not_convert` are not read, because each matrix's tensors show how it is
    stored."""

    name = "gptq"
    words = frozenset(("qweight", "qzeros", "scales", "g_idx"))
    main_words = ("qweight",)
    zero_words = ("qzeros",)

    def __init__(self, config: Fields) -> None:
        self._bits = config.integer("bits")
        if self._bits not in BITS:
            raise config.refuse("bits", f"{self._bits} is not supported", fix=f"supported: {', '.join(map(str, BITS))}")
        form = config.text("checkpoint_format", config.text("format", "gptq"))
        if form not in ZERO_SHIFT:
            raise config.refuse("checkpoint_format", f"{form!r} is not supported", fix="supported: gptq, gptq_v2")
        if config.flag("is_marlin_format", False):
            raise config.refuse("is_marlin_format", "weights in the order of Marlin's kernels are not supported")
        if (words := config.text("pack_dtype", "int32")) != "int32":
            raise config.refuse("pack_dtype", f"{words!r} is not supported", fix="supported: int32")
        if config.raw("adapter"):
            raise config.refuse("adapter", "weights that need an adapter are not supported")
        self._shift, self._size = ZERO_SHIFT[form], config.integer("group_size", 128)
        self._varies = bool(config.raw("dynamic"))
        self._is_symmetric = config.flag("sym", False)

    def layout(self, layer: str, tensors: Mapping[str, StoredTensor]) -> Layout:  # noqa: ARG002
        words, outputs = need(tensors, "qweight", 2, ("I32",))
        groups, columns = need(tensors, "scales", 2, FLOATS)
        zeros = need(tensors, "qzeros", 2, ("I32",))
        if columns != outputs or zeros[0] != groups or not (groups and outputs):
            raise BadTensors("scales", f"has shape {tensors['scales'].shape}, there are {outputs} outputs")
        bits = zeros[1] * 32 // outputs
        if bits not in BITS or tensors["qzeros"].shape != (groups, -(-outputs * bits // 32)):
            raise BadTensors(
                "qzeros", f"has shape {tensors['qzeros'].shape}, which does not fit any supported number of bits"
            )
        inputs = words * 32 // bits
        if bits != self._bits and not self._varies:
            raise BadTensors("qweight", f"has {bits} bits, config.json says {self._bits}")
        if "g_idx" in tensors and need(tensors, "g_idx", 1, ("I32", "I64")) != (inputs,):
            raise BadTensors("g_idx", f"has shape {tensors['g_idx'].shape}, there are {inputs} inputs")
        return Layout(outputs, inputs, bits, groups, has_offsets=not self._is_symmetric or bits < 4)

    def cut(
        self,
        layer: str,  # noqa: ARG002
        layout: Layout,
        tensors: Mapping[str, Tensor],
        region: Region,
    ) -> Mapping[str, Tensor] | None:
        outputs, inputs = region.outputs, region.inputs
        words, zeros = (
            words_of_region(inputs, layout.inputs, layout.bits),
            words_of_region(outputs, layout.outputs, layout.bits),
        )
        groups, index = range(layout.groups), tensors.get("g_idx")
        if len(inputs) < layout.inputs:
            found = blocks_of(inputs, layout.inputs, -(-layout.inputs // layout.groups))
            if found is None or layout.inputs % layout.groups or not _in_order(index, layout):
                return None
            groups = found
        if words is None or zeros is None:
            return None
        cut = {
            "qweight": narrow(tensors["qweight"], words, outputs),
            "qzeros": narrow(tensors["qzeros"], groups, zeros),
            "scales": narrow(tensors["scales"], groups, outputs),
        }
        return cut if index is None else {**cut, "g_idx": narrow(index, inputs) - groups.start}

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> LevelWeight:  # noqa: ARG002
        scales = tensors["scales"]
        groups, outputs = scales.shape
        bits = tensors["qzeros"].shape[1] * 32 // outputs
        inputs = tensors["qweight"].shape[0] * 32 // bits
        levels = unpack(tensors["qweight"].t(), bits, inputs)
        zeros = unpack(tensors["qzeros"], bits, outputs).short() + self._shift
        zeros &= (1 << bits) - 1 if self._shift else 0xFF  # stored minus one, wrapping around below 0
        size = self._size if self._size > 0 and -(-inputs // self._size) == groups else None
        index = tensors.get("g_idx")
        if index is not None and (int(index.min()) < 0 or int(index.max()) >= groups):
            raise BadTensors("g_idx", f"names groups outside [0, {groups})")
        return Integers(levels, scales.t(), zeros.t(), bits, index, size).weight()


def _in_order(index: Tensor | None, layout: Layout) -> bool:
    """Whether groups are equally large runs of consecutive inputs."""
    size = layout.inputs // layout.groups
    return index is None or torch.equal(index.long(), torch.arange(layout.inputs) // size)
