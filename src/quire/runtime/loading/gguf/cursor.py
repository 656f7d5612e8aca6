"""Reads the values of a GGUF header in sequence, never past the end of the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from struct import Struct, calcsize
from struct import error as StructError
from typing import Literal, overload

from quire.runtime.loading.mapping import MappedFile
from quire.types.errors import ModelLoadError

MAX_STRING_BYTES = 1 << 26
BOOL, STRING, ARRAY = 7, 8, 9
# The types of numbers as formats of `struct`. Files are little-endian, and so is this machine (mapping.py).
NUMBERS: dict[int, Literal["B", "b", "H", "h", "I", "i", "f", "Q", "q", "d"]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip

_U32, _U64 = Struct("<I"), Struct("<Q")
_MAX_ENDS = 256
# Where arrays of strings end, by file, start and count: going through a vocabulary takes 20 ms, and a process that
# serves a model opens its file several times.
_ends: dict[tuple[tuple[int, int, int, int], int, int], int] = {}


class Texts(Sequence[str]):
    """An array of strings, decoded on first access, because most readers of a header need only its numbers. Access
    raises ModelLoadError if any string is not UTF-8."""

    def __init__(self, file: str, key: str, raw: bytes, count: int) -> None:
        self._file, self._key, self._raw, self._count = file, key, raw, count  # raw: each string after its length

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        return self._texts[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    @cached_property
    def _texts(self) -> list[str]:
        raw, at, unpack, texts = self._raw, 0, _U64.unpack_from, []
        try:
            for _ in range(self._count):
                start = at + 8
                at = start + unpack(raw, at)[0]
                texts.append(raw[start:at].decode())
        except UnicodeDecodeError:
            raise ModelLoadError(self._file, f"entry {len(texts)} is not UTF-8", tensor=self._key) from None
        return texts


class Cursor:
    """A read position in a mapped file. Every read advances it; a read past the end raises ModelLoadError."""

    def __init__(self, file: MappedFile) -> None:
        self._name, self._data, self._size, self._identity = file.name, file.data, file.size, file.identity
        self.at = 0

    @property
    def left(self) -> int:
        return self._size - self.at

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            raise self._cut_off(what)
        start, self.at = self.at, self.at + count
        return self._data[start : self.at]

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        length = self.u64(what)
        if length > limit:
            raise ModelLoadError(self._name, f"claims {length} characters, limit {limit}", tensor=what)
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise ModelLoadError(self._name, "is not UTF-8", tensor=what) from None

    def name(self, what: str, limit: int) -> str:
        text = self.string(what, limit)
        if not text or not text.isprintable():
            raise ModelLoadError(self._name, f"is {text[:80]!r}, which is not a valid name", tensor=what)
        return text

    def value(self, key: str) -> object:
        """Read a metadata value, which starts with its type."""
        kind = self.u32(key)
        if kind == ARRAY:
            return self._array(key)
        if kind == STRING:
            return self.string(key)
        return self._numbers(kind, 1, key)[0]

    def _array(self, key: str) -> list[object] | Texts:
        kind, count = self.u32(key), self.u64(key)
        if kind == STRING:
            return self._texts(count, key)
        return self._numbers(kind, count, key)

    def _numbers(self, kind: int, count: int, key: str) -> list[object]:
        code = NUMBERS.get(kind)
        if code is None:
            nested = "an array inside an array" if kind == ARRAY else f"a value of unknown type {kind}"
            raise ModelLoadError(self._name, f"holds {nested}", tensor=key)
        values = list[object](memoryview(self.take(count * calcsize(code), key)).cast(code).tolist())
        if kind != BOOL:
            return values
        if not set(values) <= {0, 1}:
            raise ModelLoadError(self._name, "has a boolean that is neither 0 nor 1", tensor=key)
        return [value != 0 for value in values]

    def _texts(self, count: int, key: str) -> Texts:
        if count * 8 > self.left:
            raise self._cut_off(key)
        begin, place = self.at, (self._identity, self.at, count)
        end = _ends.get(place)
        if end is None:
            end = self._end_of_texts(count, key)
            if len(_ends) >= _MAX_ENDS:
                _ends.clear()
            _ends[place] = end
        self.at = end
        return Texts(self._name, key, self._data[begin:end], count)

    def _end_of_texts(self, count: int, key: str) -> int:
        """Return where the next `count` strings end, by going from one length to the next."""
        data, at, size, unpack = self._data, self.at, self._size, _U64.unpack_from
        try:
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
                if at > size:
                    raise self._cut_off(key)
        except StructError:
            raise self._cut_off(key) from None
        return at

    def _cut_off(self, what: str) -> ModelLoadError:
        return ModelLoadError(
            self._name, f"the file ends at byte {self._size}, inside its header", tensor=what, fix="download it again"
        )
