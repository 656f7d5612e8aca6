"""GPT-NeoX against transformers."""

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
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def config(**changes: Any) -> Any:
    return transformers.GPTNeoXConfig(**{**SIZES, **changes})


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_one_after_the_other_without_biases_and_with_more_of_each_head_rotated(tmp_path: Path, share: float) -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": share}
    changes = {"use_parallel_residual": False, "attention_bias": False, "rope_parameters": rope}
    check_parity(hf_checkpoint(tmp_path, config(**changes)), attention="auto")


def test_the_names_of_published_files_mean_the_same(tmp_path: Path) -> None:
    wanted = logits_of(hf_checkpoint(tmp_path, config()))
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("lm_head", "embed_out"): value for name, value in load_file(file).items()}
    tensors |= {f"gpt_neox.layers.{layer}.attention.bias": torch.ones(1, 1, 64, 64) for layer in range(2)}
    tensors |= {f"gpt_neox.layers.{layer}.attention.masked_bias": torch.tensor(-1e9) for layer in range(2)}
    save_file(tensors, file, {"format": "pt"})
    change_config(tmp_path, rope_parameters=None, rotary_pct=0.25, rotary_emb_base=10_000)
    for (_, found), (_, want) in zip(logits_of(tmp_path), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize(("key", "value"), [("rope_parameters", {"rope_type": "longrope"}), ("hidden_act", "mish")])
def test_what_would_change_the_output_is_refused(tmp_path: Path, key: str, value: object) -> None:
    change_config(hf_checkpoint(tmp_path, config()), **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))
