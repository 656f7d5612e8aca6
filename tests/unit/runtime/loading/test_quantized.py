"""Checkpoints that reference tools wrote quantized (tests/support/make_quantized.py) are read as these tools read them,
and answer as their models do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from make_quantized import FIXTURES, QUERY, TOKENS, probe, sample
from quire.config.engine import DeviceConfig
from quire.kernels.native.int8_panels import is_int8_format
from quire.kernels.native.loader import why_not_native
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.gemm import BaseGemm
from quire.runtime.layers.native import GatheredMultiply, IntegerGemm, LevelGemm, NativeMultiply
from quire.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.quantization.activations import RoundedMultiply
from quire.runtime.quantization.float8_weight import Float8Weight
from quire.runtime.quantization.levels import LevelWeight
from quire.runtime.quantization.packing import pack, unpack
from quire.types.errors import ModelLoadError
from quire.types.step import Chunk
from tiny_models import Bench, engine_config

NAMES = sorted(path.name for path in FIXTURES.iterdir())
TABLES = [name for name in NAMES if "nf4" in name or "fp4" in name]  # held as 8-bit levels, see test_bitsandbytes.py


@cache
def opened(name: str) -> Checkpoint:
    return open_checkpoint(files_at(FIXTURES / name))


@cache
def expected(name: str) -> Mapping[str, Tensor]:
    return load_file(FIXTURES / name / "expected.safetensors")


def test_there_is_a_checkpoint_of_every_method() -> None:
    methods = {json.loads((FIXTURES / name / "config.json").read_text())["quantization_config"]["quant_method"]
               for name in NAMES}  # fmt: skip
    assert methods == {"gptq", "awq", "compressed-tensors", "bitsandbytes"}


@pytest.mark.parametrize("name", NAMES)
def test_matrices_are_those_that_the_tool_itself_makes_of_its_files(name: str) -> None:
    layers = {layer: product for layer, product in expected(name).items() if layer not in ("logits", "rounded")}
    assert len(layers) == 7
    for layer, wanted in layers.items():
        weight = opened(name).read_quantized(f"{layer}.weight")
        assert isinstance(weight, Float8Weight if "fp8" in name else LevelWeight)
        values = weight.values()
        assert torch.equal(values, opened(name).read(f"{layer}.weight"))
        found = values.double() @ probe(values.shape[1])
        step = float(wanted.abs().max()) * 2**-8 + 1e-3  # tools round the numbers they make to half precision
        step *= 2 if name in TABLES else 1
        torch.testing.assert_close(found.float(), wanted, rtol=0.0, atol=step)


def last_logits(name: str, attention: str, dtype: str = "float32", *, integer: bool = True) -> Tensor:
    config = engine_config(device="cpu", dtype=dtype)  # type: ignore[arg-type]
    config = replace(config, device=replace(config.device, cpu_weights="integer" if integer else "float"))
    bench = Bench(opened(name), config, attention=attention)
    bench.add(0, TOKENS)
    bench.run((), (Chunk(0, 0, len(TOKENS), (0,)),))
    return bench.sampler.seen[0][0]


@pytest.mark.parametrize("name", [name for name in NAMES if "logits" in expected(name)])
def test_logits_are_those_of_the_tools_own_model(name: str) -> None:
    wanted = expected(name)["logits"][-1]
    found = last_logits(name, "reference")
    error = float((found - wanted).pow(2).mean().sqrt() / wanted.std())
    # Tools run in half precision, which moves many activations to another of the few numbers there are.
    assert error < (0.1 if "rounded" in expected(name) else 0.025 if name in TABLES else 0.015), error


@pytest.mark.parametrize("name", [name for name in NAMES if "rounded" in expected(name)])
def test_activations_are_rounded_as_the_tool_rounds_them(name: str) -> None:
    weight = opened(name).read_quantized(f"{QUERY}.weight")
    assert weight is not None
    assert weight.activations is not None
    x, wanted = sample(weight.shape[1]), expected(name)["rounded"]
    found = weight.activations.rounded(x)
    step = x.abs().amax(dim=1, keepdim=True) / 127 if "w8a8" in name else wanted.abs() / 8  # between two numbers
    assert ((found - wanted).abs() <= step * 1.01 + 1e-6).all()
    if "w8a8" not in name:  # there the tool's scales are a part in 255 smaller
        assert ((found - wanted).abs() <= step * 0.02 + 1e-6).float().mean() > 0.95
    assert not torch.equal(found, x)


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_native_products_give_what_expanded_weights_give(
    name: str, integer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales and offsets in half precision: a part in 2048, which only zero points and float32 scales need. Integer
    products round rows to 16 bits."""
    found = last_logits(name, "auto", integer=integer)
    monkeypatch.setattr(LevelGemm, "keeps", BaseGemm.keeps)
    for product in (LevelGemm, IntegerGemm):
        monkeypatch.setattr(product, "pack_quantized", BaseGemm.pack_quantized)
    wanted = last_logits(name, "auto")
    is_rounded = "asym" in name or name == "awq" or "bnb" in name
    exact = 1e-3 if integer else 1e-4
    bound = 0.02 if "a8" in name or "fp8" in name else 5e-3 if is_rounded else exact  # some activations round otherwise
    assert float((found - wanted).abs().max() / wanted.std()) < bound


