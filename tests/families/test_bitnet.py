"""BitNet: matrices of -1, 0 and 1 as transformers multiplies by them, settings beside those of the table, and what is
refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from family_bench import PROMPTS, SIZES, change_config, check_parity, hf_checkpoint, hf_model, logits_of
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.quantization.region import Region
from quire.types.errors import ModelLoadError
from worker_executor import TinyEngine

transformers = pytest.importorskip("transformers")
bitnet = pytest.importorskip("transformers.integrations.bitnet")
OFFLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
ONLINE = OFFLINE | {"quantization_mode": "online"}
BITLINEAR = {"quant_method": "bitnet", "modules_to_not_convert": None}


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """transformers compiles its roundings."""
    with torch._dynamo.config.patch(disable=True):
        yield


def bitnet_config(**changes: Any) -> Any:
    return transformers.BitNetConfig(**(SIZES | {"num_key_value_heads": 1} | changes))


def is_packed(name: str) -> bool:
    return name.endswith("_proj.weight")


def write(folder: Path, config: Any, quantization: dict[str, Any]) -> nn.Module:
    """Write a checkpoint with random matrices in this format, and return transformers' model of it."""
    model = hf_model(config)
    model.save_pretrained(folder)
    file, divides = folder / "model.safetensors", quantization is BITLINEAR
    plain = load_file(file)
    stored = dict(plain)
    for name in [] if quantization is ONLINE else filter(is_packed, plain):
        scale = plain[name].abs().mean().half().float()
        stored[name] = bitnet.pack_weights((plain[name] / scale).round().clamp(-1, 1))
        stored[f"{name}_scale"] = (1 / scale if divides else scale).reshape(1)
    save_file(stored, file, {"format": "pt"})
    change_config(folder, quantization_config=quantization)
    own = transformers.BitNetQuantConfig(**{key: each for key, each in quantization.items() if key != "quant_method"})
    changed = bitnet.replace_with_bitnet_linear(model, ["lm_head"], own).to_empty(device="cpu", recurse=False)
    fill(changed, stored, plain)
    return changed


def fill(model: nn.Module, stored: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, bitnet.BitLinear | bitnet.AutoBitLinear):
            continue
        module.to_empty(device="cpu")
        weight = stored[f"{name}.weight"]
        if weight.dtype == torch.uint8 and isinstance(module, bitnet.AutoBitLinear):
            weight = bitnet.unpack_weights(weight, torch.float32)
        module.weight.data = weight if weight.dtype == torch.uint8 else weight.float()
        if f"{name}.weight_scale" in stored:
            module.weight_scale.data = stored[f"{name}.weight_scale"].float()
        if isinstance(module, bitnet.BitLinear):
            module.dtype = torch.float32
        if module.bias is not None:
            module.bias.data = plain[f"{name}.bias"]


def check_close(folder: Path, model: nn.Module, attention: str, within: float = 5e-3) -> None:
    for prompt, (tokens, found) in zip(PROMPTS, logits_of(folder, attention=attention), strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, -len(found) :]
        assert float((found - wanted).abs().max() / wanted.std()) < within


@pytest.mark.parametrize("attention", ["reference", "auto"])
def test_packed_matrices_and_rows_of_int8_give_the_logits_of_transformers(attention: str, tmp_path: Path) -> None:
    check_close(tmp_path, write(tmp_path, bitnet_config(hidden_size=64), OFFLINE), attention)


def test_plain_matrices_are_rounded_while_they_are_loaded(tmp_path: Path) -> None:
    """Their scales are held in float16, so that a few activations are rounded the other way."""
    check_close(tmp_path, write(tmp_path, bitnet_config(hidden_size=64), ONLINE), "auto", within=5e-2)


def test_a_llama_may_have_such_matrices_too_and_divide_by_the_scale(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**(SIZES | {"hidden_size": 64, "num_key_value_heads": 2, "mlp_bias": True}))
    check_close(tmp_path, write(tmp_path, config, BITLINEAR), "auto", within=5e-2)


