"""LFM2: what its config.json may say, in old and new spelling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from family_bench import SIZES, change_config, check_parity, hf_checkpoint, logits_of
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.types.errors import ModelLoadError

transformers = pytest.importorskip("transformers")
KINDS = ["conv", "full_attention"]


def config(**changes: Any) -> Any:
    return transformers.Lfm2Config(**(SIZES | {"layer_types": KINDS, "block_multiple_of": 16} | changes))


def test_sizes_and_layers_in_the_spelling_of_the_published_models_are_read(tmp_path: Path) -> None:
    old = {"layer_types": None, "full_attn_idxs": [1], "block_ff_dim": 96, "tie_embedding": False}
    path = hf_checkpoint(tmp_path, config(**old, block_ffn_dim_multiplier=1.5))
    expected = logits_of(path)
    change_config(path, **old, intermediate_size=1, tie_word_embeddings=True)
    for (_, found), (_, wanted) in zip(logits_of(path), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_mlps_may_have_the_given_size(tmp_path: Path) -> None:
    check_parity(hf_checkpoint(tmp_path, config(block_auto_adjust_ff_dim=False)), attention="auto")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", ["conv"] * 2),
        ("layer_types", ["linear_attention", "full_attention"]),
        ("conv_L_cache", 9),
        ("block_use_swiglu", False),
        ("full_attn_idxs", "all"),
    ],
)
def test_what_would_change_the_output_is_refused(key: str, value: object, tmp_path: Path) -> None:
    change_config(hf_checkpoint(tmp_path, config()), **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))


def test_experts_without_a_bias_of_their_scores_are_refused(tmp_path: Path) -> None:
    some = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1}
    given = transformers.Lfm2MoeConfig(**(SIZES | some | {"layer_types": KINDS}))
    change_config(hf_checkpoint(tmp_path, given), use_expert_bias=False)
    with pytest.raises(ModelLoadError, match="use_expert_bias"):
        open_checkpoint(files_at(tmp_path))
