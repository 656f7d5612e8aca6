"""Quantized checkpoints as other tools and versions write them: further tensors, other packings, several schemes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from make_quantized import FIXTURES, QUERY
from quire.config.fields import Fields
from quire.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.hf.quantized.float8 import Float8
from quire.runtime.quantization.activations import ActivationScheme
from quire.runtime.quantization.packing import pack
from quire.types.errors import ModelLoadError

DOWN = "model.layers.0.mlp.down_proj"


def stored(name: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / name / "model.safetensors")


def settings_of(name: str) -> dict[str, Any]:
    given: dict[str, Any] = json.loads((FIXTURES / name / "config.json").read_text())["quantization_config"]
    return given


def edited(
    name: str, folder: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None
) -> Checkpoint:
    """A copy of a checkpoint with further or other tensors, and other settings of quantization."""
    config = json.loads((FIXTURES / name / "config.json").read_text())
    config["quantization_config"] |= settings or {}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({**stored(name), **tensors}, folder / "model.safetensors")
    return open_checkpoint(files_at(folder))


def original(name: str) -> Checkpoint:
    return open_checkpoint(files_at(FIXTURES / name))


def test_biases_of_zeros_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    """Old versions of AutoGPTQ wrote one for every quantized matrix."""
    layers = [name.removesuffix(".qweight") for name in stored("gptq-4bit") if name.endswith(".qweight")]
    scales = stored("gptq-4bit")
    biases = {f"{layer}.bias": torch.zeros(scales[f"{layer}.scales"].shape[1]).half() for layer in layers}
    found = edited("gptq-4bit", tmp_path, biases)
    assert found.names == original("gptq-4bit").names
    assert torch.equal(found.read(f"{DOWN}.weight"), original("gptq-4bit").read(f"{DOWN}.weight"))


def test_a_bias_of_numbers_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    bias = torch.zeros(64).half()
    bias[63] = 0.5
    with pytest.raises(ModelLoadError, match=r"down_proj\.bias: is not zero, and a llama model .* has no such bias"):
        edited("gptq-4bit", tmp_path, {f"{DOWN}.bias": bias})


@pytest.mark.parametrize(
    ("name", "word"), [("ct-w4a16-asym", "weight_zero_point"), ("gptq-4bit-asym-v2", "qzeros"), ("awq", "qzeros")]
)
def test_zero_points_may_all_be_zero(name: str, word: str, tmp_path: Path) -> None:
    before = original(name).read_quantized(f"{QUERY}.weight")
    zeros = torch.zeros_like(stored(name)[f"{QUERY}.{word}"])
    found = edited(name, tmp_path, {f"{QUERY}.{word}": zeros}).read_quantized(f"{QUERY}.weight")
    assert before is not None
    assert found is not None
    assert (found.values().amin(dim=1) >= 0).all(), "levels count from 0"
    assert (before.values().amin(dim=1) < 0).all()


@pytest.mark.parametrize(
    ("name", "word"), [("gptq-4bit", "qweight"), ("ct-w4a16", "weight_packed"), ("ct-w4a16", "weight_scale")]
)
def test_levels_and_scales_of_zeros_are_a_damaged_download(name: str, word: str, tmp_path: Path) -> None:
    blank = torch.zeros_like(stored(name)[f"{QUERY}.{word}"])
    with pytest.raises(ModelLoadError, match=rf"q_proj\.{word}: all \d+ bytes are zero; download it again"):
        edited(name, tmp_path, {f"{QUERY}.{word}": blank}).read(f"{QUERY}.weight")


def test_a_name_goes_before_regular_expressions_and_these_before_classes(tmp_path: Path) -> None:
    """Regular expressions by the alphabet; whatever the order of the config."""
    usual = settings_of("ct-w4a16")["config_groups"]["group_0"]
    rounded = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "group"}

    def scheme(target: str, size: int) -> dict[str, Any]:
        return {**usual, "targets": [target], "input_activations": rounded | {"group_size": size}}

    groups = [
        scheme("Linear", 2), scheme("re:.*self_attn.*", 4), scheme("re:.*[qkv]_proj", 8), scheme(QUERY, 16),
        scheme("re:.*o_proj", 32), scheme("re:.*o_proj", 64),
    ]  # fmt: skip
    found = edited("ct-w4a16", tmp_path, {}, {"config_groups": {str(i): each for i, each in enumerate(groups)}})

    def size(part: str) -> int | None:
        weight = found.read_quantized(f"model.layers.0.{part}.weight")
        assert weight is not None
        assert weight.activations is not None
        return weight.activations.group

    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj")
    assert [size(part) for part in parts] == [16, 8, 64, 2]


def float8_matrix(inputs: int, block: int, **settings: Any) -> ActivationScheme:
    """What a float8 matrix with blocks of so many inputs does to activations."""
    prefix = "quantization_config."
    given = {"weight_block_size": [2, block], **settings}
    method = Float8(Fields("config.json", {prefix + key: value for key, value in given.items()}, prefix))
    scales = torch.ones(1, -(-inputs // block))
    weight = method.read("layer", {"weight": torch.ones(2, inputs).to(torch.float8_e4m3fn), "weight_scale_inv": scales})
    assert weight.activations is not None
    return weight.activations


def test_a_last_group_of_activations_may_be_smaller() -> None:
    """As the down projection of DeepSeek-V2-Lite has it: 10944 inputs are 85.5 groups of 128."""
    scheme = float8_matrix(80, 32)
    assert scheme == ActivationScheme("fp8", group=32)
    x = torch.randn(3, 80, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [10.0], [0.1]])
    pieces = [ActivationScheme("fp8").rounded(piece) for piece in torch.split(x, 32, dim=1)]
    assert torch.equal(scheme.rounded(x), torch.cat(pieces, dim=1))


def test_scales_of_activations_are_powers_of_two_where_the_config_says_so() -> None:
    """As DeepSeek-V3.1 has it (`scale_fmt`): rounded up, so that no number is cut."""
    scheme = float8_matrix(80, 32, scale_fmt="ue8m0")
    x = torch.randn(3, 80, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [10.0], [0.1]])
    x[0, 0] = 448.0  # the scale is 1 already
    pieces = []
    for piece in torch.split(x, 32, dim=1):
        scale = torch.exp2(torch.ceil(torch.log2(piece.abs().amax(dim=1, keepdim=True) / 448)))
        pieces.append((piece / scale).to(torch.float8_e4m3fn).float() * scale)
    assert torch.equal(scheme.rounded(x), torch.cat(pieces, dim=1))
    assert not torch.equal(scheme.rounded(x), float8_matrix(80, 32).rounded(x))
    x[1, 40], x[2, 40] = float("nan"), float("inf")
    assert scheme.rounded(x).isfinite().all(dim=1).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale_fmt": "e5m3"}, r"quantization_config\.scale_fmt: 'e5m3' is not supported; supported: ue8m0"),
        (
            {"scale_fmt": "ue8m0", "weight_block_size": None, "activation_scheme": "static"},
            "scale_fmt: is for dynamic activation scales, but activation_scheme is static",
        ),
    ],
)
def test_other_scales_of_activations_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        float8_matrix(80, 32, **settings)


STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (STATIC, ("self_attn.k_scale", "self_attn.v_scale")),
        (STATIC, ("self_attn.kv_scale",)),
        (STATIC | {"kv_cache_scheme": "static"}, ()),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, ("self_attn.k_scale", "self_attn.v_scale")),
        ({}, ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale")),
    ],
)
def test_a_warning_says_that_scales_of_keys_and_values_are_not_used(
    settings: dict[str, Any], names: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scales = {f"model.layers.0.{name}": torch.tensor(0.5) for name in names}
    with caplog.at_level("WARNING", logger="quire.runtime"):
        found = edited("ct-fp8", tmp_path, scales, settings)
    assert found.names == original("ct-fp8").names
    said = [record.getMessage() for record in caplog.records]
    assert [f"({len(names)} scales) is ignored" in line for line in said] == [True]


def pack_whole(numbers: Tensor, bits: int) -> Tensor:
    """As older versions of compressed-tensors do: no number lies across two words."""
    per_word = 32 // bits
    rows = [
        [sum(int(one) << (bits * i) for i, one in enumerate(row[begin : begin + per_word]))
         for begin in range(0, len(row), per_word)]
        for row in numbers.tolist()
    ]  # fmt: skip
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize("packer", [pack, pack_whole])
@pytest.mark.parametrize("bits", [3, 5, 6, 7, 4])
def test_bits_that_do_not_fill_words_are_read_in_both_packings(
    bits: int, packer: Callable[[Tensor, int], Tensor], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(bits)
    levels = torch.randint(1 << bits, (64, 64), generator=generator)
    zeros = torch.randint(1 << bits, (64, 2), generator=generator)
    scales = torch.rand(64, 2, generator=generator)
    groups = settings_of("ct-w4a16")["config_groups"]
    usual = groups["group_0"]
    own = {**usual, "targets": [QUERY], "weights": usual["weights"] | {"num_bits": bits, "symmetric": False}}
    tensors = {
        "weight_packed": packer(levels, bits),
        "weight_zero_point": packer(zeros.t(), bits).t().contiguous(),
        "weight_scale": scales,
    }
    found = edited(
        "ct-w4a16", tmp_path, {f"{QUERY}.{word}": one for word, one in tensors.items()},
        {"config_groups": groups | {"group_1": own}},
    ).read(f"{QUERY}.weight")  # fmt: skip
    wanted = (levels.view(64, 2, 32) - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)
    torch.testing.assert_close(found, wanted.flatten(1))
