"""Mamba-2 layers, alone (Mamba 2) and beside attention (Granite 4, Bamba, Falcon-H1): settings of config.json, and
precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_bench import SIZES, change_config, check_parity, hf_checkpoint, logits_of
from family_models import GRANITE
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.hf.config import hf_model_config
from quire.types.errors import ModelLoadError

transformers = pytest.importorskip("transformers")
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 2}
KINDS = {"layer_types": ["linear_attention", "full_attention"]}


def granite(**changes: Any) -> Any:
    settings = SIZES | MAMBA | KINDS | GRANITE | {"num_local_experts": 0, "shared_intermediate_size": 48}
    return transformers.GraniteMoeHybridConfig(**(settings | changes))


def falcon(**changes: Any) -> Any:
    return transformers.FalconH1Config(**(SIZES | MAMBA | {"mamba_d_ssm": 48} | changes))


@pytest.mark.parametrize("attention", ["reference", "auto"])
@pytest.mark.parametrize("norm", [{"mamba_rms_norm": False}, {"mamba_rms_norm": True, "mamba_norm_before_gate": False}])
def test_outputs_of_falcon_may_have_no_norm_or_one_behind_the_gate(
    norm: dict[str, Any], attention: str, tmp_path: Path
) -> None:
    given = falcon(**norm, ssm_out_multiplier=0.5, attention_out_multiplier=0.8, mlp_multipliers=[1.5, 0.5])
    check_parity(hf_checkpoint(tmp_path, given), attention=attention)


def test_projections_and_convolutions_may_have_other_biases(tmp_path: Path) -> None:
    check_parity(hf_checkpoint(tmp_path, granite(mamba_proj_bias=True, mamba_conv_bias=False)), attention="auto")


def test_bfloat16_says_about_the_same(tmp_path: Path) -> None:
    path = hf_checkpoint(tmp_path, granite())
    for (_, logits), (_, wanted) in zip(logits_of(path, dtype="bfloat16"), logits_of(path), strict=True):
        torch.testing.assert_close(logits[0], wanted[0], rtol=0.1, atol=0.15)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", ["mamba", "sliding_attention"]),
        ("layer_types", ["mamba", "mamba"]),
        ("mamba_d_state", 512),
        ("mamba_d_head", 24),
        ("mamba_n_groups", 3),
        ("mamba_d_conv", 9),
        ("time_step_limit", [0.0, 0.1]),
        ("position_embedding_type", "alibi"),
        ("hidden_act", "gelu"),
    ],
)
def test_what_would_change_the_output_is_refused(key: str, value: object, tmp_path: Path) -> None:
    change_config(hf_checkpoint(tmp_path, granite()), **{key: value})
    with pytest.raises(ModelLoadError, match="mamba_n_heads" if key == "mamba_n_groups" else key):
        open_checkpoint(files_at(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention_bias", True), ("mlp_bias", True), ("ssm_multipliers", [1.0]), ("attention_in_multiplier", 0)],
)
def test_what_factors_do_not_allow_is_refused(key: str, value: object, tmp_path: Path) -> None:
    change_config(hf_checkpoint(tmp_path, falcon()), **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))


def nemotron(**changes: Any) -> Any:
    sizes = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"}
    own = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "head_dim": 16}
    kinds = {"layers_block_type": ["linear_attention", "full_attention", "mlp"], "time_step_min": 1e-9}
    return transformers.NemotronHConfig(**(sizes | own | kinds | changes))


def test_biases_and_old_names_of_layers_of_nemotron_are_read(tmp_path: Path) -> None:
    path = hf_checkpoint(tmp_path, nemotron(use_bias=True, mlp_bias=True, use_conv_bias=False))
    expected = logits_of(path)
    check_parity(path, attention="auto")
    change_config(path, layers_block_type=None, hybrid_override_pattern="M*-")
    for (_, found), (_, wanted) in zip(logits_of(path), expected, strict=True):
        torch.testing.assert_close(found, wanted)


MOE = {"layers_block_type": ["linear_attention", "moe", "full_attention"]}
EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "routed_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip


@pytest.mark.parametrize("settings", [{"norm_topk_prob": False}, {"mlp_hidden_act": "silu"}])
def test_experts_of_nemotron_may_keep_their_weights_and_have_another_activation(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    path = hf_checkpoint(tmp_path, nemotron(**MOE, **EXPERTS, **settings))
    expected = logits_of(path)
    check_parity(path, attention="auto")
    change_config(path, layers_block_type=None, hybrid_override_pattern="ME*")
    for (_, found), (_, wanted) in zip(logits_of(path), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_experts_of_latents_count_by_their_size_and_a_draft_head_beside_them_is_not_read(tmp_path: Path) -> None:
    path = hf_checkpoint(tmp_path, nemotron(**MOE, **EXPERTS, moe_latent_size=8))
    expected = logits_of(path)
    check_parity(path, attention="auto")
    config = open_checkpoint(files_at(path)).config
    assert config.num_parameters - config.num_active == 2 * 2 * 8 * 16
    file = path / "model.safetensors"
    save_file(load_file(file) | {"mtp.layers.0.eh_proj.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    for (_, found), (_, wanted) in zip(logits_of(path), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_experts_of_nemotron_count_as_two_matrices_each_where_a_token_does_not_use_them(tmp_path: Path) -> None:
    config = open_checkpoint(files_at(hf_checkpoint(tmp_path, nemotron(**MOE, **EXPERTS)))).config
    assert config.num_parameters - config.num_active == 2 * 2 * config.hidden_size * 16


@pytest.mark.parametrize(
    ("key", "value"), [("moe_latent_size", 0), ("n_shared_experts", 2), ("mlp_bias", True), ("n_group", 3)]
)
def test_what_experts_of_nemotron_do_not_support_is_refused(key: str, value: object, tmp_path: Path) -> None:
    change_config(hf_checkpoint(tmp_path, nemotron(**MOE, **EXPERTS)), **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layers_block_type", ["linear_attention", "mlp"]),
        ("residual_in_fp32", True),
        ("time_step_limit", [0.001, 0.1]),
        ("mamba_hidden_act", "gelu"),
        ("ssm_state_size", 300),
    ],
)
def test_what_nemotron_does_not_support_is_refused(key: str, value: object, tmp_path: Path) -> None:
    change_config(hf_checkpoint(tmp_path, nemotron()), **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))


def mamba2(**changes: Any) -> Any:
    own = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
    sizes = {key: SIZES[key] for key in ("vocab_size", "num_hidden_layers")}
    return transformers.Mamba2Config(**(sizes | own | {"hidden_size": 32, "pad_token_id": 0} | changes))


@pytest.mark.parametrize(
    "changes",
    [{"use_bias": True, "use_conv_bias": False}, {"expand": 1, "num_heads": 2, "tie_word_embeddings": True}],
)
def test_settings_of_mamba2(changes: dict[str, Any], tmp_path: Path) -> None:
    check_parity(hf_checkpoint(tmp_path, mamba2(**changes)), attention="auto")


@pytest.mark.parametrize("attention", ["reference", "auto"])
def test_mamba2_norms_each_group_as_mamba_ssm_does(
    attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated  # the class that norms by group

    def by_group(own: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        norm = Zamba2RMSNormGated(64, group_size=32, eps=own.variance_epsilon)
        norm.weight = own.weight
        normed: torch.Tensor = norm(x, gate)
        return normed

    monkeypatch.setattr(MambaRMSNormGated, "forward", by_group)
    check_parity(hf_checkpoint(tmp_path, mamba2(n_groups=2)), attention=attention)


def test_settings_of_codestral_mamba_are_read(tmp_path: Path) -> None:
    settings = {
        "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4, "eos_token_id":
        0, "expand": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 8192,
        "layer_norm_epsilon": 1e-05, "model_type": "mamba2", "n_groups": 8, "norm_before_gate": True, "num_heads": 128,
        "num_hidden_layers": 64, "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True,
        "state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_limit":
        [0.0, {"__float__": "Infinity"}], "time_step_rank": 256, "use_bias": False, "use_conv_bias": True,
        "vocab_size": 32768,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = hf_model_config(tmp_path)
    recurrent = config.recurrent
    assert recurrent is not None
    assert recurrent.mamba is not None
    assert (recurrent.key_heads, recurrent.value_heads, recurrent.key_dim, recurrent.value_dim) == (8, 128, 128, 64)
    assert (recurrent.mamba.norm_groups, recurrent.mamba.norm_first, config.num_layers) == (8, False, 64)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_heads", 5),
        ("n_groups", 3),
        ("hidden_act", "gelu"),
        ("time_step_limit", [0.0, 0.1]),
        ("rms_norm", False),
        ("state_size", 300),
        ("conv_kernel", 1),
    ],
)
def test_what_mamba2_does_not_support_is_refused(key: str, value: object, tmp_path: Path) -> None:
    change_config(hf_checkpoint(tmp_path, mamba2()), **{key: value})
    with pytest.raises(ModelLoadError, match="num_heads" if key == "n_groups" else key):
        open_checkpoint(files_at(tmp_path))


@pytest.mark.parametrize(("size", "inner"), [("null", 128), (None, 1_024)])
def test_heads_of_falcon_have_the_usual_size_unless_null_leaves_it_to_the_hidden_size(
    size: str | None, inner: int, tmp_path: Path
) -> None:
    settings = falcon(hidden_size=64, mamba_expand=2).to_dict() | {"architectures": ["FalconH1ForCausalLM"]}
    del settings["mamba_d_ssm"], settings["mamba_d_head"]
    (tmp_path / "config.json").write_text(json.dumps(settings | ({} if size is None else {"mamba_d_ssm": None})))
    recurrent = hf_model_config(tmp_path).recurrent
    assert recurrent is not None
    assert recurrent.value_heads * recurrent.value_dim == inner
