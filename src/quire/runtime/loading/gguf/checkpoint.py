"""Reads the weights of a GGUF model under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.config.model import ModelConfig
from quire.runtime.loading.expected import check_tensors
from quire.runtime.loading.gguf.config import draft_blocks, gguf_family, gguf_model_config
from quire.runtime.loading.gguf.dequantize import dequantize
from quire.runtime.loading.gguf.levels import read_levels
from quire.runtime.loading.gguf.names import EXPERT, NO_WEIGHTS, canonical_name
from quire.runtime.loading.gguf.reader import GgufTensor
from quire.runtime.loading.gguf.rearranged import find_rearranged, layer_names, make_levels, make_tensor, row_order
from quire.runtime.loading.gguf.shards import GgufModel
from quire.runtime.loading.gguf.types import LEVEL_FORMS
from quire.runtime.loading.pieces import Piece
from quire.runtime.loading.values import UsedPart, refuse_blank, refuse_non_finite, whole_tensor
from quire.runtime.models.family import Stacked, is_unread
from quire.runtime.models.gguf_layout import Rearranged
from quire.runtime.models.registry import find_family
from quire.runtime.quantization.levels import LevelWeight
from quire.runtime.quantization.region import Region, blocks_of
from quire.types.errors import ModelLoadError

if TYPE_CHECKING:
    from quire.runtime.loading.mapping import Bytes

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class GgufCheckpoint:
    """Reads one tensor at a time: quantized types as float32, others in the stored dtype, rows in the layers' order.

    A tensor read in its stored dtype is a view of the file and stays valid after `close`.
    """

    def __init__(self, path: Path) -> None:
        self._model = GgufModel(path)
        try:
            self.file = self._model.name
            self.config: ModelConfig = gguf_model_config(self._model)
            self._family = gguf_family(self.config.architecture)
            self._pieces = self._find_pieces()
            self._rearranged = find_rearranged(
                self._family, self.config, self._pieces.keys(), self._stored_shape, self.file
            )
            self.names = layer_names(self._pieces, self._rearranged)
            check_tensors(self.config, self.names, shape=self.shape, source=self.source, file=self.file)
        except ModelLoadError:
            self.close()
            raise

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that Hugging Face's checkpoints have."""
        if name in self._rearranged:
            return self._rearranged[name].shape
        shape = self._stored_shape(name)
        return shape[::-1] if self._is_transposed(name) else shape

    def source(self, name: str) -> str:
        return self._model.owners[self._pieces[self._first(name)].tensor].name

    def read(self, name: str, own: UsedPart = whole_tensor) -> Tensor:
        """Return the tensor on the CPU. Raises ModelLoadError if its `own` part contains NaN or infinity, or is
        blank."""
        made = self._rearranged.get(name)
        values = self._values(name) if made is None else make_tensor(made, self._values)
        if made is None and self._is_transposed(name):
            values = values.t()
        refuse_non_finite(own(values), self.source(name), self._pieces[self._first(name)].tensor)
        offset = self._family.norm_offset
        return values.float() - offset if offset and name.endswith("norm.weight") else values

    def read_quantized(self, name: str, region: Region | None = None) -> LevelWeight | None:
        if name in self._rearranged:
            return self._read_rearranged(self._rearranged[name], region)
        kind, shape = self._tensor(name).ggml_type, self.shape(name)
        if self._is_transposed(name):  # blocks run along the inputs
            return None
        blocks = None if region is None else blocks_of(region.inputs, shape[1], kind.block_values)
        if region is None or blocks is None:
            found = read_levels(torch.from_numpy(self._raw(name)), kind, shape)
        else:
            found = read_levels(torch.from_numpy(self._raw(name, (region.outputs, blocks))), kind, region.shape)
        piece = self._pieces[name]
        if found is not None and piece.expert is None:  # levels are copies, and the file is not read again
            self._model.owners[piece.tensor].forget(piece.tensor)
        return found

    def close(self) -> None:
        """Unmap the files. Idempotent."""
        self._model.close()

    def _read_rearranged(self, made: Rearranged, region: Region | None) -> LevelWeight | None:
        kind = self._tensor(made.first).ggml_type
        if made.restore is not None or kind.name not in LEVEL_FORMS:
            return None
        return make_levels(made, self._raw(made.first), kind, region)

    def _first(self, name: str) -> str:
        """Return the name of the first stored tensor that a tensor is made of."""
        return self._rearranged[name].first if name in self._rearranged else name

    def _is_transposed(self, name: str) -> bool:
        """Whether Hugging Face's checkpoints store this matrix transposed."""
        return self._family.transposed and name.startswith(self._family.blocks) and len(self._stored_shape(name)) == 2

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        return self._pieces[name].shape(self._tensor(name).shape)

    def _values(self, name: str) -> Tensor:
        """Return the dequantized values of a stored tensor."""
        kind = self._tensor(name).ggml_type
        values = dequantize(torch.from_numpy(self._raw(name)), kind).view(self._stored_shape(name))
        if values.dtype == torch.float64:
            values = values.float()
        if values.dtype not in FLOATS:
            stored = self._pieces[name].tensor
            raise ModelLoadError(self.source(name), f"has type {kind.name}, not a weight's", tensor=stored)
        return values

    def _raw(self, name: str, own: tuple[range, range] | None = None) -> Bytes:
        """Return the stored bytes with rows in the layers' order. `own`: only these (rows, blocks of each row)."""
        piece, shape = self._pieces[name], self._stored_shape(name)
        raw = self._model.owners[piece.tensor].raw(piece.tensor)
        if piece.expert is not None:
            raw = raw.reshape(self._tensor(name).shape[0], piece.count, -1)[piece.expert, piece.number]
        refuse_blank(raw, len(shape), self.source(name), piece.tensor)
        order = row_order(self._family, self.config, name)
        if own is None:
            return raw if order is None else raw.reshape(shape[0], -1)[order].reshape(-1)
        (outputs, blocks), size = own, self._tensor(name).ggml_type.block_bytes
        chosen = slice(outputs.start, outputs.stop) if order is None else order[outputs.start : outputs.stop]
        rows = raw.reshape(shape[0], -1, size)[chosen]
        return rows[:, blocks.start : blocks.stop].reshape(-1)

    def _tensor(self, name: str) -> GgufTensor:
        stored = self._pieces[name].tensor
        return self._model.owners[stored].tensors[stored]

    def _find_pieces(self) -> dict[str, Piece]:
        """Return the location of each layer tensor, by its name."""
        found: dict[str, Piece] = {}
        family = find_family(self.config.architecture)
        drafts = draft_blocks(self._model)
        for name, owner in self._model.owners.items():
            if name.startswith(drafts):
                continue
            canonical = canonical_name(self._family, name)
            if canonical is not None and self._family.rename is not None:
                canonical = self._family.rename(self.config, canonical)
            if canonical is not None and is_unread(self.config, canonical):
                continue
            if canonical is not None and EXPERT in canonical:
                found |= self._pieces_of_experts(canonical, owner.tensors[name], owner.name, family.stacked)
            elif canonical is not None:
                found[canonical] = Piece(name)
            elif name not in NO_WEIGHTS:
                raise ModelLoadError(owner.name, f"has no place in a {self.config.architecture} model", tensor=name)
        return found

    def _pieces_of_experts(
        self, canonical: str, tensor: GgufTensor, file: str, stacked: Mapping[str, Stacked]
    ) -> dict[str, Piece]:
        """Return the pieces of a tensor that stacks all experts, possibly with several matrices per expert."""
        count = 0 if self.config.experts is None else self.config.experts.num
        if tensor.shape[0] != count:
            raise ModelLoadError(file, f"has shape {tensor.shape}, but there are {count} experts", tensor=tensor.name)
        path, _, word = canonical.removesuffix(".weight").rpartition(f".{EXPERT}.")
        parts = stacked[word].parts if word in stacked else (canonical.rpartition(f".{EXPERT}.")[2],)
        return {
            f"{path}.{expert}.{part}": Piece(tensor.name, expert, number=number, count=len(parts))
            for expert in range(count)
            for number, part in enumerate(parts)
        }
