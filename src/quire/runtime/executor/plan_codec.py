"""The control message of a step: a plan in as few bytes as what it changes."""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import Any

from quire.runtime.executor.codec import Buffer, put, put_array, take, take_array
from quire.types.step import NO_ROWS, Ints, StepPlan

_HEAD = struct.Struct("<qI")  # step, a bit for every field that is there
_ARRAYS = ("decode_rows", "grant_rows", "grant_slots", "grant_blocks", "window_owners", "window_blocks")
_OTHERS = tuple(item.name for item in fields(StepPlan) if item.name not in ("step", *_ARRAYS))
_SAME_ROWS = 1 << 31  # the rows that decode are those of the message before


class PlanEncoder:
    """Encodes the plans of one engine in order. Rows that decode in two plans in a row are named once."""

    def __init__(self) -> None:
        self._rows = b""  # those of the last plan that had some

    def encode(self, plan: StepPlan) -> bytes:
        out, there = bytearray(_HEAD.size), 0
        for bit, name in enumerate(_ARRAYS):
            array: Ints = getattr(plan, name)
            if not len(array):
                continue
            if bit == 0:
                if (rows := array.tobytes()) == self._rows:
                    there |= _SAME_ROWS
                    continue
                self._rows = rows
            there |= 1 << bit
            put_array(out, array)
        for bit, name in enumerate(_OTHERS, len(_ARRAYS)):
            value = getattr(plan, name)
            if value is _DEFAULTS[name] or value == ():
                continue
            there |= 1 << bit
            put(out, value)
        _HEAD.pack_into(out, 0, plan.step, there)
        return bytes(out)


class PlanDecoder:
    """Decodes what one PlanEncoder made, in the same order."""

    def __init__(self) -> None:
        self._rows: Ints = NO_ROWS

    def decode(self, message: Buffer) -> StepPlan:
        data = memoryview(message)
        step, there = _HEAD.unpack_from(data)
        given: dict[str, Any] = {}
        at = _HEAD.size
        for bit, name in enumerate(_ARRAYS):
            if there & 1 << bit:
                given[name], at = take_array(data, at)
        if there & _SAME_ROWS:
            given["decode_rows"] = self._rows.copy()
        elif "decode_rows" in given:
            self._rows = given["decode_rows"].copy()
        for bit, name in enumerate(_OTHERS, len(_ARRAYS)):
            if there & 1 << bit:
                given[name], at = take(data, at)
        return StepPlan(step, **given)


_DEFAULTS = {item.name: item.default for item in fields(StepPlan)}
