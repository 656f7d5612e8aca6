"""A strict reader of GGUF headers: validates every count, length, offset and size before using it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.runtime.loading.gguf.cursor import Cursor
from quire.runtime.loading.gguf.types import GGML_TYPES, REFUSED_TYPES, GgmlType
from quire.runtime.loading.mapping import MappedFile
from quire.types.errors import ModelLoadError

if TYPE_CHECKING:
    from quire.runtime.loading.mapping import Bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_KEYS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_TENSORS = 1 << 18
MAX_NAME_BYTES = 256
MAX_DIMENSIONS = 4
SMALLEST_KEY = 8 + 1 + 4 + 1  # length, one character, type, one byte of value
SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # length, one character, rank, one dimension, type, offset


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The location of a tensor. `shape` is outermost first, as in torch; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GgmlType
    offset: int
    nbytes: int


class GgufFile:
    """One GGUF file: its metadata and the locations of its tensors. Raises ModelLoadError if anything is invalid.

    Metadata values are str, int, float, bool, a list of int, float or bool, or Texts. The file stays mapped until
    `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self._file = MappedFile(path)
        try:
            cursor = Cursor(self._file)
            num_tensors, num_keys = self._read_counts(cursor)
            self.metadata = self._read_metadata(cursor, num_keys)
            self.alignment = self._read_alignment()
            self.tensors = self._read_tensors(cursor, num_tensors)
            self._check_layout(_align(cursor.at, self.alignment))
        except ModelLoadError:
            self.close()
            raise

    def raw(self, name: str) -> Bytes:
        """Return the stored bytes of a tensor as a view of the mapping, without a copy."""
        tensor = self.tensors[name]
        return self._file.bytes_at(tensor.offset, tensor.nbytes)

    def forget(self, name: str) -> None:
        """Drop the pages of a tensor from memory. They are read again on the next access."""
        tensor = self.tensors[name]
        self._file.forget(tensor.offset, tensor.nbytes)

    def close(self) -> None:
        self._file.close()

    def _read_counts(self, cursor: Cursor) -> tuple[int, int]:
        magic = cursor.take(4, "magic")
        if magic != MAGIC:
            raise ModelLoadError(self.name, f"is not a GGUF file (starts with {magic!r})", fix="check the path")
        version = cursor.u32("version")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise ModelLoadError(self.name, "is a big-endian GGUF file", fix="convert the model as little-endian")
            raise ModelLoadError(self.name, f"has GGUF version {version}; 2 and 3 are read", fix="convert it again")
        num_tensors, num_keys = cursor.u64("tensor count"), cursor.u64("metadata count")
        for what, count, limit, smallest in (
            ("tensors", num_tensors, MAX_TENSORS, SMALLEST_TENSOR),
            ("metadata keys", num_keys, MAX_KEYS, SMALLEST_KEY),
        ):
            if count > limit or count * smallest > cursor.left:
                raise ModelLoadError(
                    self.name, f"claims {count} {what}, more than it can hold", fix="download it again"
                )
        return num_tensors, num_keys

    def _read_metadata(self, cursor: Cursor, count: int) -> dict[str, object]:
        metadata: dict[str, object] = {}
        for index in range(count):
            key = cursor.name(f"metadata key {index}", MAX_KEY_BYTES)
            if key in metadata:
                raise ModelLoadError(self.name, "appears twice in the metadata", tensor=key)
            metadata[key] = cursor.value(key)
        return metadata

    def _read_alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise ModelLoadError(
                self.name, f"must be a power of two in [8, {MAX_ALIGNMENT}], is {value!r}", tensor="general.alignment"
            )
        return value

    def _read_tensors(self, cursor: Cursor, count: int) -> dict[str, GgufTensor]:
        places: list[tuple[str, tuple[int, ...], GgmlType, int, int]] = []
        for index in range(count):
            name = cursor.name(f"name of tensor {index}", MAX_NAME_BYTES)
            shape = self._read_shape(cursor, name)
            kind = self._read_type(cursor, name)
            nbytes = self._count_bytes(name, shape, kind)
            places.append((name, shape, kind, cursor.u64(f"offset of {name}"), nbytes))
        start = _align(cursor.at, self.alignment)
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset, nbytes in places:
            if name in tensors:
                raise ModelLoadError(self.name, "appears twice", tensor=name)
            tensors[name] = GgufTensor(name, shape, kind, start + offset, nbytes)
        return tensors

    def _read_shape(self, cursor: Cursor, name: str) -> tuple[int, ...]:
        rank = cursor.u32(f"rank of {name}")
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise ModelLoadError(self.name, f"has {rank} dimensions, 1 to {MAX_DIMENSIONS} are possible", tensor=name)
        dimensions = tuple(cursor.u64(f"shape of {name}") for _ in range(rank))
        if 0 in dimensions:
            raise ModelLoadError(self.name, f"has an empty dimension: {dimensions[::-1]}", tensor=name)
        return dimensions[::-1]

    def _read_type(self, cursor: Cursor, name: str) -> GgmlType:
        number = cursor.u32(f"type of {name}")
        kind = GGML_TYPES.get(number)
        if kind is None:
            known = REFUSED_TYPES.get(number)
            what = (
                f"has ggml type {known} ({number}), which is not supported"
                if known
                else f"has unknown ggml type {number}"
            )
            raise ModelLoadError(self.name, what, tensor=name, fix="quantize the model to another type, such as Q8_0")
        return kind

    def _count_bytes(self, name: str, shape: tuple[int, ...], kind: GgmlType) -> int:
        if shape[-1] % kind.block_values:
            raise ModelLoadError(
                self.name,
                f"rows of {shape[-1]} values are not whole {kind.name} blocks of {kind.block_values}",
                tensor=name,
            )
        count = 1
        for size in shape:
            count *= size
        nbytes = count // kind.block_values * kind.block_bytes
        if nbytes > self._file.size:
            raise ModelLoadError(
                self.name,
                f"shape {shape} of {kind.name} needs {nbytes} bytes, the file has {self._file.size}",
                tensor=name,
            )
        return nbytes

    def _check_layout(self, start: int) -> None:
        """Check that tensors tile the data section in some order: aligned, no overlap, no gap, only zeros after the
        last."""
        expected, previous, size = start, "the header", self._file.size
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.offset):
            name, offset, end = tensor.name, tensor.offset, tensor.offset + tensor.nbytes
            if (offset - start) % self.alignment:
                raise ModelLoadError(
                    self.name, f"offset {offset - start} is not a multiple of {self.alignment}", tensor=name
                )
            if end > size:
                missing = f"is cut off: {end - size} bytes are missing at the end of the file"
                raise ModelLoadError(self.name, missing, tensor=name, fix="download it again")
            if offset < expected:
                raise ModelLoadError(self.name, f"overlaps {previous}", tensor=name)
            if offset > expected:
                gap = f"leaves {offset - expected} unexplained bytes after {previous}"
                raise ModelLoadError(self.name, gap, tensor=name)
            expected, previous = _align(end, self.alignment), name
        if expected < size and self._file.bytes_at(expected, size - expected).any():
            raise ModelLoadError(self.name, f"has {size - expected} unexplained bytes after {previous}")


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
