"""compressed-tensors: packed integers, int8 and float8. Schemes apply to layers by class, name or regular
expression."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.config.fields import Fields
from quire.runtime.loading.hf.quantized.float8 import FLOAT8, check_scale
from quire.runtime.loading.hf.quantized.integers import FLOATS, Integers
from quire.runtime.loading.hf.quantized.method import BadTensors, Layout, Method, Shape, need
from quire.runtime.loading.hf.quantized.scheme import Scheme, read_scheme
from quire.runtime.loading.hf.safetensors import StoredTensor
from quire.runtime.quantization.activations import ActivationScheme
from quire.runtime.quantization.float8_weight import Float8Weight
from quire.runtime.quantization.levels import LevelWeight
from quire.runtime.quantization.packing import unpack, unpack_whole, words_of
from quire.runtime.quantization.region import Region, blocks_of, narrow, narrow_scales, words_of_region
from quire.runtime.quantization.weight import QuantizedWeight

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_CLASS = "Linear"
_REFUSED = ("sparsity_config", "transform_config")


@dataclass(frozen=True, slots=True)
class _Target:
    pattern: str
    scheme: Scheme

    def matches(self, layer: str) -> bool:
        if self.pattern.startswith("re:"):
            return re.match(self.pattern[3:], layer) is not None
        return self.pattern in (_CLASS, layer)


class CompressedTensors(Method):
    """Layers in `ignore` are stored unquantized and read as such."""

    name = "compressed-tensors"
    words = frozenset((
        "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale",
        "input_zero_point",
    ))  # fmt: skip
    main_words = ("weight_packed", "weight")
    zero_words = ("weight_zero_point", "input_zero_point")

    def __init__(self, config: Fields) -> None:
        form = config.text("format", "naive-quantized")
        groups = config.raw("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise config.refuse("config_groups", "must hold at least one scheme")
        for key in _REFUSED:
            value = config.raw(key)
            if value and not (isinstance(value, dict) and value.get("format") == "dense"):
                raise config.refuse(key, "is not supported", fix="use a checkpoint without it")
        schemes: dict[str, Scheme] = {}  # by target; a later scheme for the same target wins
        for name, group in groups.items():
            path = f"config_groups.{name}"
            if not isinstance(group, dict):
                raise config.refuse(path, "must be a scheme")
            own = group.get("format") or form
            if own not in FORMATS:
                raise config.refuse("format", f"{own!r} is not supported", fix=f"supported: {', '.join(FORMATS)}")
            targets = group.get("targets")
            if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
                raise config.refuse(f"{path}.targets", "must be a list of names")
            scheme = read_scheme(config, path, group)
            schemes |= {_checked(config, path, target): scheme for target in targets}
        self._targets = [_Target(pattern, schemes[pattern]) for pattern in sorted(schemes, key=_priority)]

    def is_quantized(self, tensors: Mapping[str, StoredTensor]) -> bool:
        return "weight_packed" in tensors or ("weight" in tensors and tensors["weight"].dtype in (FLOAT8, "I8"))

    def layout(self, layer: str, tensors: Mapping[str, StoredTensor]) -> Layout:
        scheme = self._scheme(layer)
        if "weight_packed" in tensors:
            outputs, words = need(tensors, "weight_packed", 2, ("I32",))
            _, groups = need(tensors, "weight_scale", 2, FLOATS)
            if need(tensors, "weight_shape", 1, ("I64", "I32")) != (2,):
                raise BadTensors("weight_shape", "must hold outputs and inputs")
            inputs = words * 32 // scheme.bits if scheme.group is None else groups * scheme.group
            if scheme.is_float or _packs_across(words, inputs, scheme.bits) is None:
                raise BadTensors("weight_packed", f"has {words} words for {inputs} inputs of {scheme.bits} bits")
        else:
            outputs, inputs = need(tensors, "weight", 2, (FLOAT8,) if scheme.is_float else ("I8",))
        block = scheme.block((outputs, inputs))
        check_scale(tensors, "weight_scale", (outputs, inputs), block)
        if not scheme.is_symmetric:
            need(tensors, "weight_zero_point", 2, ("I32", "I8"))
        if scheme.activations is not None and scheme.activations.is_static:
            check_scale(tensors, "input_scale", (1, 1), (1, 1))
        bits, groups = 0 if scheme.is_float else scheme.bits, -(-inputs // block[1])
        return Layout(outputs, inputs, bits, groups, has_offsets=not scheme.is_symmetric or bits < 4)

    def cut(
        self, layer: str, layout: Layout, tensors: Mapping[str, Tensor], region: Region
    ) -> Mapping[str, Tensor] | None:
        scheme, shape = self._scheme(layer), (layout.outputs, layout.inputs)
        if "weight_g_idx" in tensors or (scheme.group is not None and layout.inputs % scheme.group):
            return None
        scales = narrow_scales(tensors["weight_scale"], shape, scheme.block(shape), region)
        cut = None if scales is None else {**tensors, "weight_scale": scales}
        words = words_of_region(region.inputs, layout.inputs, scheme.bits)
        if cut is None or words is None:
            return None
        if "weight_packed" in tensors:
            cut["weight_packed"] = narrow(tensors["weight_packed"], region.outputs, words)
            cut["weight_shape"] = torch.tensor(region.shape)
        else:
            cut["weight"] = narrow(tensors["weight"], region.outputs, region.inputs).contiguous()
        if not scheme.is_symmetric:
            zeros = _cut_zeros(tensors["weight_zero_point"], scheme, shape, region)
            if zeros is None:
                return None
            cut["weight_zero_point"] = zeros
        return cut

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        scheme = self._scheme(layer)
        activations = _activations(scheme, tensors)
        if not scheme.is_float:
            return _read_integers(scheme, tensors, activations)
        weight = tensors["weight"]
        block = scheme.block((weight.shape[0], weight.shape[1]))
        counts = [-(-size // part) for size, part in zip(weight.shape, block, strict=True)]
        return Float8Weight(weight, tensors["weight_scale"].float().reshape(counts), block, activations)

    def _scheme(self, layer: str) -> Scheme:
        for target in self._targets:
            if target.matches(layer):
                return target.scheme
        raise BadTensors("weight", "is quantized, but config_groups has no target that matches it")


def _read_integers(scheme: Scheme, tensors: Mapping[str, Tensor], activations: ActivationScheme | None) -> LevelWeight:
    """Read integer levels. Stored levels are signed; the result counts from the lowest level."""
    lowest = 1 << (scheme.bits - 1)
    scales = tensors["weight_scale"]
    if "weight_packed" in tensors:
        outputs, inputs = (int(size) for size in tensors["weight_shape"])
        across = _packs_across(tensors["weight_packed"].shape[1], inputs, scheme.bits)
        if len(tensors["weight_packed"]) != outputs or across is None:
            raise BadTensors("weight_shape", f"is {outputs} x {inputs}, which the packed weight is not")
        levels = _unpack(tensors["weight_packed"], scheme.bits, inputs, across=across)
    else:
        outputs, across = len(tensors["weight"]), True
        levels = (tensors["weight"].to(torch.int16) + lowest).to(torch.uint8)
    scales = scales.reshape(-1, 1).expand(outputs, 1) if scheme.group is None else scales
    zeros = torch.full(scales.shape, lowest, dtype=torch.int16)
    if not scheme.is_symmetric:
        shape = (outputs, scales.shape[1])
        zeros = _read_zeros(tensors["weight_zero_point"], scheme.bits, shape, across=across)
    index = tensors.get("weight_g_idx")
    if index is not None and int(index.min()) < 0:
        index = None  # the tool's mark for groups in order
    if index is not None and (len(index) != levels.shape[1] or int(index.max()) >= scales.shape[1]):
        raise BadTensors("weight_g_idx", f"does not give each input one of {scales.shape[1]} groups")
    if 4 < scheme.bits < 8:  # so that level 128 means 0 in symmetric weights
        levels, zeros = levels + (128 - lowest), zeros + (128 - lowest)
    return Integers(levels, scales, zeros, scheme.bits, index, scheme.group).weight(activations)


def _packs_across(words: int, count: int, bits: int) -> bool | None:
    """Whether values cross word boundaries, as newer versions of the tool pack 3, 5, 6 and 7 bits; older versions pad
    each word. None: this number of words matches neither."""
    return next((across for across in (True, False) if words == words_of(count, bits, across=across)), None)


def _unpack(words: Tensor, bits: int, count: int, *, across: bool) -> Tensor:
    return unpack(words, bits, count) if across else unpack_whole(words, bits, count)


def _read_zeros(stored: Tensor, bits: int, shape: Shape, *, across: bool) -> Tensor:  # [outputs, groups]
    """Read zero points: packed along the outputs, or signed bytes."""
    if stored.dtype == torch.int8:
        if tuple(stored.shape) != shape:
            raise BadTensors("weight_zero_point", f"has shape {list(stored.shape)}, expected {list(shape)}")
        return stored.to(torch.int16) + (1 << (bits - 1))
    if tuple(stored.shape) != (words_of(shape[0], bits, across=across), shape[1]):
        raise BadTensors("weight_zero_point", f"has shape {list(stored.shape)}, not that of packed zero points")
    return _unpack(stored.t(), bits, shape[0], across=across).t().to(torch.int16)


def _cut_zeros(stored: Tensor, scheme: Scheme, shape: tuple[int, int], region: Region) -> Tensor | None:
    """Return the zero points of a region in the form that `_read_zeros` reads, or None if it cuts a word or a group."""
    groups = range(1) if scheme.group is None else blocks_of(region.inputs, shape[1], scheme.group)
    rows: range | None = region.outputs
    if stored.dtype != torch.int8:
        rows = words_of_region(region.outputs, shape[0], scheme.bits)
    return None if groups is None or rows is None else narrow(stored, rows, groups)


def _activations(scheme: Scheme, tensors: Mapping[str, Tensor]) -> ActivationScheme | None:
    if scheme.activations is None:
        return None
    given = scheme.activations
    scale = float(tensors["input_scale"].float()) if given.is_static else None
    return ActivationScheme("fp8" if given.is_float else "int8", scale, given.group)


def _priority(pattern: str) -> tuple[int, str]:
    """Sort key of targets. A layer takes the first that matches, in the order of the format's own tool: its name, then
    regular expressions alphabetically, then its class."""
    return (2 if pattern == _CLASS else 1 if pattern.startswith("re:") else 0), pattern


def _checked(config: Fields, path: str, target: str) -> str:
    """Return the target if it can match a layer: a class, a name, or a regular expression."""
    if target.startswith("re:"):
        try:
            re.compile(target[3:])
        except re.error as error:
            raise config.refuse(f"{path}.targets", f"{target!r} is no regular expression: {error}") from None
    elif target != _CLASS and "." not in target and target != "lm_head":
        raise config.refuse(f"{path}.targets", f"{target!r} is not supported", fix="supported: Linear, names, re:...")
    return target
