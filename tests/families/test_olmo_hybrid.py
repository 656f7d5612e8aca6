"""Olmo Hybrid and XGLM: settings beside those of the table, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_bench import SIZES, change_config, check_parity, hf_checkpoint, hf_model, load_bench, num_calls
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.types.errors import ModelLoadError
from tiny_models import VOCAB

transformers = pytest.importorskip("transformers")
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
HEADS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


def hybrid(**changes: Any) -> Any:
    own = {"layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0, "num_key_value_heads": 1}
    return transformers.OlmoHybridConfig(**(SIZES | own | ROPE | HEADS | changes))


def xglm(**changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 2}
    return transformers.XGLMConfig(**(sizes | {"max_position_embeddings": 64, "pad_token_id": 0} | changes))


def split_convolutions(folder: Path, key_size: int) -> None:
    """Cut convolutions as published files have them: transformers writes three parts of equal size."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{word}_conv1d") for word in "qkv"]
        whole = torch.cat([tensors[each] for each in names])
        cut = whole.split([key_size, key_size, len(whole) - 2 * key_size])
        tensors |= {each: part.clone() for each, part in zip(names, cut, strict=True)}
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("attention", ["reference", "auto"])
def test_values_may_be_wider_than_keys(attention: str, tmp_path: Path) -> None:
    model = hf_model(hybrid(linear_num_value_heads=4, linear_value_head_dim=24))
    model.save_pretrained(tmp_path)
    split_convolutions(tmp_path, 32)
    check_parity(tmp_path, attention=attention, model=model)


@pytest.mark.parametrize("changes", [{"rope_parameters": None}, {"attention_bias": True, "linear_conv_kernel_dim": 2}])
def test_settings_of_olmo_hybrid(changes: dict[str, Any], tmp_path: Path) -> None:
    model = hf_model(hybrid(**changes))
    model.save_pretrained(tmp_path)
    check_parity(tmp_path, attention="auto", model=model)


def test_strengths_of_at_most_one_are_compiled(tmp_path: Path) -> None:
    model = hf_model(hybrid(linear_allow_neg_eigval=False))
    model.save_pretrained(tmp_path)
    check_parity(tmp_path, attention="auto", model=model)
    assert num_calls(load_bench(tmp_path)) == 0


def test_sizes_that_a_file_leaves_out_follow_from_its_heads(tmp_path: Path) -> None:
    path = hf_checkpoint(tmp_path, hybrid())
    change_config(path, **dict.fromkeys(HEADS), hidden_size=256, num_attention_heads=4)
    with pytest.raises(ModelLoadError, match=r"shape .*, the config says"):  # of 4 heads of 48 keys and 96 values
        open_checkpoint(files_at(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", ["full_attention", "full_attention"]),
        ("layer_types", ["linear_attention", "linear_attention"]),
        ("hidden_act", "gelu"),
        ("linear_conv_kernel_dim", 9),
        ("linear_num_value_heads", 3),
    ],
)
def test_what_olmo_hybrid_does_not_support_is_refused(key: str, value: object, tmp_path: Path) -> None:
    change_config(hf_checkpoint(tmp_path, hybrid()), **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))


@pytest.mark.parametrize("changes", [{"scale_embedding": False, "activation_function": "relu"}, {"ffn_dim": 40}])
def test_settings_of_xglm(changes: dict[str, Any], tmp_path: Path) -> None:
    model = hf_model(xglm(**changes))
    model.save_pretrained(tmp_path)
    check_parity(tmp_path, attention="auto", model=model)


@pytest.mark.parametrize(
    ("key", "value"), [("add_cross_attention", True), ("activation_function", "tanh"), ("d_model", 33)]
)
def test_what_xglm_does_not_support_is_refused(key: str, value: object, tmp_path: Path) -> None:
    change_config(hf_checkpoint(tmp_path, xglm()), **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))
