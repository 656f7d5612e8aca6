"""HyperCLOVA X, MiniCPM 3, AFMoE, Granite with windows, Mellum 2, Hunyuan 3, Youtu and Jais 2: settings beside those of
the table, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from family_bench import change_config, check_parity, hf_checkpoint
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.types.errors import ModelLoadError
from tiny_models import VOCAB

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
LATENTS = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "hyperclovax": lambda: transformers.HyperCLOVAXConfig(**SIZES),
    "minicpm3": lambda: transformers.MiniCPM3Config(**SIZES, **LATENTS, num_key_value_heads=2),
    "afmoe": lambda: transformers.AfmoeConfig(**SIZES, **EXPERTS),
    "youtu": lambda: transformers.YoutuConfig(**SIZES, **LATENTS, num_key_value_heads=2),
    "granite_swa": lambda: transformers.GraniteSWAConfig(**SIZES, num_key_value_heads=1),
    "mellum": lambda: transformers.MellumConfig(**SIZES, **EXPERTS, num_key_value_heads=1),
    "hy_v3": lambda: transformers.HYV3Config(**SIZES, **EXPERTS, num_key_value_heads=1),
    "jais2": lambda: transformers.Jais2Config(**SIZES),
}


def test_attention_of_hyperclovax_without_a_factor_is_scaled_by_the_size_of_heads(tmp_path: Path) -> None:
    path = hf_checkpoint(tmp_path, CONFIGS["hyperclovax"]())
    change_config(path, attention_multiplier=None)
    check_parity(path, attention="auto")


def test_factors_of_minicpm3_that_are_null_are_one(tmp_path: Path) -> None:
    config = transformers.MiniCPM3Config(
        **SIZES, **LATENTS, num_key_value_heads=2, scale_depth=None, dim_model_base=None, tie_word_embeddings=False
    )
    path = hf_checkpoint(tmp_path, config)
    change_config(path, scale_depth=None, dim_model_base=None, v_head_dim=None)
    found = open_checkpoint(files_at(path)).config
    assert (found.residual_scale, found.logit_scale, found.embedding_scale) == (1.0, 1.0, 12.0)
    check_parity(path, attention="auto")


def test_residual_additions_of_minicpm3_are_scaled_by_the_number_of_layers(tmp_path: Path) -> None:
    found = open_checkpoint(files_at(hf_checkpoint(tmp_path, CONFIGS["minicpm3"]()))).config
    assert found.residual_scale == pytest.approx(1.4 / math.sqrt(2))
    assert found.logit_scale == pytest.approx(256 / 32)


def test_layers_of_afmoe_that_see_all_tokens_have_no_positions(tmp_path: Path) -> None:
    path = hf_checkpoint(tmp_path, transformers.AfmoeConfig(**SIZES, **EXPERTS, global_attn_every_n_layers=2))
    found = open_checkpoint(files_at(path)).config
    assert (found.windows, found.layers_without_rope) == ((1_024, None), (1,))
    check_parity(path, attention="auto")


def test_all_layers_of_a_kind_have_one_base_of_frequencies(tmp_path: Path) -> None:
    config = transformers.GraniteSWAConfig(
        **(SIZES | {"num_hidden_layers": 3}), num_key_value_heads=1, layer_rope_theta=[10_000.0, 20_000.0, 30_000.0]
    )
    with pytest.raises(ModelLoadError, match="layer_rope_theta"):
        open_checkpoint(files_at(hf_checkpoint(tmp_path, config)))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("hyperclovax", "use_post_norm", False),
        ("hyperclovax", "logits_scaling", 0.0),
        ("minicpm3", "scale_depth", -1.0),
        ("minicpm3", "dim_model_base", 0),
        ("minicpm3", "qk_rope_head_dim", 7),
        ("minicpm3", "attention_bias", True),
        ("afmoe", "route_norm", False),
        ("afmoe", "score_func", "softmax"),
        ("afmoe", "n_group", 2),
        ("afmoe", "attention_bias", True),
        ("afmoe", "num_experts_per_tok", 5),
        ("afmoe", "global_attn_every_n_layers", 0),
        ("youtu", "attention_bias", True),
        ("granite_swa", "layer_rope_theta", [1.0, 0]),
        ("granite_swa", "layer_rope_theta", [10_000.0]),
        ("mellum", "mlp_layer_types", ["dense", "thin"]),
        ("mellum", "rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("hy_v3", "mlp_bias", True),
        ("hy_v3", "num_experts_per_tok", 5),
        ("jais2", "hidden_act", "tanh"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, name: str, key: str, value: object) -> None:
    path = hf_checkpoint(tmp_path, CONFIGS[name]())
    rest = {"layer_types": None} if key == "global_attn_every_n_layers" else {}
    change_config(path, **{key: value}, **rest)
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))
