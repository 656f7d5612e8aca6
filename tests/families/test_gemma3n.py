"""Gemma 3n's text models: settings beside those of the table, GGUF files, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from family_bench import change_config, check_parity, hf_model, load_bench, logits_of, num_calls
from gguf_files import Stored, stored, write_gguf
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.hf.config import hf_model_config
from quire.types.errors import ModelLoadError
from tiny_models import VOCAB

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
KINDS = ["sliding_attention", "full_attention"] * 2
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "sliding_window": 6,
    "num_kv_shared_layers": 2, "layer_types": KINDS, "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB, "activation_sparsity_pattern": [0.95, 0.0, 0.5, 0.0],
}  # fmt: skip


def saved(folder: Path, **changes: Any) -> Any:
    model = hf_model(transformers.Gemma3nTextConfig(**(SMALL | changes)))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {"altup_num_inputs": 2, "laurel_rank": 8},
        {"altup_num_inputs": 3, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4},
        {"attention_bias": True, "final_logit_softcapping": 3.0},
    ],
)
@pytest.mark.parametrize("attention", ["reference", "auto"])
def test_gemma_3n(attention: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check_parity(tmp_path, attention=attention, model=saved(tmp_path, **changes))


@pytest.mark.parametrize("attention", ["reference", "auto"])
def test_bfloat16_is_near_float32(attention: str, tmp_path: Path) -> None:
    saved(tmp_path, activation_sparsity_pattern=[0.0] * 4)  # which gates are cut depends on digits it has not
    wanted = logits_of(tmp_path, attention="reference")
    found = logits_of(tmp_path, attention=attention, dtype="bfloat16")
    for (_, logits), (_, near) in zip(wanted, found, strict=True):
        torch.testing.assert_close(near[0], logits[0], rtol=0.1, atol=0.8)


def test_only_streams_and_sparse_gates_are_called_in_python(tmp_path: Path) -> None:
    saved(tmp_path)
    assert num_calls(load_bench(tmp_path)) == 4 * 3 + 2  # prediction, correction and addition; two sparse MLPs


def test_tokens_without_a_side_input_have_that_of_the_first(tmp_path: Path) -> None:
    model = saved(tmp_path, vocab_size_per_layer_input=VOCAB - 30)
    assert hf_model_config(tmp_path).per_layer_vocab == VOCAB - 30
    check_parity(tmp_path, attention="auto", model=model)


def test_the_text_model_of_a_multimodal_checkpoint_is_read(tmp_path: Path) -> None:
    text = saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    nested = {f"model.language_model.{name.removeprefix('model.')}": value for name, value in tensors.items()}
    others = ("vision_tower.conv.weight", "audio_tower.conv.weight", "embed_vision.norm.weight")
    save_file(nested | {f"model.{name}": torch.ones(2) for name in others}, tmp_path / "model.safetensors")
    settings = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    inner = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"text_config": inner, "vision_config": {}}))
    check_parity(tmp_path, attention="auto", model=text)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"altup_active_idx": 1}, "altup_active_idx"),
        ({"altup_num_inputs": 1}, "altup_num_inputs"),
        ({"altup_correct_scale": False}, "altup_correct_scale"),
        ({"laurel_rank": 0}, "laurel_rank"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input"),
        ({"intermediate_size": [96, 96, 96, 48]}, "intermediate_size"),
        ({"activation_sparsity_pattern": [0.95, 0.0]}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": [0.95, 0.0, 0.0, 1.0]}, "activation_sparsity_pattern"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    saved(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=named):
        open_checkpoint(files_at(tmp_path))


def gguf_file(path: Path, model: Any, kind: str = "F32", **changes: Any) -> Path:
    """As converters write it: projections of streams are stacked, shares of gates are thresholds."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3N, config.num_hidden_layers)
    found: dict[str, Tensor] = {name: value for name, value in model.state_dict().items() if "lm_head" not in name}
    for stacked in ("altup_projections", "altup_unembed_projections"):
        parts = [found.pop(f"model.{stacked}.{number}.weight") for number in range(config.altup_num_inputs - 1)]
        found[f"model.{stacked}.weight"] = torch.stack(parts)
    tensors: list[Stored] = []
    for name, value in found.items():
        place = f"{names.get_name(name.removesuffix('.weight'))}.weight"
        tensors.append(stored(place, value.numpy(), kind if value.dim() > 1 and "altup" not in place else "F32"))
    settings = {
        "context_length": 128, "embedding_length": 64, "block_count": 4, "feed_forward_length": [96] * 4,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "attention.value_length": 16, "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 6,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "attention.shared_kv_layers": config.num_kv_shared_layers, "altup.active_idx": 0,
        "altup.num_inputs": config.altup_num_inputs, "final_logit_softcapping": 30.0, "rope.freq_base": 1e6,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "activation_sparsity_scale": [
            NormalDist().inv_cdf(share) if share else -math.inf for share in config.activation_sparsity_pattern
        ],
    } | changes  # fmt: skip
    metadata = {"general.architecture": "gemma3n"} | {f"gemma3n.{key}": value for key, value in settings.items()}
    return write_gguf(path, metadata, tensors)


def test_gguf_files_are_read(tmp_path: Path) -> None:
    model = saved(tmp_path)
    path = gguf_file(tmp_path / "m.gguf", model)
    ours, theirs = open_checkpoint(files_at(path)).config, hf_model_config(tmp_path)
    for key in ("sparsity", "streams", "laurel_rank", "kv_layers", "windows", "heads", "rope", "local_rope"):
        assert getattr(ours, key) == getattr(theirs, key), key
    check_parity(path, attention="auto", model=model)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"altup.active_idx": 1}, "altup.active_idx"),
        ({"activation_sparsity_scale": [1.0]}, "activation_sparsity_scale"),
        ({"activation_sparsity_scale": [math.inf] * 4}, "activation_sparsity_scale"),
        ({"embedding_length_per_layer_input": 0}, "embedding_length_per_layer_input"),
    ],
)
def test_gguf_settings_that_cannot_be_are_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", saved(tmp_path), **changes)
    with pytest.raises(ModelLoadError, match=named):
        open_checkpoint(files_at(path))
