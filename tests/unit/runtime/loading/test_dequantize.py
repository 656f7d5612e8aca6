"""Every ggml type, bit for bit what its definition gives."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from quire.runtime.loading.gguf import dequantize as module
from quire.runtime.loading.gguf.dequantize import DECODERS, STORED_DTYPES, dequantize
from quire.runtime.loading.gguf.types import TYPE_BY_NAME

NUM_BLOCKS = 300
NOT_IN_THE_REFERENCE = {"Q8_K"}
QUANTIZERS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")


def decode(blocks: np.ndarray, name: str) -> np.ndarray:
    return dequantize(torch.from_numpy(blocks.reshape(-1)), TYPE_BY_NAME[name]).numpy()


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    ours, theirs = ours.reshape(-1), theirs.reshape(-1)
    same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    assert same.all(), f"{(~same).sum()} of {same.size} values differ"


def test_every_known_type_can_be_decoded() -> None:
    assert set(DECODERS) | set(STORED_DTYPES) == set(TYPE_BY_NAME)


@pytest.mark.parametrize("name", sorted(set(DECODERS) - NOT_IN_THE_REFERENCE))
def test_random_bytes_decode_as_the_reference_decodes_them(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = TYPE_BY_NAME[name]
    reference = gguf.GGMLQuantizationType[name]
    assert gguf.GGML_QUANT_SIZES[reference] == (kind.block_values, kind.block_bytes)
    blocks = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = gguf.quants.dequantize(blocks, reference)
    assert_same_bits(decode(blocks, name), expected)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantized_weights_decode_as_the_reference_decodes_them(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    reference = gguf.GGMLQuantizationType[name]
    weight = np.random.default_rng(2).normal(size=(16, 512)).astype(np.float32)
    packed = gguf.quants.quantize(weight, reference)
    ours = decode(packed, name)
    assert_same_bits(ours, gguf.quants.dequantize(packed, reference))
    assert np.corrcoef(ours, weight.reshape(-1))[0, 1] > 0.6


def test_q8_k_is_a_float_scale_and_256_signed_bytes() -> None:
    rng = np.random.default_rng(3)
    scale, whole = rng.normal(size=(5, 1)).astype(np.float32), rng.integers(-128, 128, (5, 256), dtype=np.int8)
    sums = np.zeros((5, 32), dtype=np.uint8)
    blocks = np.concatenate([scale.view(np.uint8), whole.view(np.uint8), sums], axis=1)
    assert_same_bits(decode(blocks, "Q8_K"), scale * whole.astype(np.float32))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "IQ2_XS"])
def test_the_size_of_a_chunk_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = TYPE_BY_NAME[name]
    blocks = np.random.default_rng(4).integers(0, 256, (77, kind.block_bytes), dtype=np.uint8)
    whole = decode(blocks, name)
    monkeypatch.setattr(module, "CHUNK_VALUES", 4 * kind.block_values)
    assert_same_bits(decode(blocks, name), whole)


@pytest.mark.parametrize("name", sorted(STORED_DTYPES))
def test_plain_types_are_views_of_the_bytes(name: str) -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    values = dequantize(raw, TYPE_BY_NAME[name])
    assert values.dtype == STORED_DTYPES[name]
    assert values.data_ptr() == raw.data_ptr()


def test_decoding_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    decode(np.zeros((4, 18), dtype=np.uint8), "Q4_0")
    assert torch.get_num_threads() == before
