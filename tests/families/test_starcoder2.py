"""StarCoder2 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from family_bench import change_config, check_parity, hf_checkpoint
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
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "sliding_window": 6,
}


def config(**changes: Any) -> Any:
    return transformers.Starcoder2Config(**{**SIZES, **changes})


def test_without_biases_and_window_and_with_a_head_of_its_own(tmp_path: Path) -> None:
    changes = {"use_bias": False, "tie_word_embeddings": False, "sliding_window": None}
    check_parity(hf_checkpoint(tmp_path, config(**changes)), attention="auto")


@pytest.mark.parametrize(("key", "value"), [("sliding_window", 0), ("hidden_act", "mish")])
def test_what_would_change_the_output_is_refused(tmp_path: Path, key: str, value: object) -> None:
    change_config(hf_checkpoint(tmp_path, config()), **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))
