"""Phi against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from family_bench import change_config, check_parity, hf_checkpoint
from quire.config.model import Rope
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
    return transformers.PhiConfig(**{**SIZES, **changes})


def test_grouped_heads_of_which_most_is_not_rotated(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
    changes = {
        "num_attention_heads": 4,
        "hidden_size": 64,
        "num_key_value_heads": 2,
        "rope_parameters": rope,
        "hidden_act": "gelu",
    }
    check_parity(hf_checkpoint(tmp_path, config(**changes)), attention="auto")


def test_a_factor_outside_the_rope_parameters_is_read(tmp_path: Path) -> None:
    hf_checkpoint(tmp_path, config())
    change_config(tmp_path, rope_parameters=None, rope_theta=500.0, partial_rotary_factor=0.4)
    assert open_checkpoint(files_at(tmp_path)).config.rope == Rope(500.0, max_position=64, dim=6)


def test_a_part_of_a_head_that_has_no_pairs_is_refused(tmp_path: Path) -> None:
    hf_checkpoint(tmp_path, config())
    change_config(tmp_path, rope_parameters=None, partial_rotary_factor=0.2)
    with pytest.raises(
        ModelLoadError, match="partial_rotary_factor: 0.2 of a head of size 16 cannot be rotated in pairs"
    ):
        open_checkpoint(files_at(tmp_path))


@pytest.mark.parametrize(("key", "value"), [("qk_layernorm", True), ("tie_word_embeddings", True)])
def test_what_would_change_the_output_is_refused(tmp_path: Path, key: str, value: object) -> None:
    change_config(hf_checkpoint(tmp_path, config()), **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))
