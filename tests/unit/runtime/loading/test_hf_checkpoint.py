"""Safetensors directories: one file or many, read as stored; anything out of order refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gguf_files import tiny_weights, write_tiny_gguf
from gguf_to_hf import gguf_to_hf
from quire.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.hf.safetensors import SafetensorsFile
from quire.types.errors import ModelLoadError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return gguf_to_hf(write_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "tiny")


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(files_at(path))


def split_in_two(directory: Path, **changes: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map | changes}))


def test_a_model_is_the_same_from_gguf_and_from_safetensors(tmp_path: Path, directory: Path) -> None:
    gguf, hf = opened(tmp_path / "m.gguf"), opened(directory)
    assert hf.config == gguf.config
    assert hf.names == gguf.names
    assert all(torch.equal(hf.read(name), gguf.read(name)) for name in hf.names)
    assert hf.source("model.norm.weight") == str(directory / "model.safetensors")


def test_many_files_are_one_model(directory: Path) -> None:
    whole = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    split_in_two(directory)
    checkpoint = opened(directory)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in whole.items())
    assert len({checkpoint.source(name) for name in checkpoint.names}) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tensors_are_read_as_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = gguf_to_hf(write_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "tiny")
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors")
    read = opened(directory).read("model.norm.weight")
    assert read.dtype == (torch.float32 if dtype == torch.float64 else dtype)
    assert torch.equal(read, tensors["model.norm.weight"].to(read.dtype))


def test_tensors_outlive_close_and_never_write_to_the_file(directory: Path) -> None:
    before = (directory / "model.safetensors").read_bytes()
    checkpoint = opened(directory)
    norm = checkpoint.read("model.norm.weight")
    checkpoint.close()
    checkpoint.close()
    norm.zero_()
    assert (directory / "model.safetensors").read_bytes() == before


def test_numbers_at_odd_addresses_are_read(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32)
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    header += b" " * ((1 - len(header)) % 4)  # data starts one byte after a multiple of four
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    file = SafetensorsFile(path)
    assert file.tensors["a"].offset % 4 == 1
    assert file.raw("a").tobytes() == values.tobytes()


def test_a_second_copy_of_a_tied_head_and_old_rotary_buffers_are_let_through(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, directory / "model.safetensors")
    assert "lm_head.weight" in opened(directory).names


def test_pickled_weights_are_never_opened(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(
        ModelLoadError, match=r"pytorch_model\.bin, a format that can run code, and is never opened; use a"
    ):
        opened(directory)


def test_a_directory_without_weights_says_so(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="has no safetensors files"):
        opened(directory)


def test_several_files_without_an_index_are_refused(directory: Path) -> None:
    split_in_two(directory)
    (directory / INDEX).unlink()
    with pytest.raises(ModelLoadError, match=f"2 safetensors files and no {INDEX}"):
        opened(directory)


def test_one_part_of_a_split_checkpoint_is_refused(directory: Path) -> None:
    split_in_two(directory)
    (directory / INDEX).unlink()
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"one part of a split checkpoint \(model-00001-of-00002\.safetensors\)"):
        opened(directory)


def test_a_file_the_index_names_must_be_there(directory: Path) -> None:
    split_in_two(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors: is missing"):
        opened(directory)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("../../etc/passwd", "not a safetensors file beside it"),
        ("model-00001-of-00002.bin", "not a safetensors file beside it"),
        ("model-00001-of-00002.safetensors", "is not there, though"),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(directory: Path, place: str, message: str) -> None:
    split_in_two(directory, **{"model.extra.weight": place})
    with pytest.raises(ModelLoadError, match=message) as caught:
        opened(directory)
    assert caught.value.tensor == "model.extra.weight"


def test_a_tensor_in_two_files_is_refused(directory: Path) -> None:
    split_in_two(directory)
    second = directory / "model-00002-of-00002.safetensors"
    first = load_file(directory / "model-00001-of-00002.safetensors")
    name = sorted(first)[0]
    save_file(load_file(second) | {name: first[name].clone()}, second)
    with pytest.raises(ModelLoadError, match="is also in"):
        opened(directory)


@pytest.mark.parametrize("kind", ["missing", "misshapen", "unknown"])
def test_tensors_that_do_not_fit_the_config_are_refused_at_opening(directory: Path, kind: str) -> None:
    tensors, name = load_file(directory / "model.safetensors"), "model.layers.1.self_attn.o_proj.weight"
    if kind == "missing":
        del tensors[name]
    elif kind == "misshapen":
        tensors[name] = torch.ones(3, 5)
    else:
        tensors[name.replace("weight", "bias")] = torch.ones(32)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.self_attn\.o_proj"):
        opened(directory)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.full((32, 32), float("inf")), "not finite numbers"),
        (torch.zeros(32, 32), "all 4096 bytes are zero"),
        (torch.ones(32, 32, dtype=torch.int8), "has dtype I8"),
        (torch.ones(32, 32).to(torch.float8_e4m3fn), "has dtype F8_E4M3"),
    ],
)
def test_damaged_numbers_are_refused_when_read(directory: Path, value: torch.Tensor, message: str) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    save_file(load_file(directory / "model.safetensors") | {name: value}, directory / "model.safetensors")
    checkpoint = opened(directory)
    with pytest.raises(ModelLoadError, match=message) as caught:
        checkpoint.read(name)
    assert (caught.value.file, caught.value.tensor) == (str(directory / "model.safetensors"), name)


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
WRONG_HEADERS: dict[str, tuple[object, str]] = {
    "no object": ([1], "must hold a JSON object"),
    "name": ({"a\n": A}, r"'a\\n' is no name of a tensor"),
    "no entry": ({"a": 1}, "a: its entry must have dtype, shape and data_offsets"),
    "more keys": ({"a": A | {"x": 1}}, "a: its entry must have"),
    "dtype": ({"a": A | {"dtype": "F3"}}, "a: has unknown dtype 'F3'"),
    "dtype list": ({"a": A | {"dtype": []}}, r"a: has unknown dtype \[\]"),
    "shape": ({"a": A | {"shape": [-2]}}, "a: has an impossible shape"),
    "shape of truths": ({"a": A | {"shape": [True, 2]}}, "a: has an impossible shape"),
    "rank": ({"a": A | {"shape": [1] * 9}}, "a: has an impossible shape"),
    "backwards": ({"a": A | {"data_offsets": [8, 0]}}, "a: has impossible data_offsets"),
    "three offsets": ({"a": A | {"data_offsets": [0, 4, 8]}}, "a: has impossible data_offsets"),
    "size": ({"a": A | {"shape": [3]}}, r"a: shape \(3,\) of F32 needs 12 bytes, 8 are given"),
    "huge": ({"a": A | {"shape": [1 << 61, 1 << 61]}}, "a: shape .* needs"),
    "overlap": ({"a": A, "b": A}, "b: overlaps a"),
    "gap": ({"a": A, "b": A | {"data_offsets": [12, 20]}}, "b: leaves a gap after a"),
    "late start": ({"a": A | {"data_offsets": [4, 12]}}, "a: leaves a gap after the header"),
    "short": ({"a": A, "b": A | {"data_offsets": [8, 16], "shape": [2]}}, "is cut off: 8 bytes are missing"),
    "long": ({}, "has 8 unexplained bytes"),
    "metadata": ({"__metadata__": {"a": 1}, "a": A}, "__metadata__: must map names to strings"),
}


@pytest.mark.parametrize("case", WRONG_HEADERS)
def test_a_wrong_header_is_refused_by_name_and_reason(tmp_path: Path, case: str) -> None:
    content, message = WRONG_HEADERS[case]
    header = json.dumps(content).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ModelLoadError, match=message) as caught:
        SafetensorsFile(path)
    assert caught.value.file == str(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n", "pointer of Git LFS.*git lfs pull"),
        (b"12345", "too few for a header"),
        (struct.pack("<Q", 1 << 60), "claims a header of"),
        (struct.pack("<Q", 100) + b"{}", "inside its header"),
        (struct.pack("<Q", 4) + b"{{{{", "its header is not valid JSON.*download it again"),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        SafetensorsFile(path)


def test_the_tiny_model_runs_in_transformers_from_the_directory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    weights = tiny_weights()
    directory = gguf_to_hf(write_tiny_gguf(tmp_path / "m.gguf", weights), tmp_path / "tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    embedding = model.get_input_embeddings().weight
    assert torch.equal(embedding, torch.from_numpy(weights["token_embd.weight"]))
    assert torch.equal(model.get_output_embeddings().weight, embedding)
