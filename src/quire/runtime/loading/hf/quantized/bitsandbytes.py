"""bitsandbytes: 4 bits by a table of 16 values (nf4, fp4) in blocks, with or without double quantization; int8 with a
scale per output (LLM.int8)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.config.fields import Fields
from quire.runtime.loading.hf.quantized.integers import FLOATS
from quire.runtime.loading.hf.quantized.method import BadTensors, Layout, Method, need
from quire.runtime.loading.hf.safetensors import StoredTensor
from quire.runtime.quantization.levels import LevelWeight

TABLES = ("nf4", "fp4")
STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in TABLES)
_NAME = re.compile(
    r"(.+)\.(weight(?:\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+))?"
    r"|SCB|weight_format)"
)
_PACKED = ("U8", *FLOATS)  # dtypes of `bnb_4bit_quant_storage`: the bytes are the same
_ROWS = 0  # `weight_format` of row-major int8 matrices
_LARGEST = 127
_DIVISORS = torch.linspace(64, 127.49, 4096, dtype=torch.float64)


class BitsAndBytes(Method):
    """The list of unconverted modules is not read, because each matrix's tensors show how it is stored.

    A table's values are held as 8-bit levels, with an error of at most 1/350 of the largest value of the block.
    Activations are not quantized; LLM.int8 quantizes those below its threshold.
    """

    name = "bitsandbytes"
    words = frozenset((
        "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *STATES,
        "SCB", "weight_format",
    ))  # fmt: skip
    main_words = ("weight",)
    zero_words = ("weight_format",)
    byte_words = ("weight",)
    noted_words = STATES

    def __init__(self, config: Fields) -> None:
        if not (config.flag("load_in_4bit", False) or config.flag("load_in_8bit", False)):
            raise config.refuse(
                "load_in_4bit", "neither load_in_4bit nor load_in_8bit is true", fix="remove quantization_config"
            )

    def split(self, name: str) -> tuple[str, str]:
        found = _NAME.fullmatch(name)
        return (found[1], found[2]) if found else super().split(name)

    def is_quantized(self, tensors: Mapping[str, StoredTensor]) -> bool:
        return "weight.quant_map" in tensors or ("weight" in tensors and tensors["weight"].dtype in ("U8", "I8"))

    def layout(self, layer: str, tensors: Mapping[str, StoredTensor]) -> Layout:  # noqa: ARG002
        if "weight" in tensors and tensors["weight"].dtype == "I8":
            outputs, inputs = need(tensors, "weight", 2, ("I8",))
            if need(tensors, "SCB", 1, FLOATS) != (outputs,):
                raise BadTensors("SCB", f"has shape {list(tensors['SCB'].shape)}, there are {outputs} outputs")
            return Layout(outputs, inputs, 8, 1, has_offsets=False)
        need(tensors, "weight", 2, _PACKED)
        state = _read_state({word: tensors[word].content for word in STATES if word in tensors})
        outputs, inputs = state.shape
        if tensors["weight"].nbytes != -(-outputs * inputs // 2):
            raise BadTensors(
                "weight", f"has {tensors['weight'].nbytes} bytes for {outputs} x {inputs} levels of 4 bits"
            )
        if need(tensors, "weight.quant_map", 1, ("F32",)) != (16,):
            raise BadTensors("weight.quant_map", f"has shape {list(tensors['weight.quant_map'].shape)}, expected [16]")
        blocks = -(-outputs * inputs // state.block)
        if need(tensors, "weight.absmax", 1, ("F32",) if state.nested is None else ("U8",)) != (blocks,):
            raise BadTensors("weight.absmax", f"has shape {list(tensors['weight.absmax'].shape)}, expected [{blocks}]")
        if state.nested is not None:
            need(tensors, "weight.nested_quant_map", 1, ("F32",))
            if need(tensors, "weight.nested_absmax", 1, ("F32",)) != (-(-blocks // state.nested.block),):
                raise BadTensors("weight.nested_absmax", f"does not scale {blocks} blocks")
        groups = inputs // math.gcd(inputs, state.block)
        return Layout(outputs, inputs, 8, groups, has_offsets=False, has_table=True)

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> LevelWeight:  # noqa: ARG002
        if "SCB" in tensors:
            return _read_int8(tensors)
        state = _read_state({word: bytes(tensors[word].numpy()) for word in STATES if word in tensors})
        scales = tensors["weight.absmax"] if state.nested is None else _nested_scales(tensors, state.nested)
        outputs, inputs = state.shape
        packed = tensors["weight"].flatten()
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[: outputs * inputs]
        levels, divisor = _as_levels(tensors["weight.quant_map"])
        group = math.gcd(inputs, state.block)  # blocks continue from one output to the next
        factors = (scales.double() / divisor).float().repeat_interleave(state.block // group)
        factors = factors[: outputs * inputs // group].view(outputs, -1)
        entries = levels.index_select(0, codes.int()).view(outputs, inputs)
        return LevelWeight(entries, factors, torch.zeros_like(factors), nibbles=False)


class _Nested(NamedTuple):
    """How the scales of blocks are themselves quantized (double quantization)."""

    block: int
    offset: float


class _State(NamedTuple):
    shape: tuple[int, int]
    block: int
    nested: _Nested | None


def _read_state(texts: Mapping[str, bytes]) -> _State:
    """Parse the tool's description of a matrix: JSON in a tensor of bytes."""
    if len(texts) != 1:
        raise BadTensors("weight.quant_state", f"must be one of {', '.join(TABLES)}, there are {len(texts)}")
    (word, text), *_ = texts.items()
    try:
        given = json.loads(text)
        shape, block = given["shape"], given["blocksize"]
        nested = _Nested(given["nested_blocksize"], float(given["nested_offset"])) if "nested_offset" in given else None
    except (ValueError, KeyError, TypeError) as error:
        raise BadTensors(word, f"is not a valid quantization state: {error!r}") from None
    counts = [*shape, block] if isinstance(shape, list) and len(shape) == 2 else []
    counts += [] if nested is None else [nested.block]
    if len(counts) < 3 or any(type(count) is not int or count < 1 for count in counts):
        raise BadTensors(word, f"has shape {shape!r} and blocks of {block!r}, expected whole numbers")
    return _State((shape[0], shape[1]), block, nested)


