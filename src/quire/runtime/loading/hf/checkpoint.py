"""Reads the weights of a Hugging Face directory."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quire.config.model import ModelConfig
from quire.runtime.loading.expected import check_tensors
from quire.runtime.loading.hf.config import hf_method, hf_model_config
from quire.runtime.loading.hf.directory import INDEX, weight_files
from quire.runtime.loading.hf.names import part_names
from quire.runtime.loading.hf.quantized.layers import QuantizedLayer, find_cache_scales, find_quantized
from quire.runtime.loading.hf.quantized.method import DTYPES, BadTensors
from quire.runtime.loading.hf.safetensors import SafetensorsFile, StoredTensor, TensorFile
from quire.runtime.loading.pieces import Piece, pieces_of
from quire.runtime.loading.values import UsedPart, refuse_blank, refuse_non_finite, whole_tensor
from quire.runtime.models.build import describe_weights
from quire.runtime.quantization.mxfp4 import GROUP, GROUP_BYTES, SCALES, Mxfp4Weight
from quire.runtime.quantization.region import Region
from quire.runtime.quantization.weight import StoredWeight
from quire.types.errors import ModelLoadError

logger = logging.getLogger("quire.runtime")

WEIGHT_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
BYTES = {"U8": torch.uint8}
INTEGERS = {"I64": torch.int64, "I32": torch.int32}


class HfCheckpoint:
    """Reads one tensor at a time in its stored dtype (float64 as float32), as a view of its file that stays valid after
    `close`. MXFP4 is read as float32.

    Tensors have the names of the family's layers; a stored tensor may contain several of them. `is_head`: read only the
    MTP head.
    """

    def __init__(self, directory: Path, given: TensorFile | None = None, *, is_head: bool = False) -> None:
        """`given`: read only its tensors, and only the config of the directory. They may be some of the model's, and
        have the names of transformers' modules."""
        self.file = str(directory) if given is None else given.name
        self.config: ModelConfig = hf_model_config(directory, is_head=is_head)
        self._method = hf_method(directory)
        self._files: list[TensorFile] = []
        self._is_partial = given is not None
        try:
            self._owners = self._open(directory) if given is None else self._take(given)
            self._names = part_names(self.config, self._owners, of_modules=self._is_partial)
            layers = self._find_layers()
            self._quantized = self._find_quantized(layers)
            taken = {stored.name for layer in layers for stored in layer.tensors.values()}
            self._pieces = self._find_pieces(taken | self._find_cache_scales())
            self._drop_zero_biases()
            self.names = frozenset(self._pieces) | frozenset(self._quantized)
            if not self._is_partial:
                check_tensors(self.config, self.names, shape=self.shape, source=self.source, file=self.file)
        except ModelLoadError:
            self.close()
            raise

    @property
    def stored_names(self) -> frozenset[str]:
        """The names of the tensors in the files."""
        return frozenset(self._owners)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._quantized:
            return self._quantized[name].shape
        piece = self._pieces[name]
        shape = self._stored(piece.tensor).shape
        return piece.shape(shape if piece.exponents is None else (*shape[:-2], shape[-2] * GROUP))

    def source(self, name: str) -> str:
        return self._quantized[name].file if name in self._quantized else self._owners[self._pieces[name].tensor].name

    def read_quantized(self, name: str, region: Region | None = None) -> StoredWeight | None:
        """Return a quantized matrix on the CPU, or a region of it; None if it is not quantized. Raises ModelLoadError
        if it is damaged."""
        if name not in self._quantized:
            return self._read_mxfp4(name)
        quantized = self._quantized[name]
        assert self._method is not None
        tensors = {
            word: self._read_whole(Piece(stored.name), DTYPES, may_be_zero=word in self._method.zero_words)
            for word, stored in quantized.tensors.items()
        }
        tensors |= {word: tensors[word].view(torch.uint8) for word in self._method.byte_words if word in tensors}
        if region is not None:
            tensors = dict(self._method.cut(quantized.layer, quantized.layout, tensors, region) or tensors)
        for word, tensor in tensors.items():
            if tensor.is_floating_point():
                refuse_non_finite(tensor.float(), quantized.file, f"{quantized.layer}.{word}")
        try:
            return self._method.read(quantized.layer, tensors)
        except BadTensors as error:
            raise quantized.refuse(error) from None

    def read(self, name: str, own: UsedPart = whole_tensor) -> Tensor:
        """Return the tensor on the CPU. Raises ModelLoadError if its `own` part contains NaN or infinity, or is
        blank."""
        if (quantized := self.read_quantized(name)) is not None:
            return quantized.values()
        dtypes = INTEGERS if name in self._names.family.integers else WEIGHT_DTYPES
        values = self._read_whole(self._pieces[name], dtypes)
        refuse_non_finite(own(values), self.source(name), name)
        return values.float() if values.dtype == torch.float64 else values

    def _read_mxfp4(self, name: str) -> Mxfp4Weight | None:
        piece = self._pieces[name]
        if piece.exponents is None:
            return None
        blocks, exponents = (self._read_whole(each, BYTES) for each in (piece, replace(piece, tensor=piece.exponents)))
        refuse_non_finite(SCALES[exponents.max().int()], self.source(name), name)
        return Mxfp4Weight(blocks, exponents)

    def close(self) -> None:
        """Unmap the files. Idempotent."""
        for file in self._files:
            file.close()

    def _read_whole(self, piece: Piece, dtypes: Mapping[str, torch.dtype], *, may_be_zero: bool = False) -> Tensor:
        """Return the piece in one of the allowed dtypes (keyed by safetensors' names). Refuses an all-zero matrix
        unless `may_be_zero`."""
        tensor, owner = self._stored(piece.tensor), self._owners[piece.tensor]
        dtype, raw, shape = dtypes.get(tensor.dtype), owner.raw(piece.tensor), tensor.shape
        if dtype is None:
            raise ModelLoadError(
                owner.name, f"has dtype {tensor.dtype}", tensor=piece.tensor, fix=f"weights may be {', '.join(dtypes)}"
            )
        if piece.expert is not None:
            shape = piece.by_expert(shape)
            raw, shape = raw.reshape(shape[0], -1)[piece.expert], shape[1:]
        if not may_be_zero:
            refuse_blank(raw, len(shape), owner.name, piece.tensor)
        if raw.ctypes.data % dtype.itemsize:
            raw = raw.copy()  # torch needs aligned memory
        values = torch.from_numpy(raw).view(dtype).view(shape)
        return values if piece.expert is None else piece.of_expert(values)

    def _find_layers(self) -> list[QuantizedLayer]:
        """Return the quantized matrices in the files, including those that the model does not read."""
        if self._method is None:
            return []
        layers = find_quantized(self._owners, self._method)
        if not layers and not self._is_partial:
            reason = f"is {self._method.name}, but no matrix of the files is stored in that format"
            raise ModelLoadError(self.file, reason, tensor="quantization_config", fix="remove it from config.json")
        return layers

    def _find_cache_scales(self) -> set[str]:
        """Return the tensors that scale quantized keys and values. Warns that they are ignored."""
        if self._method is None:
            return set()
        scales = find_cache_scales(self._owners)
        if scales or self._method.has_cache_scheme:
            logger.warning(
                "%s: the checkpoint's KV cache quantization (%d scales) is ignored: kv_cache_dtype decides, and "
                "each head of each token has a dynamic scale in place of a calibrated one, so that nothing is clipped",
                self.file,
                len(scales),
            )
        return scales

    def _find_quantized(self, layers: Iterable[QuantizedLayer]) -> dict[str, QuantizedLayer]:
        """Return the quantized matrices by the names of the layers' parts."""
        named = {self._names.of(f"{layer.layer}.weight"): layer for layer in layers}
        return {name: layer for name, layer in named.items() if name is not None}

    def _find_pieces(self, taken: Collection[str]) -> dict[str, Piece]:
        """Return the location of each unquantized layer tensor, by its name. `taken`: stored tensors that belong to
        quantized matrices or are ignored."""
        experts = self.config.experts
        count = 0 if experts is None else experts.num
        found: dict[str, Piece] = {}
        for stored, file in self._owners.items():
            name = None if stored in taken else self._names.of(stored)
            if name is None:
                continue
            for known, piece in pieces_of(name, stored, self._names.stacked, count):
                if known in found:
                    raise ModelLoadError(file.name, f"is the same tensor as {found[known].tensor}", tensor=stored)
                if piece.expert == 0:
                    self._check_stack(piece, count)
                if piece.either_way:
                    piece = piece.transposed_to(self._stored(stored).shape, describe_weights(self.config).get(known))
                found[known] = piece
        exponents = {piece.exponents for piece in found.values()}
        return {known: piece for known, piece in found.items() if piece.tensor not in exponents}

    def _drop_zero_biases(self) -> None:
        """Ignore all-zero biases of quantized matrices that the model does not have: some tools write them for every
        matrix. Refuse nonzero ones."""
        biases = [name for name in self._pieces if name.endswith(".bias") and _matrix_of(name) in self._quantized]
        known = describe_weights(self.config) if biases else {}
        for name in biases:
            if name in known:
                continue
            if self.read(name).any():
                reason = f"is not zero, and a {self.config.architecture} model of this config has no such bias"
                raise ModelLoadError(self.source(name), reason, tensor=self._pieces[name].tensor)
            del self._pieces[name]

    def _check_stack(self, piece: Piece, num_experts: int) -> None:
        """Refuse a tensor with another number of experts, or MXFP4 blocks without matching exponents."""
        shape, file = piece.by_expert(self._stored(piece.tensor).shape), self._owners[piece.tensor].name
        if not shape or shape[0] != num_experts:
            raise ModelLoadError(file, f"has shape {shape}, the config says {num_experts} experts", tensor=piece.tensor)
        if piece.exponents is None:
            return
        if piece.exponents not in self._owners:
            raise ModelLoadError(file, f"is there without {piece.exponents}", tensor=piece.tensor)
        if len(shape) != 4 or shape[-1] != GROUP_BYTES or self._stored(piece.exponents).shape != shape[:-1]:
            raise ModelLoadError(file, f"has shape {shape}, which is none of MXFP4 blocks", tensor=piece.tensor)

    def _stored(self, name: str) -> StoredTensor:
        return self._owners[name].tensors[name]

    def _take(self, given: TensorFile) -> dict[str, TensorFile]:
        self._files.append(given)
        return dict.fromkeys(given.tensors, given)

    def _open(self, directory: Path) -> dict[str, TensorFile]:
        paths, index = weight_files(directory)
        owners: dict[str, TensorFile] = {}
        for path in paths:
            file = SafetensorsFile(path)
            self._files.append(file)
            for name in file.tensors:
                if name in owners:
                    raise ModelLoadError(file.name, f"is also in {owners[name].name}", tensor=name)
                owners[name] = file
        for name, place in (index or {}).items():
            if name not in owners or Path(owners[name].name).name != place:
                raise ModelLoadError(str(directory / place), f"is not there, though {INDEX} says so", tensor=name)
        return owners


def _matrix_of(bias: str) -> str:
    return f"{bias.removesuffix('.bias')}.weight"
