"""A compact encoding of plans: only fields that are not empty take bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter, is_
from typing import Any

import numpy as np

from quire.runtime.executor.codec import NARROW_FROM, Buffer, narrow, put, take
from quire.types.step import NO_ROWS, Ints, StepPlan

_HEAD = struct.Struct("<qI")  # step, and a bit for every field that is present
_ARRAYS = ("decode_rows", "grant_rows", "grant_slots", "grant_blocks", "window_owners", "window_blocks")
_OTHERS = tuple(item.name for item in fields(StepPlan) if item.name not in ("step", *_ARRAYS))
_DEFAULTS = tuple(item.default for item in fields(StepPlan) if item.name in _OTHERS)
_arrays_of: Callable[[StepPlan], tuple[Ints, ...]] = attrgetter(*_ARRAYS)
_others_of: Callable[[StepPlan], tuple[Any, ...]] = attrgetter(*_OTHERS)
_OTHER_BITS = [(1 << bit, name) for bit, name in enumerate(_OTHERS, len(_ARRAYS))]
_ANY_OTHER = sum(bit for bit, _ in _OTHER_BITS)
_ANY_ARRAY = (1 << len(_ARRAYS)) - 1
_SAME_ROWS = 1 << 31  # decode_rows are the same as in the previous message
_PLACES = [[place for place in range(len(_ARRAYS)) if bits >> place & 1] for bits in range(_ANY_ARRAY + 1)]
_COUNTS = [struct.Struct(f"<{count}I") for count in range(len(_ARRAYS) + 1)]  # formats, by number of arrays
_WIDTH_AT = 30  # the bits of a count from here on are the element width
_COUNT = (1 << _WIDTH_AT) - 1
_WIDTHS = tuple(np.dtype(name) for name in ("int32", "uint8", "uint16"))  # indexed by the width that `narrow` returns
_INT32 = _WIDTHS[0]


class PlanEncoder:
    """Encodes the plans of one engine in order. decode_rows that are the same in two consecutive plans are sent once.

    A message consists of a header, the element counts of its arrays, the elements of its arrays, and all other fields.
    """

    def __init__(self) -> None:
        self._rows = b""  # decode_rows of the last plan that had some

    def encode(self, plan: StepPlan) -> bytes:
        there, parts, counts = 0, [b"", b""], []
        for place, array in enumerate(_arrays_of(plan)):
            if not (count := len(array)):
                continue
            if not place:
                if (raw := array.tobytes()) == self._rows:
                    there = _SAME_ROWS
                    continue
                self._rows = raw
            if count >= NARROW_FROM or array.dtype is not _INT32:
                width, raw = narrow(array)
                count |= width << _WIDTH_AT
            elif place:
                raw = array.tobytes()
            there |= 1 << place
            counts.append(count)
            parts.append(raw)
        parts[1] = _COUNTS[len(counts)].pack(*counts)
        others = _others_of(plan)
        if not all(map(is_, others, _DEFAULTS)):  # most steps have only rows and their blocks
            out = bytearray()
            for bit, (value, default) in enumerate(zip(others, _DEFAULTS, strict=True), len(_ARRAYS)):
                if value is not default and value != ():
                    there |= 1 << bit
                    put(out, value)
            parts.append(bytes(out))
        parts[0] = _HEAD.pack(plan.step, there)
        return b"".join(parts)


class PlanDecoder:
    """Decodes the messages of one PlanEncoder, in the same order. The arrays of a plan are writable."""

    def __init__(self) -> None:
        self._rows: Ints = NO_ROWS

    def decode(self, message: Buffer) -> StepPlan:
        step, there = _HEAD.unpack_from(message)
        arrays, at = _take_arrays(message, there & _ANY_ARRAY)
        if there & _SAME_ROWS:
            arrays[0] = self._rows.copy()
        elif there & 1:
            self._rows = arrays[0].copy()
        if not there & _ANY_OTHER:
            rows, grant_rows, grant_slots, grant_blocks, owners, blocks = arrays
            return StepPlan(step, rows, (), (), grant_rows, grant_slots, grant_blocks, owners, blocks)
        given: dict[str, Any] = dict(zip(_ARRAYS, arrays, strict=True))
        data = memoryview(message)
        for bit, name in _OTHER_BITS:
            if there & bit:
                given[name], at = take(data, at)
        return StepPlan(step, **given)


def _take_arrays(message: Buffer, there: int) -> tuple[list[Ints], int]:
    """Return the arrays of a plan, and the offset of its other fields. Arrays whose bit is not set in `there` are
    empty."""
    arrays, places, at = [NO_ROWS] * len(_ARRAYS), _PLACES[there], _HEAD.size
    if not places:
        return arrays, at
    form = _COUNTS[len(places)]
    counts = form.unpack_from(message, at)
    at += form.size
    if max(counts) <= _COUNT:  # the usual message: four bytes per element, copied at once
        begin, total = 0, sum(counts)
        numbers = np.frombuffer(message, _INT32, total, at).copy()
        for place, count in zip(places, counts, strict=True):
            arrays[place] = numbers[begin : begin + count]
            begin += count
        return arrays, at + total * _INT32.itemsize
    for place, count in zip(places, counts, strict=True):
        width, count = _WIDTHS[count >> _WIDTH_AT], count & _COUNT
        arrays[place] = np.frombuffer(message, width, count, at).astype(np.int32)
        at += count * width.itemsize
    return arrays, at