@pytest.mark.parametrize("name", ["gptq-4bit", "awq", "ct-w4a16", "gptq-4bit-act-order", "ct-w8a8"])
def test_layers_hold_the_quantized_form_where_the_cpu_multiplies_by_it(name: str) -> None:
    if why_not_native(torch.float32, torch.device("cpu")) is not None:
        pytest.skip("no native kernels")
    builder = LayerBuilder(DeviceConfig("cpu", "float32", "float32"), opened(name).config.heads)
    layer = builder.qkv_linear(64, opened(name).config.heads, bias=False)
    for part in layer.parts:
        weight = opened(name).read_quantized(f"model.layers.0.self_attn.{part}")
        assert weight is not None
        assert layer.load_quantized(part, weight)
    layer.finish()
    multiply = layer.multiply
    while not isinstance(multiply, NativeMultiply):
        assert isinstance(multiply, GatheredMultiply | RoundedMultiply)
        multiply = multiply.multiply
    assert is_int8_format(multiply.weight)
    assert multiply.weight.format & 15 == (8 if "w8a8" in name else 4)  # bits


@pytest.mark.parametrize(("name", "expanded"), [("ct-fp8", 7), ("gptq-4bit", 0)])
def test_a_log_line_says_how_many_matrices_are_expanded(
    name: str, expanded: int, caplog: pytest.LogCaptureFixture
) -> None:
    if why_not_native(torch.float32, torch.device("cpu")) is not None:
        pytest.skip("no native kernels")
    with caplog.at_level("INFO", logger="quire.runtime"):
        last_logits(name, "auto")
    said = [record.getMessage() for record in caplog.records if "dequantized while loading" in record.getMessage()]
    assert len(said) == (1 if expanded else 0)
    assert all(f": {expanded} quantized matrices" in line for line in said)