def _nested_scales(tensors: Mapping[str, Tensor], nested: _Nested) -> Tensor:  # [blocks]
    codes, table = tensors["weight.absmax"].int(), tensors["weight.nested_quant_map"]
    if int(codes.max()) >= len(table):
        raise BadTensors("weight.absmax", f"has indices outside a table of {len(table)} values")
    factors = tensors["weight.nested_absmax"].repeat_interleave(nested.block)[: len(codes)]
    return table.index_select(0, codes) * factors + nested.offset


def _as_levels(table: Tensor) -> tuple[Tensor, float]:
    """Return int8 levels and a divisor that approximate a table's values. Of the tried divisors it takes the one with
    the smallest largest error."""
    largest = float(table.abs().max())
    if largest == 0:
        raise BadTensors("weight.quant_map", "holds nothing but zeros")
    wide = table.double() / largest * _DIVISORS.unsqueeze(1)  # [divisors, 16]
    errors = ((wide - wide.round()) / _DIVISORS.unsqueeze(1)).abs().amax(dim=1)
    best = int(errors.argmin())
    return wide[best].round().to(torch.int8), float(_DIVISORS[best]) / largest


def _read_int8(tensors: Mapping[str, Tensor]) -> LevelWeight:
    if "weight_format" in tensors and int(tensors["weight_format"]) != _ROWS:
        raise BadTensors("weight_format", f"{int(tensors['weight_format'])} is not supported, only {_ROWS} (row)")
    scales = tensors["SCB"].float().unsqueeze(1) / _LARGEST
    return LevelWeight(tensors["weight"].view(torch.int8), scales, torch.zeros_like(scales), nibbles=False)
