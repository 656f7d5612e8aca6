"""Checkpoints that transformers and bitsandbytes wrote: the numbers of their tables, double quantization, int8."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from make_quantized import FIXTURES, QUERY
from quire.kernels.native.loader import why_not_native
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.quantization.levels import LevelWeight
from quire.types.errors import ModelLoadError
from tiny_models import Bench, engine_config

BLOCK = 64
LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def exact(tensors: dict[str, Tensor], weight: str) -> tuple[Tensor, Tensor]:
    """The numbers of a matrix of 4 bits as the format's own definition has them, flat, and the largest of each one's
    block."""
    absmax = tensors[f"{weight}.absmax"].double()
    if f"{weight}.nested_absmax" in tensors:
        state = next(value for name, value in tensors.items() if name.startswith(f"{weight}.quant_state"))
        told = json.loads(bytes(state.tolist()))
        codes, table = tensors[f"{weight}.absmax"].long(), tensors[f"{weight}.nested_quant_map"].double()
        places = torch.arange(len(codes)) // told["nested_blocksize"]
        absmax = table[codes] * tensors[f"{weight}.nested_absmax"].double()[places] + told["nested_offset"]
    packed = tensors[weight].view(torch.uint8).flatten().long()
    codes = torch.stack((packed // 16, packed % 16), dim=1).flatten()
    largest = absmax[torch.arange(len(codes)) // BLOCK]
    return tensors[f"{weight}.quant_map"].double()[codes] * largest, largest


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-nf4-double", "bnb-fp4", "bnb-fp4-double"])
def test_every_number_of_a_table_is_within_a_part_in_350_of_its_blocks_largest(name: str) -> None:
    checkpoint = open_checkpoint(files_at(FIXTURES / name))
    tensors = load_file(FIXTURES / name / "model.safetensors")
    for layer in LAYERS:
        weight = f"model.layers.0.{layer}.weight"
        found = checkpoint.read_quantized(weight)
        assert isinstance(found, LevelWeight)
        assert found.group == (BLOCK if found.shape[1] % BLOCK == 0 else 32)
        assert found.is_symmetric
        wanted, largest = exact(tensors, weight)
        assert ((found.values().double().flatten() - wanted).abs() <= largest * (1 / 350 + 1e-6)).all()


def test_int8_matrices_are_their_levels_times_the_scale_of_their_output() -> None:
    checkpoint = open_checkpoint(files_at(FIXTURES / "bnb-int8"))
    tensors = load_file(FIXTURES / "bnb-int8" / "model.safetensors")
    for layer in LAYERS:
        found = checkpoint.read(f"model.layers.0.{layer}.weight")
        levels, scales = tensors[f"model.layers.0.{layer}.weight"], tensors[f"model.layers.0.{layer}.SCB"]
        torch.testing.assert_close(found, levels.float() * scales.unsqueeze(1) / 127, rtol=1e-6, atol=0.0)


def test_the_memory_plan_counts_a_byte_for_each_weight_and_half_of_one_for_integer_products() -> None:
    """Of seven matrices of 64 x 64, 32 x 64 (twice) and 128 x 64 (three times)."""
    weights = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64
    table, int8 = (open_checkpoint(files_at(FIXTURES / name)).config for name in ("bnb-nf4", "bnb-int8"))
    assert table.quantization == "bitsandbytes"
    assert table.levels.parameters == table.levels.gpu_parameters == weights
    assert table.levels.num_bytes == int8.levels.num_bytes == weights * 36 // 32
    outputs = 2 * 64 + 2 * 32 + 2 * 128 + 64
    assert table.levels.integer_bytes == weights // 2 + weights // 32 * 2 + 4 * outputs
    assert int8.levels.integer_bytes == weights + weights // 32 * 2
    assert table.levels.gpu_bytes == weights + weights // BLOCK * 4


def test_no_matrix_is_expanded_where_the_cpu_multiplies_by_levels(caplog: pytest.LogCaptureFixture) -> None:
    if why_not_native(torch.float32, torch.device("cpu")) is not None:
        pytest.skip("no native kernels")
    with caplog.at_level("INFO", logger="quire.runtime"):
        for name in ("bnb-nf4-double", "bnb-int8"):
            Bench(open_checkpoint(files_at(FIXTURES / name)), engine_config(device="cpu"), attention="auto")
    assert not [record for record in caplog.records if "dequantized while loading" in record.getMessage()]


@pytest.mark.parametrize(
    ("name", "word", "tensor", "message"),
    [
        ("bnb-nf4", "weight.absmax", None, r"weight\.absmax: is missing"),
        ("bnb-nf4", "weight.absmax", torch.ones(7), r"weight\.absmax: has shape \[7\], expected \[64\]"),
        ("bnb-nf4", "weight", torch.ones(5, 1, dtype=torch.uint8), "has 5 bytes for 64 x 64 levels of 4 bits"),
        ("bnb-nf4", "weight.quant_map", torch.ones(8), r"quant_map: has shape \[8\], expected \[16\]"),
        ("bnb-nf4", "weight.quant_state.bitsandbytes__nf4", None, "must be one of nf4, fp4, there are 0"),
        (
            "bnb-nf4",
            "weight.quant_state.bitsandbytes__nf4",
            torch.tensor(list(b'{"shape": 4, "blocksize": 64}'), dtype=torch.uint8),
            "has shape 4 and blocks of 64, expected whole numbers",
        ),
        ("bnb-nf4-double", "weight.nested_absmax", torch.ones(9), "nested_absmax: does not scale 144 blocks"),
        ("bnb-int8", "SCB", None, "SCB: is missing"),
        ("bnb-int8", "weight_format", torch.tensor(2, dtype=torch.uint8), r"weight_format: 2 is not supported"),
    ],
)
def test_tensors_that_make_no_matrix_are_refused_by_name(
    name: str, word: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    shutil.copy(FIXTURES / name / "config.json", tmp_path / "config.json")
    tensors = load_file(FIXTURES / name / "model.safetensors")
    del tensors[f"{QUERY}.{word}"]
    save_file(tensors | ({} if tensor is None else {f"{QUERY}.{word}": tensor}), tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(files_at(tmp_path)).read(f"{QUERY}.weight")
