"""Two models, dtypes or settings never have one namespace; the same ones always have."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from quire.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from quire.config.model import Heads, ModelConfig, Rope
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.namespace import cache_namespace
from quire.types.errors import ModelLoadError

MODEL = ModelConfig("llama", 100, 16, 32, 2, Heads(2, 2, 8), Rope(), 1e-5)
CONFIG = EngineConfig(CacheConfig(16, 8), SchedulerConfig(), DeviceConfig("cpu", "float32", "float32"))
SIZE = 5 << 20  # bytes: more than is read of a file


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * (SIZE // 256))
    return ModelFiles("m", tmp_path, "hf")


def test_the_same_files_and_settings_have_the_same_namespace(files: ModelFiles) -> None:
    first = cache_namespace(files, MODEL, CONFIG)
    assert first == cache_namespace(files, MODEL, CONFIG)
    assert len(bytes.fromhex(first)) == 32
    larger = replace(CONFIG, cache=replace(CONFIG.cache, num_blocks=99), scheduler=SchedulerConfig(max_num_seqs=3))
    assert first == cache_namespace(files, MODEL, larger)


def test_whatever_shapes_keys_and_values_changes_the_namespace(files: ModelFiles) -> None:
    device, cache = CONFIG.device, CONFIG.cache
    configs = [
        CONFIG,
        replace(CONFIG, device=replace(device, dtype="bfloat16")),
        replace(CONFIG, device=replace(device, kv_dtype="float8")),
        replace(CONFIG, device=replace(device, quantization="fp8")),
        replace(CONFIG, device=replace(device, attention_backend="reference")),
        replace(CONFIG, device=replace(device, device="cuda")),
        replace(CONFIG, cache=replace(cache, block_size=32)),
    ]
    models = [replace(MODEL, rope=Rope(theta=5.0)), replace(MODEL, norm_eps=1e-6), replace(MODEL, qk_norm=True)]
    names = [cache_namespace(files, MODEL, config) for config in configs]
    names += [cache_namespace(files, model, CONFIG) for model in models]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("place", [0, SIZE // 2 - 1, SIZE - 1])
def test_other_weights_of_the_same_size_and_time_have_another_namespace(files: ModelFiles, place: int) -> None:
    path = files.path / "model.safetensors"
    before, status = cache_namespace(files, MODEL, CONFIG), path.stat()
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cache_namespace(files, MODEL, CONFIG) != before


def test_files_written_anew_have_another_namespace(files: ModelFiles) -> None:
    before = cache_namespace(files, MODEL, CONFIG)
    os.utime(files.path / "model.safetensors", ns=(1, 1))
    assert cache_namespace(files, MODEL, CONFIG) != before


def test_random_weights_are_named_by_their_seed(files: ModelFiles) -> None:
    seeds = [replace(CONFIG, scheduler=SchedulerConfig(seed=seed)) for seed in (0, 1)]
    names = {cache_namespace(files, MODEL, config, "dummy") for config in seeds}
    assert len(names | {cache_namespace(files, MODEL, CONFIG)}) == 3
    (files.path / "model.safetensors").unlink()
    assert cache_namespace(files, MODEL, CONFIG, "dummy") in names


def test_weights_that_cannot_be_read_are_an_error_that_names_them(files: ModelFiles) -> None:
    (files.path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        cache_namespace(files, MODEL, CONFIG)
