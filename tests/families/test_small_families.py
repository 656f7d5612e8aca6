"""Phi-3.5-MoE, GPT-Neo, nanochat and CWM: settings beside those of the table, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from family_bench import change_config, check_parity, hf_checkpoint
from quire.kernels.reference.experts import choose_experts, sparse_mixer
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.types.errors import ModelLoadError
from tiny_models import VOCAB

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "phimoe": lambda: transformers.PhimoeConfig(**SIZES, num_local_experts=4, lm_head_bias=True),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
    ),
    "nanochat": lambda: transformers.NanoChatConfig(**SIZES),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3, 2.0])
def test_the_sparse_mixer_has_the_experts_and_weights_of_transformers(seed: int, jitter: float) -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(seed)) * (1 + seed)
    wanted, experts = sparsemixer(logits, jitter_eps=jitter, training=False)
    chosen, weights = choose_experts(
        sparse_mixer(logits, jitter), 2, is_normalized=False, score_bias=torch.zeros(6)
    )  # fmt: skip
    found = torch.zeros(50, 6).scatter_(1, chosen, weights)
    torch.testing.assert_close(found, torch.zeros(50, 6).scatter_(1, experts, wanted))


def test_phimoe_has_one_factor_on_its_rotations(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        "short_mscale": 1.25, "long_mscale": 1.25, "original_max_position_embeddings": 64,
    }  # fmt: skip
    path = hf_checkpoint(tmp_path, transformers.PhimoeConfig(**SIZES, num_local_experts=4, rope_parameters=scaling))
    check_parity(path, attention="auto")
    change_config(path, rope_parameters=scaling | {"long_mscale": 1.5})
    with pytest.raises(ModelLoadError, match="long_mscale"):
        open_checkpoint(files_at(path))


def test_layers_of_gpt_neo_have_windows_in_turn(tmp_path: Path) -> None:
    config = open_checkpoint(files_at(hf_checkpoint(tmp_path, CONFIGS["gpt_neo"]()))).config
    assert config.windows == (None, 256)


def test_layers_of_gpt_neo_may_be_listed_one_by_one(tmp_path: Path) -> None:
    path = hf_checkpoint(tmp_path, CONFIGS["gpt_neo"]())
    change_config(path, attention_types=None, attention_layers=["local", "global"], window_size=5)
    assert open_checkpoint(files_at(path)).config.windows == (5, None)
    check_parity(path, attention="auto")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("phimoe", "num_experts_per_tok", 3),
        ("phimoe", "router_jitter_noise", -0.1),
        ("phimoe", "tie_word_embeddings", True),  # its head has a bias
        ("gpt_neo", "attention_types", [[["global", "sparse"], 1]]),
        ("gpt_neo", "attention_types", [[["global", "local"], 2]]),
        ("gpt_neo", "attention_layers", ["local", "global"]),  # attention_types has the other order
        ("gpt_neo", "attention_layers", ["global"]),
        ("gpt_neo", "attention_layers", ["global", ["local"]]),
        ("gpt_neo", "window_size", 0),
        ("nanochat", "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, name: str, key: str, value: object) -> None:
    change_config(hf_checkpoint(tmp_path, CONFIGS[name]()), **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))
