"""RecurrentGemma: settings beside those of the table, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from family_bench import SIZES, change_config, check_parity, hf_checkpoint, hf_model
from quire.config.fields import Fields
from quire.config.parallel import ParallelConfig
from quire.config.rank_model import rank_model
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.models.recurrent_gemma import read_recurrent_gemma
from quire.types.errors import ModelLoadError

transformers = pytest.importorskip("transformers")
PUBLISHED = {  # of RecurrentGemma 2B
    "architectures": ["RecurrentGemmaForCausalLM"], "model_type": "recurrent_gemma", "attention_bias": False,
    "attention_dropout": 0.0, "attention_window_size": 2048, "block_types": ["recurrent", "recurrent", "attention"],
    "conv1d_width": 4, "embeddings_scale_by_sqrt_dim": True, "head_dim": 256, "hidden_activation":
    "gelu_pytorch_tanh", "hidden_size": 2560, "intermediate_size": 15360, "logits_soft_cap": 30.0, "lru_width": 2560,
    "num_attention_heads": 10, "num_hidden_layers": 26, "num_key_value_heads": 1, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "vocab_size": 256000, "w_init_variance_scale": 0.01,
}  # fmt: skip


def griffin(**changes: Any) -> Any:
    sizes = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
    own = {"block_types": ["recurrent", "attention"], "attention_window_size": 5, "pad_token_id": 0}
    return transformers.RecurrentGemmaConfig(**(sizes | own | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"lru_width": 32, "conv1d_width": 2, "attention_bias": True},
        {"num_key_value_heads": 2, "logits_soft_cap": 5.0, "attention_window_size": 64},
    ],
)
def test_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    model = hf_model(griffin(**changes))
    model.save_pretrained(tmp_path)
    check_parity(tmp_path, attention="auto", model=model)


def test_settings_of_a_published_model_are_read() -> None:
    config = read_recurrent_gemma(Fields("config.json", PUBLISHED))
    assert (config.heads.num_query, config.heads.num_kv, config.heads.dim) == (10, 1, 256)
    assert (config.intermediate_size, config.rope.dim, config.logit_softcap) == (7_680, 128, 30.0)
    assert config.embedding_scale == 50.5  # sqrt(2560) in bfloat16
    assert config.recurrent is not None
    assert config.recurrent.layers == tuple(layer for layer in range(26) if layer % 3 != 2)
    assert [config.windows[layer] for layer in (0, 2, 25)] == [None, 2_048, None]
    assert config.kv_specs[0].state_bytes == 4 * 2_560 * 4


def test_ranks_share_whole_blocks_of_gates() -> None:
    config, parallel = read_recurrent_gemma(Fields("config.json", PUBLISHED)), ParallelConfig(tensor=4)
    shares = [rank_model(config, parallel.place(rank)).recurrent for rank in range(4)]
    sizes = [0 if each is None else each.value_heads for each in shares]
    assert sorted(sizes) == [512, 512, 768, 768]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_types", ["recurrent"]),
        ("block_types", ["recurrent", "linear"]),
        ("lru_width", 33),
        ("conv1d_width", 9),
        ("hidden_activation", "silu"),
        ("embeddings_scale_by_sqrt_dim", False),
        ("attention_window_size", 0),
        ("logits_soft_cap", 0.0),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, key: str, value: object) -> None:
    change_config(hf_checkpoint(tmp_path, griffin()), **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))
