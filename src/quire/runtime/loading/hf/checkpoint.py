"""The weights of a Hugging Face directory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire.config.model import ModelConfig
from quire.runtime.loading.expected import check_tensors
from quire.runtime.loading.hf.config import hf_model_config
from quire.runtime.loading.hf.directory import INDEX, weight_files
from quire.runtime.loading.hf.safetensors import SafetensorsFile
from quire.runtime.loading.values import refuse_blank, refuse_non_finite
from quire.runtime.models.registry import find_family
from quire.runtime.quantization.levels import LevelWeight
from quire.types.errors import ModelLoadError

WEIGHT_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}


STACKED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}  # of experts: [experts, rows, columns]


class Piece(NamedTuple):
    """A tensor as the layers know it: a stored one, or a part of it."""

    stored: str
    expert: int | None = None  # None: all of it
    half: int | None = None  # of the rows of an expert; None: both


class HfCheckpoint:
    """Reads one tensor at a time, as stored (float64 as float32): a view of its file that outlives `close`.

    Tensors have the names that the family's layers give them.
    """

    def __init__(self, directory: Path) -> None:
        self.file = str(directory)
        self.config: ModelConfig = hf_model_config(directory)
        self._files: list[SafetensorsFile] = []
        try:
            self._owners, self._pieces = self._name(self._open(directory))
            self.names = frozenset(self._owners)
            check_tensors(self.config, self.names, shape=self.shape, source=self.source, file=self.file)
        except ModelLoadError:
            self.close()
            raise

    def shape(self, name: str) -> tuple[int, ...]:
        stored, expert, half = self._pieces[name]
        shape = self._owners[name].tensors[stored].shape[0 if expert is None else 1 :]
        return shape if half is None else (shape[0] // 2, *shape[1:])

    def source(self, name: str) -> str:
        return self._owners[name].name

    def read_levels(self, name: str) -> LevelWeight | None:  # noqa: ARG002
        return None  # safetensors hold numbers

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU. Raises ModelLoadError when its numbers are damaged beyond doubt."""
        owner, piece = self._owners[name], self._pieces[name]
        tensor, raw = owner.tensors[piece.stored], owner.raw(piece.stored)
        dtype = WEIGHT_DTYPES.get(tensor.dtype)
        if dtype is None:
            raise ModelLoadError(
                owner.name, f"has dtype {tensor.dtype}", tensor=name, fix=f"weights may be {', '.join(WEIGHT_DTYPES)}"
            )
        shape = self.shape(name)
        if piece.expert is not None:
            count = math.prod(shape) * dtype.itemsize
            begin = (piece.expert * (1 if piece.half is None else 2) + (piece.half or 0)) * count
            raw = raw[begin : begin + count]
        refuse_blank(raw, len(shape), owner.name, name)
        if tensor.offset % dtype.itemsize:
            raw = raw.copy()  # torch wants numbers at multiples of their size
        values = torch.from_numpy(raw).view(dtype).view(shape)
        refuse_non_finite(values, owner.name, name)
        return values.float() if dtype == torch.float64 else values

    def close(self) -> None:
        """Unmap the files. Idempotent."""
        for file in self._files:
            file.close()

    def _name(self, owners: dict[str, SafetensorsFile]) -> tuple[dict[str, SafetensorsFile], dict[str, Piece]]:
        """By the layers' names: the tensors' files, and what they are there."""
        rename = find_family(self.config.architecture).rename
        pieces: dict[str, Piece] = {}
        for name, file in owners.items():
            known = rename(name)
            for part, piece in () if known is None else _pieces(known, name, file.tensors[name].shape):
                if part in pieces:
                    raise ModelLoadError(file.name, f"is the same tensor as {pieces[part].stored}", tensor=name)
                pieces[part] = piece
        return {known: owners[piece.stored] for known, piece in pieces.items()}, pieces

    def _open(self, directory: Path) -> dict[str, SafetensorsFile]:
        paths, index = weight_files(directory)
        owners: dict[str, SafetensorsFile] = {}
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


def _pieces(name: str, stored: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Piece]]:
    """The layers' tensors that a stored one holds: some checkpoints have one for all experts of a layer."""
    path, _, last = name.rpartition(".")
    names = STACKED.get(last, ()) if path.endswith(".experts") and len(shape) == 3 else ()
    if not names or (len(names) == 2 and shape[1] % 2):
        yield name, Piece(stored)
        return
    for expert in range(shape[0]):
        for half, part in enumerate(names):
            yield f"{path}.{expert}.{part}.weight", Piece(stored, expert, half if len(names) == 2 else None)
