"""Gemma 2 and 3 against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from family_parity import BACKENDS, COMMON, check_parity, hf_checkpoint

transformers = pytest.importorskip("transformers")
SMALL = COMMON | {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 6}


@pytest.mark.parametrize("attention", BACKENDS)
def test_gemma_2(attention: str, tmp_path: Path) -> None:
    more = {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    model = hf_checkpoint(tmp_path, transformers.Gemma2Config(**SMALL, **more))
    check_parity(tmp_path, model, attention)


def gemma3(**changes: object) -> object:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    more = {"query_pre_attn_scalar": 24, "layer_types": kinds, "rope_parameters": rope}
    return transformers.Gemma3TextConfig(**(SMALL | more | changes))


@pytest.mark.parametrize("attention", BACKENDS)
def test_gemma_3(attention: str, tmp_path: Path) -> None:
    check_parity(tmp_path, hf_checkpoint(tmp_path, gemma3()), attention)


def test_gemma_3_in_the_older_spelling(tmp_path: Path) -> None:
    model = hf_checkpoint(tmp_path, gemma3(layer_types=None, sliding_window_pattern=2))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in ("rope_parameters", "layer_types"):
        del config[key]
    config |= {
        "rope_theta": 5_000.0, "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "sliding_window_pattern": 2,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    check_parity(tmp_path, model, "auto")
