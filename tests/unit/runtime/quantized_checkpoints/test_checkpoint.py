"""Checkpoints that `quire quantize` writes: what is read back, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch
import transformers
from safetensors import SafetensorError, safe_open

from family_bench import hf_checkpoint, load_bench
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.quantized_checkpoints.checkpoint import Recipe, write_quantized
from quire.types.errors import ConfigError
from quire.types.step import Chunk

CPU = torch.device("cpu")
TOKENS = [5, 9, 2, 11, 7, 3]
TEXTS = tuple(tuple((7 * i + 3 * j + i * i % 11) % 61 for i in range(24)) for j in range(12))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    folder = hf_checkpoint(tmp_path_factory.mktemp("plain"), config)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def logits(folder: Path) -> torch.Tensor:
    bench = load_bench(folder, attention="reference")
    bench.add(0, TOKENS)
    bench.run((), (Chunk(0, 0, len(TOKENS), (0,)),))
    return bench.sampler.seen[0][0]


def off_by(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("recipe", "near"),
    [
        (Recipe("int4"), 0.35),
        (Recipe("int4", 32, texts=TEXTS), 0.35),
        (Recipe("int4", head=True, texts=TEXTS), 0.4),
        (Recipe("int8"), 0.05),
        (Recipe("int8", texts=TEXTS), 0.05),
        (Recipe("fp8"), 0.15),
        (Recipe("fp8", fp8_scales="tensor"), 0.25),
        (Recipe("fp8", fp8_scales="block"), 0.25),
    ],
)
def test_what_is_written_is_read_back(plain: Path, tmp_path: Path, recipe: Recipe, near: float) -> None:
    target, done = tmp_path / "small", []
    count = write_quantized(files_at(plain), target, recipe, CPU, lambda *given: done.append(given))
    assert count == 14 + recipe.head
    assert done == [("quantizing blocks", 1, 2), ("quantizing blocks", 2, 2)]
    checkpoint = open_checkpoint(files_at(target))
    assert checkpoint.config.quantization == "compressed-tensors"
    weight = checkpoint.read_quantized("model.layers.1.mlp.down_proj.weight")
    assert weight is not None
    assert (checkpoint.read_quantized("lm_head.weight") is not None) == recipe.head
    whole = open_checkpoint(files_at(plain)).read("model.layers.1.mlp.down_proj.weight")
    assert 0 < off_by(weight.values(), whole) < near
    assert 0 < off_by(logits(target), logits(plain)) < near
    assert (target / "tokenizer.json").read_text() == "{}"
    assert f"Quantized to {recipe.method} by quire" in (target / "README.md").read_text()
    index = json.loads((target / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        with safe_open(target / file, "pt") as opened:
            assert name in set(opened.keys())


@pytest.mark.parametrize("head", [True, False])
def test_a_quantized_head_is_a_target_and_another_is_ignored(plain: Path, tmp_path: Path, head: bool) -> None:
    write_quantized(files_at(plain), tmp_path / "small", Recipe("int8", head=head), CPU)
    config = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "re:.*lm_head"][: 1 + head]
    assert config["ignore"] == ([] if head else ["lm_head"])


@pytest.mark.parametrize(("shared", "shape"), [("tensor", [1]), ("channel", [192, 1]), ("block", [2, 1])])
def test_float8_scales_have_the_shapes_that_the_format_has(
    tmp_path: Path, shared: Literal["channel", "tensor", "block"], shape: list[int]
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=192, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    source, target = hf_checkpoint(tmp_path / "plain", config), tmp_path / "small"
    write_quantized(files_at(source), target, Recipe("fp8", fp8_scales=shared), CPU)
    with safe_open(target / "model-00001-of-00002.safetensors", "pt") as opened:
        scales = opened.get_slice("model.layers.0.mlp.up_proj.weight_scale")
        assert scales.get_shape() == shape
        assert scales.get_dtype() == "F32"


def test_calibration_makes_the_answers_of_its_text_more_exact(plain: Path, tmp_path: Path) -> None:
    folders = {}
    for name, texts in (("with", (*TEXTS, tuple(TOKENS * 4))), ("without", ())):
        folders[name] = tmp_path / name
        write_quantized(files_at(plain), folders[name], Recipe("int4", texts=texts), CPU)
    wanted = logits(plain)
    assert off_by(logits(folders["with"]), wanted) < off_by(logits(folders["without"]), wanted)


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        (Recipe("int4", 96), r"^group_size: groups of 96 do not divide the 64 inputs of model\.layers\.0\.self_attn"),
        (Recipe("int4", 16), r"^group_size: must be a multiple of 32, is 16; use 32, 64 or 128$"),
        (Recipe("int4", 0), r"^group_size: must be a multiple of 32, is 0; use 32, 64 or 128$"),
        (Recipe("int4", -32), r"^group_size: must be a multiple of 32, is -32; use 32, 64 or 128$"),
        (Recipe("int8", 64), r"^group_size: int8 has one scale for each output; leave it out"),
        (Recipe("int8", fp8_scales="block"), r"^fp8_scales: applies to fp8 only, and the method is int8; leave it out"),
        (
            Recipe("fp8", texts=TEXTS),
            r"^calibration: fp8 uses no calibration: each weight is rounded to the nearest value; leave it out",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(plain: Path, tmp_path: Path, recipe: Recipe, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        write_quantized(files_at(plain), tmp_path / "small", recipe, CPU)
    assert not (tmp_path / "small").exists()


def test_folders_with_files_and_quantized_models_are_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^output: .* is there already"):
        write_quantized(files_at(plain), plain, Recipe("int8"), CPU)
    write_quantized(files_at(plain), tmp_path / "small", Recipe("int8"), CPU)
    with pytest.raises(ConfigError, match=r"^model: small is quantized already"):
        write_quantized(files_at(tmp_path / "small"), tmp_path / "again", Recipe("int8"), CPU)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_fails_leaves_nothing_and_can_be_repeated(
    plain: Path, tmp_path: Path, error: type[BaseException]
) -> None:
    target = tmp_path / "small"

    def stop(_: str, done: int, __: int) -> None:
        assert [path.name for path in tmp_path.iterdir()] == ["small.partial"]
        if done == 2:
            raise error

    with pytest.raises(error):
        write_quantized(files_at(plain), target, Recipe("int8"), CPU, stop)
    assert list(tmp_path.iterdir()) == []
    target.mkdir()
    assert write_quantized(files_at(plain), target, Recipe("int8"), CPU) == 14
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_what_a_killed_run_left_is_replaced_and_the_config_comes_last(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, copied = tmp_path / "small.partial", []
    partial.mkdir()
    (partial / "old").write_text("of an earlier run")
    copy = shutil.copyfile

    def copy_before_config(source: Path, target: Path) -> None:
        assert not (partial / "config.json").exists()
        copied.append(target.name)
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", copy_before_config)
    write_quantized(files_at(plain), tmp_path / "small", Recipe("int8"), CPU)
    assert "tokenizer.json" in copied
    assert not partial.exists()
    assert not (tmp_path / "small" / "old").exists()
    assert (tmp_path / "small" / "config.json").exists()


def test_outputs_that_cannot_be_replaced_are_refused_before_anything_is_written(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(plain, tmp_path / "small.partial")
    with pytest.raises(ConfigError, match=r"^output: small\.partial is where files are written first"):
        write_quantized(files_at(source), tmp_path / "small", Recipe("int8"), CPU)
    assert (source / "config.json").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match=r"^output: .*here is the working folder, which cannot be replaced"):
        write_quantized(files_at(plain), Path(), Recipe("int8"), CPU)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_disk_that_is_full_is_named_as_the_output(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("quire.runtime.quantized_checkpoints.checkpoint.save_file", fail)
    with pytest.raises(ConfigError, match=r"^output: .*small cannot be written: .*No space left on device; give a fol"):
        write_quantized(files_at(plain), tmp_path / "small", Recipe("int8"), CPU)
    assert list(tmp_path.iterdir()) == []


def test_a_tied_head_and_experts_are_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    tied = hf_checkpoint(tmp_path / "tied", transformers.LlamaConfig(**sizes, tie_word_embeddings=True))
    with pytest.raises(ConfigError, match=r"^head: the model's head is its embedding table"):
        write_quantized(files_at(tied), tmp_path / "small", Recipe("int8", head=True), CPU)
    mixture = transformers.Qwen3MoeConfig(
        **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1, head_dim=16
    )
    experts = hf_checkpoint(tmp_path / "experts", mixture)
    with pytest.raises(
        ConfigError, match=r"^model: models with mixtures of experts cannot be written as quantized checkpoints"
    ):
        write_quantized(files_at(experts), tmp_path / "small", Recipe("int8"), CPU)