def test_matrices_stay_in_4_bits(tmp_path: Path) -> None:
    write(tmp_path, bitnet_config(hidden_size=64, intermediate_size=96), OFFLINE)
    config = open_checkpoint(files_at(tmp_path)).config
    assert config.levels.parameters == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    assert config.levels.gpu_bytes < 0.6 * config.levels.gpu_parameters


@pytest.mark.parametrize("quantization", [OFFLINE, ONLINE], ids=["offline", "online"])
@pytest.mark.parametrize("region", [Region(range(10, 50), range(64)), Region(range(64), range(32, 64))])
def test_a_part_of_a_matrix_is_that_of_the_whole(region: Region, quantization: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, bitnet_config(hidden_size=64), quantization)
    checkpoint, name = open_checkpoint(files_at(tmp_path)), "model.layers.1.self_attn.q_proj.weight"
    whole, part = checkpoint.read_quantized(name), checkpoint.read_quantized(name, region)
    assert whole is not None
    assert part is not None
    rows, columns = (slice(each.start, each.stop) for each in (region.outputs, region.inputs))
    assert torch.equal(part.values(), whole.values()[rows, columns])
    assert len(part.values().unique()) == 3


def test_two_ranks_share_the_norms_of_a_packed_model(tmp_path: Path) -> None:
    """A rank rounds the elements it holds, with a scale of its own, so answers may part from those of one rank."""
    write(tmp_path, bitnet_config(hidden_size=64, num_key_value_heads=2), OFFLINE)
    checkpoint, prompts = open_checkpoint(files_at(tmp_path)), [list(range(3, 20)), [7, 5]]
    alone, shared = (TinyEngine(checkpoint, tensor=ranks).answers(prompts, max_tokens=1) for ranks in (1, 2))
    assert alone == shared


def test_answers_do_not_depend_on_how_prompts_are_cut(tmp_path: Path) -> None:
    write(tmp_path, bitnet_config(hidden_size=64), OFFLINE)
    checkpoint, prompts = open_checkpoint(files_at(tmp_path)), [list(range(3, 30)), [7, 5]]
    whole, cut = (TinyEngine(checkpoint, budget=budget).answers(prompts, max_tokens=12) for budget in (512, 5))
    assert whole == cut


@pytest.mark.parametrize(
    "changes", [{}, {"hidden_act": "silu", "attention_bias": True, "tie_word_embeddings": True}], ids=["usual", "other"]
)
def test_settings_of_plain_weights(changes: dict[str, Any], tmp_path: Path) -> None:
    check_parity(hf_checkpoint(tmp_path, bitnet_config(**changes)), attention="auto")


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_act", "xielu"), ("head_dim", 24), ("layer_types", ["sliding_attention"] * 2)]
)
def test_settings_that_are_not_supported_are_refused(key: str, value: object, tmp_path: Path) -> None:
    change_config(hf_checkpoint(tmp_path, bitnet_config()), **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"), [("linear_class", "ternary"), ("quantization_mode", "later"), ("use_rms_norm", True)]
)
def test_formats_that_are_not_supported_are_refused(key: str, value: object, tmp_path: Path) -> None:
    write(tmp_path, bitnet_config(), OFFLINE)
    change_config(tmp_path, quantization_config=OFFLINE | {key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_matrix_without_its_scale_and_an_unknown_code_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    write(tmp_path, bitnet_config(), OFFLINE)
    change_tensors(tmp_path, lambda tensors: tensors[name].fill_(0b11))
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight.*code 3"):
        open_checkpoint(files_at(tmp_path)).read_quantized(name)
    change_tensors(tmp_path, lambda tensors: tensors.pop(f"{name}_scale"))
    with pytest.raises(ModelLoadError, match=r"weight_scale.*is missing"):
        open_checkpoint(files_at(tmp_path))
