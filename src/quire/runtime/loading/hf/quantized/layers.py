"""Finds the quantized matrices among the tensors of a checkpoint's files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quire.config.level_bytes import integer_bytes, packed_bytes, table_bytes
from quire.config.model import ModelConfig
from quire.config.weight_counts import StoredLevels
from quire.runtime.loading.hf.directory import weight_files
from quire.runtime.loading.hf.names import part_names
from quire.runtime.loading.hf.quantized.method import BadTensors, Layout, Method
from quire.runtime.loading.hf.safetensors import SafetensorsFile, StoredTensor, TensorFile
from quire.runtime.models.build import count_copies
from quire.runtime.quantization.levels import GROUP
from quire.types.errors import ModelLoadError

_GPU_GROUPS = (16, 32)  # Triton gemms support groups of 16, and of multiples of 32
_CACHE_SCALE = re.compile(r"\.(?:k|v|kv)_(?:scale|zero_point)$|\.(?:k|v|qkv)_proj\.output_scale$")
_FIX = "the config and the weights do not fit together"


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A quantized matrix of a layer and the tensors that store it, by their suffix (`word`)."""

    layer: str  # name in the files
    tensors: Mapping[str, StoredTensor]
    file: str  # of the first tensor
    layout: Layout

    @property
    def shape(self) -> tuple[int, int]:
        return self.layout.outputs, self.layout.inputs

    def refuse(self, error: BadTensors) -> ModelLoadError:
        return ModelLoadError(self.file, error.reason, tensor=f"{self.layer}.{error.word}", fix=_FIX)


def find_quantized(owners: Mapping[str, TensorFile], method: Method) -> list[QuantizedLayer]:
    """Return all quantized matrices, checked. Raises ModelLoadError for tensors that do not form a matrix."""
    layers: dict[str, dict[str, StoredTensor]] = {}
    for name, owner in owners.items():
        layer, word = method.split(name)
        if word in method.words:
            stored = owner.tensors[name]
            noted = replace(stored, content=owner.raw(name).tobytes()) if word in method.noted_words else stored
            layers.setdefault(layer, {})[word] = noted
    found = []
    for layer, tensors in layers.items():
        if not method.is_quantized(tensors):
            continue
        file = owners[next(iter(tensors.values())).name].name
        try:
            found.append(QuantizedLayer(layer, tensors, file, method.layout(layer, tensors)))
        except BadTensors as error:
            raise ModelLoadError(file, error.reason, tensor=f"{layer}.{error.word}", fix=_FIX) from None
    return found


def find_cache_scales(names: Iterable[str]) -> set[str]:
    """Return the tensors that are scales of the KV cache, not of matrices."""
    return {name for name in names if _CACHE_SCALE.search(name)}


def count_stored(directory: Path, method: Method, config: ModelConfig) -> StoredLevels:
    """Count the quantized weights of a checkpoint, as often as the layers hold them; zero if there are no files. Reads
    only the files' headers."""
    owners: dict[str, SafetensorsFile] = {}
    try:
        for path in weight_files(directory)[0]:
            file = SafetensorsFile(path)
            owners |= dict.fromkeys(file.tensors, file)
        layers = find_quantized(owners, method)
    except ModelLoadError:
        return StoredLevels(has_table=False)  # reading the weights raises the error
    finally:
        for file in owners.values():
            file.close()
    names, copies = part_names(config, owners), count_copies(config)
    parts = [(names.of(f"{layer.layer}.weight"), layer.layout) for layer in layers]
    layouts = [(name, one) for name, one in parts if name is not None for _ in range(copies.get(name, 0))]
    by_groups = [one for _, one in layouts if one.bits and one.inputs % GROUP == 0 and _is_held_by_cpu(one)]
    on_cpu = [(one.outputs * one.inputs, one.bits <= 4 and one.inputs >= GROUP * one.groups) for one in by_groups]
    on_gpu = [one for name, one in layouts if _is_held_by_gpu(one) and ".experts." not in name]
    parameters = sum(size for size, _ in on_cpu)
    return StoredLevels(
        parameters=parameters,
        num_bytes=sum(packed_bytes(size, nibbles=few) for size, few in on_cpu),
        integer_bytes=sum(map(_integer_bytes, by_groups)),
        gpu_parameters=sum(one.outputs * one.inputs for one in on_gpu),
        gpu_bytes=sum(map(_gpu_bytes, on_gpu)),
        gpu_is_float8=any(one.bits == 0 for one in on_gpu),
        has_table=False,
        expanded=sum(one.outputs * one.inputs for _, one in layouts) - parameters,
    )


def _is_held_by_cpu(layout: Layout) -> bool:
    """Whether the group size is a multiple or a divisor of 32 (smaller groups are held in 8 bits)."""
    size, rest = divmod(layout.inputs, layout.groups)
    return rest == 0 and (size % GROUP == 0 or GROUP % size == 0)


def _integer_bytes(layout: Layout) -> int:
    """Return the bytes for integer gemms. Groups smaller than 16 become groups of 32 in 8 bits."""
    weights, size, has_offsets = layout.outputs * layout.inputs, layout.inputs // layout.groups, layout.has_offsets
    if layout.has_table and size >= GROUP:
        return table_bytes(weights, layout.outputs)
    is_small, bits = size < GROUP // 2, max(layout.bits, 4)
    if is_small or (has_offsets and bits > 4):
        bits = 8
    least = 0 if has_offsets and bits == 4 else -(1 << (bits - 1))
    group = GROUP if is_small else size
    return integer_bytes(weights, least, least + (1 << bits) - 1, has_offsets=has_offsets, group=group)


def _is_held_by_gpu(layout: Layout) -> bool:
    size, rest = divmod(layout.inputs, layout.groups)
    return rest == 0 and ((size == _GPU_GROUPS[0] and layout.bits > 0) or size % _GPU_GROUPS[1] == 0)


def _gpu_bytes(layout: Layout) -> int:
    """Return the bytes on a GPU: a float16 scale and offset per group, or a float32 scale. 4-bit weights in groups of
    16 are held in bytes."""
    weights = layout.outputs * layout.inputs
    has_nibbles = 0 < layout.bits <= 4 and layout.inputs // layout.groups % _GPU_GROUPS[1] == 0
    return (weights // 2 if has_nibbles else weights) + 4 * layout.outputs * layout.groups
