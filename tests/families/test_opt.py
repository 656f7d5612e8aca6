"""OPT against transformers."""

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
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def config(**changes: Any) -> Any:
    return transformers.OPTConfig(**{**SIZES, **changes})


def test_without_biases_and_with_another_activation(tmp_path: Path) -> None:
    folder = hf_checkpoint(tmp_path, config(enable_bias=False, activation_function="gelu", tie_word_embeddings=False))
    check_parity(folder, attention="auto")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norms_first", [True, False])
def test_projected_embeddings_and_norms_after_the_additions(tmp_path: Path, tied: bool, norms_first: bool) -> None:
    sizes = {"word_embed_proj_dim": 16, "do_layer_norm_before": norms_first, "tie_word_embeddings": tied}
    check_parity(hf_checkpoint(tmp_path, config(**sizes)), attention="auto")


def test_a_checkpoint_of_the_stack_alone_is_the_same_model(tmp_path: Path) -> None:
    wanted = logits_of(hf_checkpoint(tmp_path, config()))
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): value for name, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    for (_, found), (_, want) in zip(logits_of(tmp_path), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_remove_final_layer_norm", True),
        ("layer_norm_elementwise_affine", False),
        ("word_embed_proj_dim", 0),
    ],
)
def test_what_would_change_the_output_is_refused(tmp_path: Path, key: str, value: object) -> None:
    change_config(hf_checkpoint(tmp_path, config()), **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))