def changed(name: str, folder: Path, quantization: dict[str, Any], words: Mapping[str, str] = {}) -> Path:
    """A copy of a checkpoint with other settings, and other words for its tensors."""
    folder.mkdir(exist_ok=True)
    config = json.loads((FIXTURES / name / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(FIXTURES / name / "model.safetensors")
    for old, new in words.items():
        tensors = {key.removesuffix(old) + new if key.endswith(old) else key: value for key, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def settings_of(name: str) -> dict[str, Any]:
    given: dict[str, Any] = json.loads((FIXTURES / name / "config.json").read_text())["quantization_config"]
    return given


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("ct-fp8-block", BLOCKS, {".weight_scale": ".weight_scale_inv"}),
        ("ct-fp8", {"quant_method": "fp8", "activation_scheme": "static"}, {}),
    ],
)
def test_fp8_checkpoints_are_read_by_blocks_and_by_tensors(
    name: str, settings: dict[str, Any], words: dict[str, str], tmp_path: Path
) -> None:
    found = open_checkpoint(files_at(changed(name, tmp_path, settings, words)))
    for layer in expected(name).keys() - {"logits", "rounded"}:
        weight, wanted = (each.read_quantized(f"{layer}.weight") for each in (found, opened(name)))
        assert weight is not None
        assert wanted is not None
        assert torch.equal(weight.values(), wanted.values())
        assert weight.activations == wanted.activations


def test_the_old_name_of_compressed_settings_is_read(tmp_path: Path) -> None:
    config = json.loads((FIXTURES / "ct-w4a16" / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    shutil.copytree(FIXTURES / "ct-w4a16", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    weight = open_checkpoint(files_at(tmp_path / "model")).read_quantized(f"{QUERY}.weight")
    wanted = opened("ct-w4a16").read_quantized(f"{QUERY}.weight")
    assert weight is not None
    assert wanted is not None
    assert torch.equal(weight.values(), wanted.values())


def test_groups_in_any_order_are_read(tmp_path: Path) -> None:
    """As older versions of the tool wrote them, with `weight_g_idx`."""
    folder = changed("ct-w4a16", tmp_path, settings_of("ct-w4a16"))
    tensors, name = load_file(folder / "model.safetensors"), f"{QUERY}.weight"
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    levels = unpack(tensors[f"{name}_packed"], 4, 64)
    tensors[f"{name}_packed"] = pack(levels[:, order], 4)
    tensors[f"{name}_g_idx"] = (order // 32).int()
    save_file(tensors, folder / "model.safetensors")
    found = open_checkpoint(files_at(folder)).read(name)
    assert torch.equal(found, opened("ct-w4a16").read(name)[:, order])


def compressed(**changes: Any) -> dict[str, Any]:
    """The scheme of W4A16 with changes of its members, by `weights.strategy` and the like."""
    settings = settings_of("ct-w4a16")
    group = settings["config_groups"]["group_0"]
    for key, value in changes.items():
        path = key.split("__")
        inner = settings if len(path) == 1 else group if len(path) == 2 and path[0] == "group" else group[path[0]]
        inner[path[-1]] = value
    return settings


ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq-4bit", {"bits": 5}, r"quantization_config\.bits: 5 is not supported; supported: 2, 3, 4, 8"),
        ("gptq-4bit", {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin' is not supported; supported: gptq"),
        ("gptq-4bit", {"is_marlin_format": True}, "is_marlin_format: weights in the order of Marlin"),
        ("gptq-4bit", {"pack_dtype": "int16"}, "pack_dtype: 'int16' is not supported"),
        ("gptq-4bit", {"adapter": {"name": "lora"}}, "adapter: weights that need an adapter"),
        ("gptq-4bit", {"bits": 8}, r"qweight: has 4 bits, config.json says 8"),
        ("gptq-4bit", {"quant_method": "aqlm"}, "aqlm weights of llama models are not supported; supported: gptq, awq"),
        ("bnb-nf4", {"load_in_4bit": False}, "load_in_4bit: neither load_in_4bit nor load_in_8bit is true"),
        ("awq", {"bits": 8}, "bits: 8 is not supported; supported: 4"),
        ("awq", {"version": "gemv"}, "version: 'gemv' is not supported; supported: gemm"),
        ("awq", {"zero_point": False}, "zero_point: weights without zero points"),
        ("ct-w4a16", {"format": "marlin-24", "group__format": None}, "format: 'marlin-24' is not supported; supported"),
        ("ct-w4a16", {"transform_config": {"config_groups": {"a": 1}}}, "transform_config: is not supported"),
        ("ct-w4a16", {"group__targets": ["Embedding"]}, "targets: 'Embedding' is not supported"),
        ("ct-w4a16", {"group__targets": ["re:("]}, "is no regular expression"),
        ("ct-w4a16", {"group__targets": ["re:.*mlp.*"]}, "config_groups has no target that matches it"),
        ("ct-w4a16", {"group__output_activations": ACTIVATIONS}, "output_activations: is not supported"),
        ("ct-w4a16", {"weights__num_bits": 16}, "num_bits: int of 16 bits is not supported"),
        (
            "ct-w4a16",
            {"weights__strategy": "tensor_group"},
            "strategy: 'tensor_group' is not supported for int weights",
        ),
        ("ct-w4a16", {"weights__group_size": 64}, "weight_packed: has 16 words for 256 inputs of 4 bits"),
        ("ct-w4a16", {"group__input_activations": ACTIVATIONS | {"num_bits": 4}}, "int of 4 bits is not supported"),
        ("ct-w4a16", {"group__input_activations": ACTIVATIONS | {"symmetric": False}}, "activations with zero points"),
        ("ct-w4a16", {"group__input_activations": ACTIVATIONS | {"dynamic": "local"}}, "dynamic: 'local'"),
        ("ct-w4a16", {"group__input_activations": ACTIVATIONS | {"strategy": "tensor"}}, "by tensor are not supported"),
        ("ct-fp8-block", {**BLOCKS, "weight_block_size": [128]}, "weight_block_size: must be two sizes"),
        ("ct-fp8-block", {**BLOCKS, "fmt": "e5m2"}, "fmt: 'e5m2' is not supported"),
        ("ct-fp8-block", {**BLOCKS, "activation_scheme": "static"}, "cannot be static where weights have blocks"),
        ("ct-fp8-block", {**BLOCKS, "weight_block_size": [64, 64]}, "weight_scale: has BF16 of shape"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = compressed(**changes) if name == "ct-w4a16" else {**settings_of(name), **changes}
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(files_at(changed(name, tmp_path, settings)))


def test_a_matrix_without_its_scales_is_refused(tmp_path: Path) -> None:
    folder = changed("awq", tmp_path, settings_of("awq"))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name != f"{QUERY}.scales"}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"q_proj\.scales: is missing; the config and the weights do not fit"):
        open_checkpoint(files_at(folder))


def test_groups_that_are_not_there_are_refused(tmp_path: Path) -> None:
    folder = changed("gptq-4bit-act-order", tmp_path, settings_of("gptq-4bit-act-order"))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{QUERY}.g_idx"][3] = 99
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"q_proj\.g_idx: names groups outside \[0, 2\)"):
        open_checkpoint(files_at(folder)).read(f"{QUERY}.weight")


def test_the_config_counts_what_is_held_quantized() -> None:
    """Seven matrices of 64 x 64, 32 x 64 (twice) and 128 x 64 (three times), and their scales and offsets."""
    assert opened("gptq-4bit").config.levels.parameters == 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64
    assert opened("gptq-4bit").config.levels.num_bytes == opened("gptq-4bit").config.levels.parameters * 20 // 32
    assert opened("ct-w8a8").config.levels.num_bytes == opened("ct-w8a8").config.levels.parameters * 36 // 32
    assert opened("ct-fp8").config.levels.parameters == 0
    on_gpu = opened("ct-fp8-block").config.levels
    assert on_gpu.gpu_is_float8
    assert on_gpu.gpu_parameters == 2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128
    assert on_gpu.gpu_bytes == on_gpu.gpu_parameters * 33 // 32  # a float32 for 128 weights
    assert opened("gptq-4bit").config.levels.gpu_bytes == opened("gptq-4bit").config.levels.parameters * 20 // 32
    assert opened("gptq-4bit").config.quantization == "gptq"


def test_four_bits_in_groups_of_16_count_as_the_bytes_that_a_gpu_holds(tmp_path: Path) -> None:
    folder = changed("ct-w4a16", tmp_path, compressed(weights__group_size=16))
    tensors = load_file(folder / "model.safetensors")
    scales = {name: one.repeat_interleave(2, dim=1) for name, one in tensors.items() if name.endswith("weight_scale")}
    save_file(tensors | scales, folder / "model.safetensors")
    held = open_checkpoint(files_at(folder)).config.levels
    assert held.gpu_parameters == 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64
    assert held.gpu_bytes == held.gpu_parameters + held.gpu_parameters // 16 * 4
