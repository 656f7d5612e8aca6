"""GPT-2 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_bench import change_config, check_parity, hf_checkpoint, logits_of
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.types.errors import ModelLoadError
from tiny_models import VOCAB

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}


def config(**changes: Any) -> Any:
    return transformers.GPT2Config(**{**SIZES, **changes})


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_other_activations_an_inner_size_and_a_head_of_its_own(tmp_path: Path, activation: str) -> None:
    changes = {"activation_function": activation, "n_inner": 80, "tie_word_embeddings": False}
    check_parity(hf_checkpoint(tmp_path, config(**changes)), attention="auto")


def test_a_checkpoint_of_the_stack_alone_with_masks_is_the_same_model(tmp_path: Path) -> None:
    hf_checkpoint(tmp_path, config())
    wanted = logits_of(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(2)}
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    for (_, found), (_, want) in zip(logits_of(tmp_path), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_the_same_tensor_twice_is_refused(tmp_path: Path) -> None:
    hf_checkpoint(tmp_path, config())
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"wte.weight": tensors["transformer.wte.weight"].clone()}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match="is the same tensor as"):
        open_checkpoint(files_at(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [("scale_attn_by_inverse_layer_idx", True), ("scale_attn_weights", False), ("add_cross_attention", True)],
)
def test_what_would_change_the_output_is_refused(tmp_path: Path, key: str, value: bool) -> None:
    hf_checkpoint(tmp_path, config())
    change_config(tmp_path, **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))
