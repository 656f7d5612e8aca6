"""Mixtures of experts against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from family_bench import SIZES, check_parity, hf_checkpoint, hf_model
from quire.runtime.loading.hf.config import hf_model_config
from quire.types.errors import ModelLoadError

transformers = pytest.importorskip("transformers")
BACKENDS = ["reference", "auto", "triton"]
QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}


def mixtral(**changes: Any) -> Any:
    return transformers.MixtralConfig(**SIZES, **{"num_local_experts": 5, "num_experts_per_tok": 2, **changes})


def qwen3_moe(**changes: Any) -> Any:
    return transformers.Qwen3MoeConfig(**SIZES, **{**QWEN, "head_dim": 16, **changes})


def qwen2_moe(**changes: Any) -> Any:
    return transformers.Qwen2MoeConfig(**SIZES, **{**QWEN, "shared_expert_intermediate_size": 24, **changes})


@pytest.mark.parametrize("attention", BACKENDS)
def test_mixtral(attention: str, tmp_path: Path) -> None:
    check_parity(hf_checkpoint(tmp_path, mixtral()), attention=attention)


@pytest.mark.parametrize(
    ("attention", "changes"),
    [
        ("reference", {"mlp_only_layers": [0]}),
        ("auto", {"decoder_sparse_step": 2}),
        ("auto", {"norm_topk_prob": True}),
        ("triton", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    ],
)
def test_qwen3_moe(attention: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check_parity(hf_checkpoint(tmp_path, qwen3_moe(**changes)), attention=attention)


@pytest.mark.parametrize("attention", BACKENDS)
def test_qwen2_moe(attention: str, tmp_path: Path) -> None:
    check_parity(hf_checkpoint(tmp_path, qwen2_moe()), attention=attention)


@pytest.mark.parametrize("make", [mixtral, qwen3_moe, qwen2_moe])
def test_layers_say_how_many_weights_a_mixture_has(make: Callable[[], Any], tmp_path: Path) -> None:
    model = hf_model(make())
    model.save_pretrained(tmp_path)
    config = hf_model_config(tmp_path)
    assert config.num_parameters == sum(weight.numel() for weight in model.parameters())
    routers = sum(value.numel() for name, value in model.named_parameters() if name.endswith("gate.weight"))
    inside = (value for name, value in model.named_parameters() if ".layers." in name and value.dim() > 1)
    assert config.layer_weights[0] == sum(value.numel() for value in inside) - routers


@pytest.mark.parametrize(
    ("make", "changes", "named"),
    [
        (mixtral, {"num_local_experts": 4096}, "num_local_experts"),
        (mixtral, {"num_experts_per_tok": 6}, "num_experts_per_tok"),
        (mixtral, {"sliding_window": 16}, "sliding_window"),
        (qwen3_moe, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (qwen3_moe, {"mlp_only_layers": "all"}, "mlp_only_layers"),
        (qwen3_moe, {"moe_intermediate_size": 0}, "moe_intermediate_size"),
        (qwen2_moe, {"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    make: Callable[[], Any], changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelLoadError, match=named):
        hf_model_config(tmp_path)


def test_what_mixtral_takes_for_granted_is_what_transformers_does(tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    for key in ("rope_parameters", "rms_norm_eps", "sliding_window", "num_experts_per_tok"):
        values.pop(key)
    file.write_text(json.dumps(values))
    config, theirs = hf_model_config(tmp_path), transformers.MixtralConfig()
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.experts is not None
    assert config.experts.num_used == theirs.num_experts_per_tok
