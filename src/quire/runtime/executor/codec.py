"""Encodes the values that an engine and its ranks exchange (plans, results, configurations) as bytes, and decodes them.

The bytes hold data only, never code: numbers, strings, containers, arrays, and instances of the classes in one table.
Both sides must run the same version of Quire; they compare `FINGERPRINT` to check that.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from quire.config.embedding import EmbeddingSettings, EncoderConfig
from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.runtime.loading.files import ModelFiles
from quire.types.adapters import AdapterInfo
from quire.types.step import StepPlan, StepResult
from quire.types.transfer import TransferReport

Buffer = bytes | bytearray | memoryview
_ENCODER = (EncoderConfig, EmbeddingSettings)
_ROOTS = (StepPlan, StepResult, TransferReport, AdapterInfo, EngineConfig, ModelConfig, ModelFiles, *_ENCODER)
_LONG, _DOUBLE, _SIZE = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<I")
_ARRAY, _LINE = struct.Struct("<BB"), struct.Struct("<BBI")  # headers of arrays: dtype, dimensions, length if one
_SMALL = 128  # integers from 0 to _SMALL - 1 are encoded in one byte
_TAGS = range(_SMALL, _SMALL + 16)
_NONE, _TRUE, _FALSE, _INT, _BIG, _FLOAT, _TEXT, _BYTES = _TAGS[:8]
_TUPLE, _LIST, _DICT, _SET, _ARRAY_TAG, _OBJECT, _ENUM, _PATH = _TAGS[8:]
_DTYPES = tuple(
    np.dtype(name) for name in ("int32", "uint8", "uint16", "int64", "uint32", "float32", "float64", "bool")
)
_largest = np.maximum.reduce  # faster than the method max
_INT32, _DTYPE_CODES = _DTYPES[0], {dtype: code for code, dtype in enumerate(_DTYPES)}
NARROW_FROM = 64  # elements: narrowing shorter arrays costs more time than it saves
_NARROW = 0x80  # flag of an int32 array whose elements are stored in fewer bytes


def encode(value: object) -> bytes:
    """Encode a value. Raises TypeError if its type is not supported."""
    out = bytearray()
    put(out, value)
    return bytes(out)


def decode(data: Buffer) -> Any:
    """Decode a value. Arrays in it are writable copies."""
    value, end = take(memoryview(data), 0)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes follow the value")
    return value


def put(out: bytearray, value: object) -> None:
    """Append an encoded value."""
    writer = _WRITERS.get(type(value))
    if writer is None:
        writer = _writer_of(value)
    writer(out, value)


def take(data: memoryview, at: int) -> tuple[Any, int]:
    """Decode the value that begins at `at`. Returns it and the offset behind it."""
    tag = data[at]
    return (tag, at + 1) if tag < _SMALL else _READERS[tag](data, at + 1)


# ---------------------------------------------------------------------------------------------------------- writing
def put_array(out: bytearray, array: np.ndarray[Any, Any]) -> None:
    """Append an encoded array. Elements of an int32 array are stored in one or two bytes each if all of them fit."""
    code = 0 if array.dtype is _INT32 else _DTYPE_CODES.get(array.dtype)
    if code is None:
        raise TypeError(f"an array of {array.dtype} cannot be sent in a message")
    if code == 0 and array.size >= NARROW_FROM:
        width, raw = narrow(array)
        code = _NARROW | width if width else 0
    else:
        raw = array.tobytes()
    if array.ndim == 1:
        out += _LINE.pack(code, 1, len(array))
    else:
        out += _ARRAY.pack(code, array.ndim)
        for length in array.shape:
            out += _SIZE.pack(length)
    out += raw


def narrow(array: np.ndarray[Any, Any]) -> tuple[int, bytes]:
    """Store the elements of an int32 array in as few bytes each as all fit into. Returns the width (1 or 2; 0: four
    bytes) and the bytes. Raises TypeError for other dtypes."""
    if array.dtype != _INT32:
        raise TypeError(f"an int32 array is required, not {array.dtype}")
    largest = _largest(array.view(np.uint32), None)  # negative values become large ones
    width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 0
    return width, array.astype(_DTYPES[width]).tobytes() if width else array.tobytes()


def _put_tagged_array(out: bytearray, value: Any) -> None:
    out.append(_ARRAY_TAG)
    put_array(out, value)


def _put_int(out: bytearray, value: Any) -> None:
    if 0 <= value < _SMALL:
        out.append(value)
    elif -(1 << 63) <= value < 1 << 63:
        out.append(_INT)
        out += _LONG.pack(value)
    else:
        raw = int(value).to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out.append(_BIG)
        _put_raw(out, raw)


def _put_raw(out: bytearray, raw: bytes) -> None:
    out += _SIZE.pack(len(raw))
    out += raw


def _put_float(out: bytearray, value: Any) -> None:
    out.append(_FLOAT)
    out += _DOUBLE.pack(value)


def _put_text(out: bytearray, value: Any) -> None:
    out.append(_TEXT)
    _put_raw(out, value.encode("utf-8", "surrogatepass"))


def _put_bytes(out: bytearray, value: Any) -> None:
    out.append(_BYTES)
    _put_raw(out, bytes(value))


def _put_path(out: bytearray, value: Any) -> None:
    out.append(_PATH)
    _put_raw(out, str(value).encode("utf-8", "surrogateescape"))


def _put_members(tag: int) -> Callable[[bytearray, Any], None]:
    def write(out: bytearray, value: Any) -> None:
        out.append(tag)
        out += _SIZE.pack(len(value))
        for member in value:
            put(out, member)

    return write


def _put_mapping(out: bytearray, value: Any) -> None:
    out.append(_DICT)
    out += _SIZE.pack(len(value))
    for key, member in value.items():
        put(out, key)
        put(out, member)


def _writer_of(value: object) -> Callable[[bytearray, Any], None]:
    if isinstance(value, np.integer):
        return lambda out, number: _put_int(out, int(number))
    if isinstance(value, np.floating):
        return lambda out, number: _put_float(out, float(number))
    if isinstance(value, Path):
        return _put_path
    if isinstance(value, Mapping):
        return _put_mapping
    raise TypeError(f"a {type(value).__name__} cannot be sent in a message")


# ---------------------------------------------------------------------------------------------------------- reading
def take_array(data: memoryview, at: int) -> tuple[np.ndarray[Any, Any], int]:
    code, num_dimensions = _ARRAY.unpack_from(data, at)
    at += _ARRAY.size
    if num_dimensions == 1:
        (count,) = _SIZE.unpack_from(data, at)
        dtype, at = _DTYPES[code & ~_NARROW], at + _SIZE.size
        found = np.frombuffer(data, dtype, count, at)
        return found.astype(np.int32 if code & _NARROW else dtype), at + count * dtype.itemsize
    shape = struct.unpack_from(f"<{num_dimensions}I", data, at)
    at += _SIZE.size * num_dimensions
    dtype, count = _DTYPES[code & ~_NARROW], prod(shape)
    found = np.frombuffer(data, dtype, count, at).reshape(shape)
    return found.astype(np.int32 if code & _NARROW else dtype), at + count * dtype.itemsize


def _take_raw(data: memoryview, at: int) -> tuple[memoryview, int]:
    (length,) = _SIZE.unpack_from(data, at)
    begin = at + _SIZE.size
    if begin + length > len(data):
        raise ValueError("the message is truncated")
    return data[begin : begin + length], begin + length


def _take_int(data: memoryview, at: int) -> tuple[int, int]:
    return _LONG.unpack_from(data, at)[0], at + _LONG.size


def _take_big(data: memoryview, at: int) -> tuple[int, int]:
    raw, at = _take_raw(data, at)
    return int.from_bytes(raw, "little", signed=True), at


def _take_float(data: memoryview, at: int) -> tuple[float, int]:
    return _DOUBLE.unpack_from(data, at)[0], at + _DOUBLE.size


def _take_text(data: memoryview, at: int) -> tuple[str, int]:
    raw, at = _take_raw(data, at)
    return str(raw, "utf-8", "surrogatepass"), at


def _take_bytes(data: memoryview, at: int) -> tuple[bytes, int]:
    raw, at = _take_raw(data, at)
    return bytes(raw), at


def _take_path(data: memoryview, at: int) -> tuple[Path, int]:
    raw, at = _take_raw(data, at)
    return Path(str(raw, "utf-8", "surrogateescape")), at


def _take_members(make: Callable[[list[Any]], Any]) -> Callable[[memoryview, int], tuple[Any, int]]:
    def read(data: memoryview, at: int) -> tuple[Any, int]:
        (count,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        members = []
        for _ in range(count):
            member, at = take(data, at)
            members.append(member)
        return make(members), at

    return read


def _take_mapping(data: memoryview, at: int) -> tuple[dict[Any, Any], int]:
    (count,) = _SIZE.unpack_from(data, at)
    at += _SIZE.size
    found = {}
    for _ in range(count):
        key, at = take(data, at)
        found[key], at = take(data, at)
    return found, at


# ---------------------------------------------------------------------------------------------------------- objects
def _walk(hint: Any, found: list[type]) -> None:
    """Add the record and enum classes that a type hint names, and recursively those of their fields."""
    if not isinstance(hint, type) or get_args(hint):
        for argument in get_args(hint):
            _walk(argument, found)
        return
    is_record = is_dataclass(hint) or (issubclass(hint, tuple) and hasattr(hint, "_fields"))
    if hint in found or not (is_record or issubclass(hint, Enum)):
        return
    found.append(hint)
    for member in get_type_hints(hint).values() if is_record else ():
        _walk(member, found)


def _find_classes() -> tuple[type, ...]:
    found: list[type] = []
    for root in _ROOTS:
        _walk(root, found)
    return tuple(found)


_CLASSES = _find_classes()
FINGERPRINT = blake2b(
    repr([(each.__name__, [*get_type_hints(each)]) for each in _CLASSES]).encode(), digest_size=8
).hexdigest()  # of the class table: both sides must have the same one


def _put_record(number: int, cls: Any) -> Callable[[bytearray, Any], None]:
    """Return the writer of a class. Dataclass fields that have their default value are skipped."""
    if issubclass(cls, tuple):

        def write_members(out: bytearray, value: Any) -> None:
            out.append(_OBJECT)
            out.append(number)
            for member in value:
                put(out, member)

        return write_members
    names = [(place, item.name, item.default) for place, item in enumerate(fields(cls))]

    def write_fields(out: bytearray, value: Any) -> None:
        out.append(_OBJECT)
        out.append(number)
        begin, count = len(out), 0
        out.append(0)
        for place, name, default in names:
            member = getattr(value, name)
            if member is default or (type(member) is type(default) and member == default):
                continue
            out.append(place)
            put(out, member)
            count += 1
        out[begin] = count

    return write_fields


def _take_object(data: memoryview, at: int) -> tuple[Any, int]:
    return _TAKERS[data[at]](data, at + 1)


def _take_record(cls: Any) -> Callable[[memoryview, int], tuple[Any, int]]:
    """Return the reader of a class. It skips `__init__` of dataclasses, since the sender has checked their values."""
    if issubclass(cls, tuple):
        width = len(cls._fields)

        def read_members(data: memoryview, at: int) -> tuple[Any, int]:
            members = []
            for _ in range(width):
                member, at = take(data, at)
                members.append(member)
            return cls._make(members), at

        return read_members
    items = fields(cls)

    def read_fields(data: memoryview, at: int) -> tuple[Any, int]:
        given, count = {}, data[at]
        at += 1
        for _ in range(count):
            place = data[at]
            given[place], at = take(data, at + 1)
        made = cls.__new__(cls)
        for place, item in enumerate(items):
            if place in given:
                member = given[place]
            elif item.default is not MISSING:
                member = item.default
            else:
                assert item.default_factory is not MISSING
                member = item.default_factory()
            object.__setattr__(made, item.name, member)
        return made, at

    return read_fields


def _put_enum(number: int) -> Callable[[bytearray, Any], None]:
    def write(out: bytearray, value: Any) -> None:
        out.append(_ENUM)
        out.append(number)
        put(out, value.value)

    return write


def _take_enum(data: memoryview, at: int) -> tuple[Any, int]:
    cls = _CLASSES[data[at]]
    value, at = take(data, at + 1)
    return cls(value), at


_WRITERS: dict[type, Callable[[bytearray, Any], None]] = {
    type(None): lambda out, _: out.append(_NONE),
    bool: lambda out, value: out.append(_TRUE if value else _FALSE),
    int: _put_int,
    float: _put_float,
    str: _put_text,
    bytes: _put_bytes,
    tuple: _put_members(_TUPLE),
    list: _put_members(_LIST),
    frozenset: _put_members(_SET),
    dict: _put_mapping,
    np.ndarray: _put_tagged_array,
    **{
        cls: _put_enum(number) if issubclass(cls, Enum) else _put_record(number, cls)
        for number, cls in enumerate(_CLASSES)
    },
}
_READERS: dict[int, Callable[[memoryview, int], tuple[Any, int]]] = {
    _NONE: lambda _, at: (None, at),
    _TRUE: lambda _, at: (True, at),
    _FALSE: lambda _, at: (False, at),
    _INT: _take_int,
    _BIG: _take_big,
    _FLOAT: _take_float,
    _TEXT: _take_text,
    _BYTES: _take_bytes,
    _TUPLE: _take_members(tuple),
    _LIST: _take_members(list),
    _SET: _take_members(frozenset),
    _DICT: _take_mapping,
    _ARRAY_TAG: take_array,
    _OBJECT: _take_object,
    _ENUM: _take_enum,
    _PATH: _take_path,
}
_TAKERS = tuple(_take_enum if issubclass(cls, Enum) else _take_record(cls) for cls in _CLASSES)
