"""DBRX and CodeGen: settings beside those of the table, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from family_bench import change_config, check_parity, hf_checkpoint, hf_model
from quire.config.fields import Fields
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.models.dbrx import read_dbrx
from quire.types.errors import ModelLoadError
from tiny_models import VOCAB

transformers = pytest.importorskip("transformers")
ATTENTION: dict[str, Any] = {"kv_n_heads": 1, "rope_theta": 10_000.0, "clip_qkv": 8}
MIXTURE: dict[str, Any] = {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}


def dbrx(attention: dict[str, Any] | None = None, mixture: dict[str, Any] | None = None) -> Any:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64}
    inner = {"attn_config": ATTENTION | (attention or {}), "ffn_config": MIXTURE | (mixture or {})}
    return transformers.DbrxConfig(**sizes, **inner)


def codegen(**changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_ctx": 64}
    return transformers.CodeGenConfig(**(sizes | {"rotary_dim": 16} | changes))


@pytest.mark.parametrize(
    ("attention", "mixture"),
    [
        ({"clip_qkv": 0.5, "kv_n_heads": 2}, {"moe_normalize_expert_weights": None, "moe_top_k": 3}),
        ({}, {"ffn_act_fn": {"name": "gelu"}, "moe_jitter_eps": 0.1}),
    ],
)
def test_settings_of_dbrx(attention: dict[str, Any], mixture: dict[str, Any], tmp_path: Path) -> None:
    model = hf_model(dbrx(attention, mixture))
    model.save_pretrained(tmp_path)
    check_parity(tmp_path, attention="auto", model=model)


def test_settings_of_dbrx_instruct_are_read_with_the_base_that_attention_has() -> None:
    settings = {
        "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "attn_config": {"clip_qkv": 8, "kv_n_heads": 8,
        "model_type": "", "rope_theta": 500000}, "d_model": 6144, "emb_pdrop": 0.0, "ffn_config": {"ffn_hidden_size":
        10752, "model_type": "", "moe_jitter_eps": 0.01, "moe_loss_weight": 0.05, "moe_num_experts": 16, "moe_top_k":
        4}, "initializer_range": 0.02, "max_seq_len": 32768, "n_heads": 48, "n_layers": 40, "output_router_logits":
        False, "resid_pdrop": 0.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 100352,
    }  # fmt: skip
    config = read_dbrx(Fields("config.json", settings))
    assert (config.heads.num_query, config.heads.num_kv, config.heads.dim) == (48, 8, 128)
    assert (config.rope.theta, config.rope.max_position, config.qkv_limit) == (500_000, 32_768, 8)
    assert config.experts is not None
    assert (config.experts.num, config.experts.num_used, config.experts.size) == (16, 4, 10_752)
    assert config.experts.is_normalized


def test_experts_of_dbrx_must_fill_the_rows_of_a_tensor(tmp_path: Path) -> None:
    path = hf_checkpoint(tmp_path, dbrx())
    tensors = load_file(path / "model.safetensors")
    name = "transformer.blocks.1.ffn.experts.mlp.w2"
    save_file(tensors | {name: tensors[name][:-1].clone()}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"w2.*4 experts"):
        open_checkpoint(files_at(path))


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("attn_config", "clip_qkv", -1),
        ("attn_config", "kv_n_heads", 3),
        ("ffn_config", "moe_normalize_expert_weights", 2.0),
        ("ffn_config", "moe_top_k", 5),
        ("ffn_config", "ffn_act_fn", {"name": "tanh"}),
        ("ffn_config", "ffn_act_fn", "silu"),
    ],
)
def test_what_dbrx_does_not_support_is_refused(tmp_path: Path, part: str, key: str, value: object) -> None:
    path = hf_checkpoint(tmp_path, dbrx())
    inner = ATTENTION if part == "attn_config" else MIXTURE
    change_config(path, **{part: inner | {key: value}})
    with pytest.raises(ModelLoadError, match=rf"{part}\.{key}"):
        open_checkpoint(files_at(path))


@pytest.mark.parametrize("changes", [{"activation_function": "relu", "n_inner": 40}, {"n_head": 8, "rotary_dim": 4}])
def test_settings_of_codegen(changes: dict[str, Any], tmp_path: Path) -> None:
    model = hf_model(codegen(**changes))
    model.save_pretrained(tmp_path)
    check_parity(tmp_path, attention="auto", model=model)


@pytest.mark.parametrize(("key", "value"), [("n_head", 2), ("rotary_dim", 18), ("tie_word_embeddings", True)])
def test_what_codegen_does_not_support_is_refused(tmp_path: Path, key: str, value: object) -> None:
    path = hf_checkpoint(tmp_path, codegen())
    change_config(path, **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(path))
