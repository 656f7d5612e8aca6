"""Damaged files, hundreds of them: each loads the very same weights or is refused by name. None crashes."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gguf_files import tiny_weights, write_tiny_gguf
from gguf_to_hf import gguf_to_hf
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import ModelFiles
from quire.types.errors import ModelLoadError

MUTANTS_PER_SEED, SEEDS = 60, range(7)
EXTREMES = (0, 1, 2, 31, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
LAST_NAME = b"blk.0.ffn_down.weight"
KINDS = {name: "Q8_0" for name in tiny_weights(layers=1) if "norm" not in name}

Mutation = Callable[[random.Random, bytearray, int], None]


def truncate(rng: random.Random, content: bytearray, header: int) -> None:
    del content[rng.randrange(len(content)) :]


def truncate_header(rng: random.Random, content: bytearray, header: int) -> None:
    del content[rng.randrange(header) :]


def flip_bits(rng: random.Random, content: bytearray, header: int) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        content[rng.randrange(header)] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, content: bytearray, header: int) -> None:
    place = rng.randrange(header - 8)
    content[place : place + 8] = struct.pack("<Q", rng.choice(EXTREMES))


def randomize_bytes(rng: random.Random, content: bytearray, header: int) -> None:
    place, length = rng.randrange(header), rng.randrange(1, 40)
    content[place : place + length] = rng.randbytes(length)


def delete(rng: random.Random, content: bytearray, header: int) -> None:
    place = rng.randrange(header)
    del content[place : place + rng.randrange(1, 100)]


def insert(rng: random.Random, content: bytearray, header: int) -> None:
    place = rng.randrange(header)
    content[place:place] = rng.randbytes(rng.randrange(1, 100))


def repeat(rng: random.Random, content: bytearray, header: int) -> None:
    place, length = rng.randrange(header), rng.randrange(1, 200)
    content[place:place] = content[place : place + length]


def change_digit(rng: random.Random, content: bytearray, header: int) -> None:
    digits = [place for place in range(header) if chr(content[place]).isdecimal()]
    content[rng.choice(digits)] = ord(rng.choice("0123456789-.e"))


MUTATIONS: tuple[Mutation, ...] = (
    truncate, truncate_header, flip_bits, flip_bits, overwrite, randomize_bytes, delete, insert, repeat, change_digit,
)  # fmt: skip


def load(files: ModelFiles) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(files)
    try:
        return {name: checkpoint.read(name).clone() for name in checkpoint.names}
    finally:
        checkpoint.close()


def assert_names_the_file(error: ModelLoadError, folder: Path) -> None:
    assert str(folder) in error.file
    assert "\n" not in str(error)


def outcomes(files: ModelFiles, damaged: Path, header: int, seed: int) -> tuple[int, int]:
    """How many mutants of a file loaded, and how many were refused."""
    rng, original, expected = random.Random(seed), damaged.read_bytes(), load(files)
    loaded = refused = 0
    for number in range(MUTANTS_PER_SEED):
        content = bytearray(original)
        MUTATIONS[number % len(MUTATIONS)](rng, content, header)
        damaged.unlink()
        damaged.write_bytes(content)
        try:
            tensors = load(files)
        except ModelLoadError as error:
            assert_names_the_file(error, damaged.parent)
            refused += 1
            continue
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected), f"mutant {number} of seed {seed}"
        loaded += 1
    return loaded, refused


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_gguf_file_loads_the_same_weights_or_is_refused(tmp_path: Path, seed: int) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_weights(layers=1), KINDS, layers=1)
    header = path.read_bytes().index(LAST_NAME) + len(LAST_NAME) + 32  # rank, two sizes, type, offset
    loaded, refused = outcomes(ModelFiles("m", path, "gguf"), path, header, seed)
    assert refused > loaded


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_safetensors_file_loads_the_same_weights_or_is_refused(tmp_path: Path, seed: int) -> None:
    source = write_tiny_gguf(tmp_path / "m.gguf", tiny_weights(layers=1), layers=1)
    directory = gguf_to_hf(source, tmp_path / "tiny")
    path = directory / "model.safetensors"
    header = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    loaded, refused = outcomes(ModelFiles("tiny", directory, "hf"), path, header, seed)
    assert refused > loaded


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_config_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    source = write_tiny_gguf(tmp_path / "m.gguf", tiny_weights(layers=1), layers=1)
    directory = gguf_to_hf(source, tmp_path / "tiny")
    path = directory / "config.json"
    loaded, refused = outcomes(ModelFiles("tiny", directory, "hf"), path, path.stat().st_size, seed)
    assert refused > loaded
