"""The ggml tensor types: their ids in a file, and how many bytes store how many values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A type that stores `block_values` values in a block of `block_bytes` bytes."""

    name: str
    block_values: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.block_values > 1


GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
}


NATIVE_GROUP = 32  # smallest group of the compiled kernels: smaller groups are held in 8 bits


class LevelForm(NamedTuple):
    """How quantized values of a type are held: in 4 bits (`nibbles`) or 8, with a scale per group of values and
    possibly an offset; and the least and the greatest quantized value. `has_table`: the 16 quantized values are not
    consecutive. `super_bits`: bits per value if the panels of integer gemms hold its scales as super-blocks."""

    nibbles: bool
    group: int
    has_offset: bool
    least: int = 0
    most: int = 15
    has_table: bool = False
    super_bits: int | None = None


# Types whose values are level * scale (+ offset): see levels.py.
LEVEL_FORMS: dict[str, LevelForm] = {
    "Q4_0": LevelForm(True, 32, False),
    "Q4_1": LevelForm(True, 32, True),
    "Q5_0": LevelForm(False, 32, False, -16, 15),
    "Q5_1": LevelForm(False, 32, True, 0, 31),
    "Q8_0": LevelForm(False, 32, False, -128, 127),
    "Q2_K": LevelForm(True, 16, True, super_bits=2),
    "Q3_K": LevelForm(True, 16, False, super_bits=3),
    "Q4_K": LevelForm(True, 32, True),
    "Q5_K": LevelForm(False, 32, True, 0, 31),
    "Q6_K": LevelForm(False, 16, False, -32, 31),
    "Q8_K": LevelForm(False, 256, False, -128, 127),
    "IQ4_NL": LevelForm(False, 32, False, -127, 113, has_table=True),
    "IQ4_XS": LevelForm(False, 32, False, -127, 113, has_table=True),
    "MXFP4": LevelForm(False, 32, False, -12, 12, has_table=True),
    "TQ1_0": LevelForm(True, 256, False),
    "TQ2_0": LevelForm(True, 256, False),
}
TYPE_BY_NAME: dict[str, GgmlType] = {kind.name: kind for kind in GGML_TYPES.values()}

# Known ids that are not supported.
REFUSED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    40: "NVFP4",
    41: "Q1_0",
}
