"""Computes layer tensors whose stored layout in GGUF files differs from Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.config.model import ModelConfig
from quire.runtime.loading.gguf.levels import read_levels
from quire.runtime.loading.gguf.types import GgmlType
from quire.runtime.models.family import GgufFamily
from quire.runtime.models.gguf_layout import Rearranged, Shape
from quire.runtime.models.gguf_orders import Order
from quire.runtime.quantization.levels import LevelWeight
from quire.runtime.quantization.region import Region, blocks_of
from quire.types.errors import ModelLoadError

if TYPE_CHECKING:
    from quire.runtime.loading.mapping import Bytes


def find_rearranged(
    family: GgufFamily, config: ModelConfig, names: Collection[str], shape: Callable[[str], Shape], file: str
) -> dict[str, Rearranged]:
    """Return the layer tensors that are stored in another layout. `names`: the stored tensors, translated by the
    family. Raises ModelLoadError if a part is missing or does not have the shape that the config implies."""
    found = {} if family.rearrange is None else family.rearrange(config, names)
    for tensor in found.values():
        for part, wanted in tensor.parts.items():
            if part not in names:
                raise ModelLoadError(
                    file, "is missing from the checkpoint", tensor=part, fix="download the model again"
                )
            if _without_ones(shape(part)) != _without_ones(wanted):
                raise ModelLoadError(file, f"has shape {shape(part)}, the config says {wanted}", tensor=part)
    return found


def layer_names(stored: Collection[str], rearranged: Mapping[str, Rearranged]) -> frozenset[str]:
    """Return the names of all layer tensors: those stored as they are and those in `rearranged`."""
    used = {part for tensor in rearranged.values() for part in tensor.parts}
    return frozenset({*stored} - used | rearranged.keys())


def make_tensor(tensor: Rearranged, values: Callable[[str], Tensor]) -> Tensor:
    """Compute a layer tensor. `values` returns the dequantized values of a stored tensor."""
    parts = [values(part).reshape(shape) for part, shape in tensor.parts.items()]
    if tensor.rows is not None:
        parts[0] = parts[0].index_select(0, torch.from_numpy(tensor.rows))
    if tensor.columns is not None:
        parts[0] = parts[0].index_select(1, torch.from_numpy(tensor.columns))
    made = parts[0] if tensor.restore is None else tensor.restore(*parts)
    return made.reshape(tensor.shape)


def make_levels(tensor: Rearranged, raw: Bytes, kind: GgmlType, region: Region | None) -> LevelWeight | None:
    """Return the matrix of a single stored part, still quantized: only `region` if it covers whole blocks in stored
    order, otherwise all of it. None if `read_levels` cannot read it."""
    stored, inputs = tensor.parts[tensor.first][0], tensor.shape[-1]
    blocks = None if region is None else blocks_of(region.inputs, inputs, kind.block_values)
    by_blocks = raw.reshape(stored, -1, kind.block_bytes)
    rows = np.arange(stored) if tensor.rows is None else tensor.rows
    if region is None or blocks is None or tensor.columns is not None:
        found = read_levels(torch.from_numpy(by_blocks[rows].reshape(-1)), kind, tensor.shape)
    else:
        own = by_blocks[rows[region.outputs.start : region.outputs.stop], blocks.start : blocks.stop]
        found = read_levels(torch.from_numpy(own.reshape(-1)), kind, region.shape)
    return found if found is None or tensor.columns is None else reorder_columns(found, tensor.columns)


def reorder_columns(weight: LevelWeight, columns: Order) -> LevelWeight:
    """Reorder the columns of a weight. If whole groups stay together, their scales move too; otherwise the gemm
    permutes its inputs."""
    order = torch.from_numpy(columns)
    groups = order.view(-1, weight.group)
    if bool((groups == groups[:, :1] + torch.arange(weight.group)).all() and (groups[:, 0] % weight.group == 0).all()):
        chosen = groups[:, 0] // weight.group
        scales, offsets = weight.scales.index_select(1, chosen), weight.offsets.index_select(1, chosen)
        return replace(weight, levels=weight.levels.index_select(1, order), scales=scales, offsets=offsets)
    return replace(weight, columns=torch.argsort(order))


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def row_order(family: GgufFamily, config: ModelConfig, name: str) -> Order | None:
    """Return the stored row index of each row of a tensor, or None if the stored order is right."""
    heads = config.heads
    if family.ungrouped is not None and f".{family.ungrouped}." in name:
        return _groups(heads.num_query, heads.num_kv, heads.dim)
    if family.has_pairs and ".self_attn.q_proj." in name:
        return _halves(heads.num_query, heads.dim)
    return _halves(heads.num_kv, heads.dim) if family.has_pairs and ".self_attn.k_proj." in name else None


def _halves(num_heads: int, dim: int) -> Order:
    """Reorder each head's rows from interleaved pairs to halves."""
    return np.arange(num_heads * dim).reshape(num_heads, dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _groups(num_query: int, num_kv: int, dim: int) -> Order:
    """Reorder rows from all queries, all keys, all values to groups of queries, one key and one value."""
    ends = num_query * dim, (num_query + num_kv) * dim
    parts = np.split(np.arange((num_query + 2 * num_kv) * dim), ends)
    return np.concatenate([part.reshape(num_kv, -1) for part in parts], axis=1).reshape(-1)
