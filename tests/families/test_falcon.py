"""Falcon against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from family_bench import BACKENDS, change_config, check_parity, hf_checkpoint
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.types.errors import ModelLoadError
from tiny_models import VOCAB

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def config(**changes: Any) -> Any:
    return transformers.FalconConfig(**{**SIZES, **changes})


NEW = {"new_decoder_architecture": True, "num_kv_heads": 2, "num_attention_heads": 4, "hidden_size": 64}


@pytest.mark.parametrize("attention", BACKENDS)
def test_the_form_of_40b_has_groups_and_two_norms(tmp_path: Path, attention: str) -> None:
    check_parity(hf_checkpoint(tmp_path, config(**NEW)), attention=attention)


@pytest.mark.parametrize(
    "changes",
    [
        {**NEW, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 96},
        {"multi_query": False},
        {"bias": True},
        {"parallel_attn": False},
    ],
)
def test_other_forms(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_parity(hf_checkpoint(tmp_path, config(**changes)), attention="auto")


@pytest.mark.parametrize(("key", "value"), [("new_decoder_architecture", True), ("num_ln_in_parallel_attn", 2)])
def test_what_would_change_the_output_is_refused(tmp_path: Path, key: str, value: object) -> None:
    parallel = key != "new_decoder_architecture"
    change_config(hf_checkpoint(tmp_path, config(parallel_attn=parallel)), **{key: value})
    with pytest.raises(ModelLoadError, match=key if parallel else "parallel_attn"):
        open_checkpoint(files_at(tmp_path))
