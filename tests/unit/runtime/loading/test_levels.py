"""Weights read as levels, against the same weights read as numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gguf_encoders import encode
from quire.runtime.loading.gguf.dequantize import dequantize
from quire.runtime.loading.gguf.levels import read_levels
from quire.runtime.loading.gguf.types import LEVEL_FORMS, TYPE_BY_NAME
from quire.runtime.quantization.levels import stack

OUTPUTS = 6
INPUTS = 256  # a block of the K types
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# how far off numbers are, of their own size, when their type has rounded them
ERRORS = {
    "Q4_0": 0.13, "Q4_1": 0.1, "Q5_0": 0.07, "Q5_1": 0.05, "Q8_0": 0.01, "Q2_K": 0.4, "Q3_K": 0.25, "Q4_K": 0.1,
    "Q5_K": 0.05, "Q6_K": 0.03, "Q8_K": 0.02, "IQ4_NL": 0.12, "IQ4_XS": 0.12, "MXFP4": 0.15, "TQ1_0": 0.9, "TQ2_0": 0.9,
}  # fmt: skip


def stored(name: str, scale: float = 0.01) -> torch.Tensor:
    """Random blocks whose scale (and offset, if the type has one) are small numbers."""
    kind = TYPE_BY_NAME[name]
    blocks = torch.randint(0, 256, (OUTPUTS * INPUTS // kind.block_values, kind.block_bytes), dtype=torch.uint8)
    if name == "Q8_K":
        blocks[:, :4] = (torch.randn(len(blocks), 1) * scale).view(torch.uint8)
    elif name == "MXFP4":
        blocks[:, 0] = torch.randint(110, 130, (len(blocks),)).to(torch.uint8)
    else:
        for place in HALVES.get(name, (0, 2) if name.endswith("_1") else (0,)):
            blocks[:, place : place + 2] = (torch.randn(len(blocks), 1) * scale).half().view(torch.uint8)
    return blocks.view(-1)


@pytest.mark.parametrize("name", LEVEL_FORMS)
def test_levels_stand_for_the_very_numbers_of_the_file(name: str) -> None:
    raw = stored(name)
    levels = read_levels(raw, TYPE_BY_NAME[name], (OUTPUTS, INPUTS))
    assert levels is not None
    assert torch.equal(levels.values(), dequantize(raw, TYPE_BY_NAME[name]).view(OUTPUTS, INPUTS))
    form = LEVEL_FORMS[name]
    assert (levels.nibbles, levels.group, not levels.is_symmetric) == form[:3]
    assert form.least <= int(levels.levels.min()) <= int(levels.levels.max()) <= form.most
    some = torch.tensor([4, 0, 4])
    assert torch.equal(levels.rows(some).values(), levels.values()[some])


@pytest.mark.parametrize("name", LEVEL_FORMS)
def test_numbers_that_were_encoded_are_read_near_to_what_they_were(name: str) -> None:
    numbers = np.random.default_rng(0).normal(size=(OUTPUTS, 3 * INPUTS)).astype(np.float32) * np.float32(0.05)
    numbers[:, ::97] *= 6  # outliers
    raw = torch.frombuffer(bytearray(encode(numbers, name)), dtype=torch.uint8)
    levels = read_levels(raw, TYPE_BY_NAME[name], numbers.shape)
    assert levels is not None
    off = np.linalg.norm(levels.values().numpy() - numbers) / np.linalg.norm(numbers)
    assert off < ERRORS[name]


@pytest.mark.parametrize("name", LEVEL_FORMS)
def test_without_the_compiled_kernels_torch_reads_the_same_levels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = stored(name)
    compiled = read_levels(raw, TYPE_BY_NAME[name], (OUTPUTS, INPUTS))
    monkeypatch.setattr("quire.runtime.loading.gguf.levels.read_blocks", lambda *_: None)
    by_torch = read_levels(raw, TYPE_BY_NAME[name], (OUTPUTS, INPUTS))
    assert compiled is not None
    assert by_torch is not None
    for part in ("levels", "scales", "offsets"):
        assert torch.equal(getattr(compiled, part), getattr(by_torch, part))


def test_other_types_and_vectors_are_left_to_be_read_as_numbers() -> None:
    assert read_levels(torch.zeros(66, dtype=torch.uint8), TYPE_BY_NAME["IQ2_XXS"], (1, 256)) is None
    assert read_levels(stored("Q8_0"), TYPE_BY_NAME["Q8_0"], (OUTPUTS * INPUTS,)) is None


def test_scales_beyond_float16_are_left_to_be_read_as_numbers() -> None:
    """Q4_0 has no offset of its own; -8 times a huge scale is none either."""
    assert read_levels(stored("Q4_0", scale=20_000.0), TYPE_BY_NAME["Q4_0"], (OUTPUTS, INPUTS)) is None


@pytest.mark.parametrize("place", [0, 17, OUTPUTS * INPUTS // 32 - 1])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_no_numbers_are_left_to_be_read_as_numbers(wrong: float, place: int) -> None:
    """Reading them as numbers says which tensor is damaged."""
    blocks = stored("Q4_1").view(-1, TYPE_BY_NAME["Q4_1"].block_bytes)
    for start in (0, 2):
        damaged = blocks.clone()
        damaged[place, start : start + 2] = torch.tensor([wrong]).half().view(torch.uint8)
        assert read_levels(damaged.view(-1), TYPE_BY_NAME["Q4_1"], (OUTPUTS, INPUTS)) is None


def test_weights_of_one_kind_are_stacked_and_of_two_kinds_with_eight_bits() -> None:
    small, large = (read_levels(stored(name), TYPE_BY_NAME[name], (OUTPUTS, INPUTS)) for name in ("Q4_1", "Q8_0"))
    assert small is not None
    assert large is not None
    both = stack([small, small])
    assert both is not None
    assert torch.equal(both.values(), torch.cat([small.values(), small.values()]))
    mixed = stack([small, large])
    assert mixed is not None
    assert not mixed.nibbles
    assert torch.equal(mixed.values(), torch.cat([small.values(), large.values()]))
