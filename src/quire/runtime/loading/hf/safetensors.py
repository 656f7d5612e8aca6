"""A strict reader of safetensors headers: validates the location of every tensor before reading it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quire.runtime.loading.hf.json_file import parse_json
from quire.runtime.loading.mapping import HeldFile, MappedFile
from quire.types.errors import ModelLoadError

if TYPE_CHECKING:
    from quire.runtime.loading.mapping import Bytes

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
ITEM_BYTES: dict[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor; `offset` counts from the start of the file. `content`: its bytes, if they were read
    with the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    content: bytes = b""


class TensorFile(Protocol):
    """Stored tensors by name, and their bytes."""

    name: str
    tensors: dict[str, StoredTensor]

    def raw(self, name: str) -> Bytes:
        """Return the stored bytes of a tensor."""

    def close(self) -> None: ...


class SafetensorsFile:
    """One safetensors file: the locations of its tensors. Raises ModelLoadError if anything is invalid."""

    def __init__(self, file: Path | HeldFile) -> None:
        """`file`: a path to map, or a file already read into memory."""
        self._file = file if isinstance(file, HeldFile) else MappedFile(file)
        self.name = self._file.name
        try:
            start = self._header_end()
            header = parse_json(bytes(self._file.data[8:start]), self.name, "its header")
            self._check_metadata(header.pop("__metadata__", {}))
            self.tensors = {name: self._place(name, entry, start) for name, entry in header.items()}
            self._check_layout(start)
        except ModelLoadError:
            self.close()
            raise

    def raw(self, name: str) -> Bytes:
        """Return the stored bytes of a tensor as a view, without a copy."""
        tensor = self.tensors[name]
        return self._file.bytes_at(tensor.offset, tensor.nbytes)

    def close(self) -> None:
        self._file.close()

    def _header_end(self) -> int:
        size = self._file.size
        if size < 8:
            raise ModelLoadError(self.name, f"has {size} bytes, too few for a header", fix="download it again")
        length = int.from_bytes(self._file.data[:8], "little")
        if length > MAX_HEADER_BYTES:
            reason = f"claims a header of {length} bytes, limit {MAX_HEADER_BYTES}"
            raise ModelLoadError(self.name, reason, fix="download it again")
        if 8 + length > size:
            raise ModelLoadError(self.name, f"ends at byte {size}, inside its header", fix="download it again")
        return 8 + length

    def _check_metadata(self, metadata: object) -> None:
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ModelLoadError(self.name, "must map names to strings", tensor="__metadata__")

    def _place(self, name: str, entry: object, start: int) -> StoredTensor:
        if not name.isprintable():
            raise ModelLoadError(self.name, f"{name[:80]!r} is no name of a tensor")
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ModelLoadError(self.name, "its entry must have dtype, shape and data_offsets", tensor=name)
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise ModelLoadError(self.name, f"has unknown dtype {dtype!r}", tensor=name)
        if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
            raise ModelLoadError(self.name, f"has an impossible shape {shape!r}", tensor=name)
        if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise ModelLoadError(self.name, f"has impossible data_offsets {offsets!r}", tensor=name)
        begin, end = offsets
        needed = math.prod(shape) * ITEM_BYTES[dtype]
        if end - begin != needed:
            raise ModelLoadError(
                self.name, f"shape {tuple(shape)} of {dtype} needs {needed} bytes, {end - begin} are given", tensor=name
            )
        return StoredTensor(name, dtype, tuple(shape), start + begin, needed)

    def _check_layout(self, start: int) -> None:
        """Check that tensors tile the data section exactly: no overlap, no gap, nothing missing, nothing left over."""
        expected, previous = start, "the header"
        for tensor in sorted(self.tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
            if tensor.offset != expected:
                wrong = "overlaps" if tensor.offset < expected else "leaves a gap after"
                raise ModelLoadError(self.name, f"{wrong} {previous}", tensor=tensor.name)
            expected, previous = tensor.offset + tensor.nbytes, tensor.name
        if expected > self._file.size:
            missing = expected - self._file.size
            raise ModelLoadError(
                self.name, f"is cut off: {missing} bytes are missing at the end of the file", fix="download it again"
            )
        if expected < self._file.size:
            raise ModelLoadError(self.name, f"has {self._file.size - expected} unexplained bytes after the last tensor")


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
