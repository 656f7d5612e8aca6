"""The control message of a step: a plan in as few bytes as what it changes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter, is_
from typing import Any

from quire.runtime.executor.codec import Buffer, put, put_array, take, take_array
from quire.types.step import NO_ROWS, Ints, StepPlan

_HEAD = struct.Struct("<qI")  # step, a bit for every field that is there
_ARRAYS = ("decode_rows", "grant_rows", "grant_slots", "grant_blocks", "window_owners", "window_blocks")
_OTHERS = tuple(item.name for item in fields(StepPlan) if item.name not in ("step", *_ARRAYS))
_DEFAULTS = tuple(item.default for item in fields(StepPlan) if item.name in _OTHERS)
_arrays_of: Callable[[StepPlan], tuple[Ints, ...]] = attrgetter(*_ARRAYS)
_others_of: Callable[[StepPlan], tuple[Any, ...]] = attrgetter(*_OTHERS)
_ARRAY_BITS = [(1 << bit, name) for bit, name in enumerate(_ARRAYS)]
_OTHER_BITS = [(1 << bit, name) for bit, name in enumerate(_OTHERS, len(_ARRAYS))]
_ANY_OTHER = sum(bit for bit, _ in _OTHER_BITS)
_SAME_ROWS = 1 << 31  # the rows that decode are those of the message before


class PlanEncoder:
    """Encodes the plans of one engine in order. Rows that decode in two plans in a row are named once."""

    def __init__(self) -> None:
        self._rows = b""  # those of the last plan that had some

    def encode(self, plan: StepPlan) -> bytearray:
        out, there, (rows, *arrays) = bytearray(_HEAD.size), 0, _arrays_of(plan)
        if len(rows):
            if (named := rows.tobytes()) == self._rows:
                there = _SAME_ROWS
            else:
                self._rows, there = named, 1
                put_array(out, rows)
        for bit, array in enumerate(arrays, 1):
            if len(array):
                there |= 1 << bit
                put_array(out, array)
        others = _others_of(plan)
        if not all(map(is_, others, _DEFAULTS)):  # most steps have nothing but rows and their blocks
            for bit, (value, default) in enumerate(zip(others, _DEFAULTS, strict=True), len(_ARRAYS)):
                if value is not default and value != ():
                    there |= 1 << bit
                    put(out, value)
        _HEAD.pack_into(out, 0, plan.step, there)
        return out


class PlanDecoder:
    """Decodes what one PlanEncoder made, in the same order."""

    def __init__(self) -> None:
        self._rows: Ints = NO_ROWS

    def decode(self, message: Buffer) -> StepPlan:
        data = memoryview(message)
        step, there = _HEAD.unpack_from(data)
        given: dict[str, Any] = {}
        at = _HEAD.size
        for bit, name in _ARRAY_BITS:
            if there & bit:
                given[name], at = take_array(data, at)
        if there & _SAME_ROWS:
            given["decode_rows"] = self._rows.copy()
        elif "decode_rows" in given:
            self._rows = given["decode_rows"].copy()
        if there & _ANY_OTHER:
            for bit, name in _OTHER_BITS:
                if there & bit:
                    given[name], at = take(data, at)
        return StepPlan(step, **given)
