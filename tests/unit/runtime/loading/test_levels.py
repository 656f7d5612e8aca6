"""Weights read as levels, against the same weights read as numbers."""

from __future__ import annotations

import pytest
import torch

from quire.runtime.loading.gguf.dequantize import dequantize
from quire.runtime.loading.gguf.levels import read_levels
from quire.runtime.loading.gguf.types import LEVEL_TYPES, TYPE_BY_NAME
from quire.runtime.quantization.levels import stack

OUTPUTS, INPUTS = 6, 96


def stored(name: str, scale: float = 0.01) -> torch.Tensor:
    """Random blocks whose scale (and offset, if the type has one) are small numbers."""
    kind = TYPE_BY_NAME[name]
    blocks = torch.randint(0, 256, (OUTPUTS * INPUTS // 32, kind.block_bytes), dtype=torch.uint8)
    factors = 2 if name.endswith("_1") else 1
    blocks[:, : 2 * factors] = (torch.randn(len(blocks), factors) * scale).half().view(torch.uint8)
    return blocks.view(-1)


@pytest.mark.parametrize("name", LEVEL_TYPES)
def test_levels_stand_for_the_very_numbers_of_the_file(name: str) -> None:
    raw = stored(name)
    levels = read_levels(raw, TYPE_BY_NAME[name], (OUTPUTS, INPUTS))
    assert levels is not None
    assert torch.equal(levels.values(), dequantize(raw, TYPE_BY_NAME[name]).view(OUTPUTS, INPUTS))
    some = torch.tensor([4, 0, 4])
    assert torch.equal(levels.rows(some).values(), levels.values()[some])


def test_other_types_and_vectors_are_left_to_be_read_as_numbers() -> None:
    assert read_levels(torch.zeros(84, dtype=torch.uint8), TYPE_BY_NAME["Q2_K"], (1, 256)) is None
    assert read_levels(stored("Q8_0"), TYPE_BY_NAME["Q8_0"], (OUTPUTS * INPUTS,)) is None


def test_scales_beyond_float16_are_left_to_be_read_as_numbers() -> None:
    """Q4_0 has no offset of its own; -8 times a huge scale is none either."""
    assert read_levels(stored("Q4_0", scale=20_000.0), TYPE_BY_NAME["Q4_0"], (OUTPUTS, INPUTS)) is None


def test_weights_of_one_kind_are_stacked_and_of_two_kinds_are_not() -> None:
    small, large = (read_levels(stored(name), TYPE_BY_NAME[name], (OUTPUTS, INPUTS)) for name in ("Q4_1", "Q8_0"))
    assert small is not None
    assert large is not None
    both = stack([small, small])
    assert both is not None
    assert torch.equal(both.values(), torch.cat([small.values(), small.values()]))
    assert stack([small, large]) is None
