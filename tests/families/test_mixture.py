"""Mixtures of experts against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from family_bench import SIZES, check_parity, hf_checkpoint, hf_model, logits_of
from interpreter import HAS_TRITON
from quire.runtime.loading.hf.config import hf_model_config
from quire.types.errors import ModelLoadError

transformers = pytest.importorskip("transformers")
BACKENDS = ["reference", "auto", *(["triton"] if HAS_TRITON else [])]
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
        (BACKENDS[-1], {"mlp_only_layers": [1], "norm_topk_prob": True}),
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
    assert config.experts is not None
    assert config.num_parameters == sum(weight.numel() for weight in model.parameters())
    routers = sum(value.numel() for name, value in model.named_parameters() if name.endswith("gate.weight"))
    inside = (value for name, value in model.named_parameters() if ".layers." in name and value.dim() > 1)
    assert config.layer_weights[0] == sum(value.numel() for value in inside) - routers
    stacked = sum(value.numel() for name, value in model.named_parameters() if ".experts." in name)
    num, used = config.experts.num, config.experts.num_used
    assert config.num_active == config.num_parameters - stacked // num * (num - used)


@pytest.mark.parametrize(
    ("make", "changes", "named"),
    [
        (mixtral, {"num_local_experts": 4096}, "num_local_experts"),
        (mixtral, {"num_experts_per_tok": 6}, "num_experts_per_tok"),
        (mixtral, {"sliding_window": 0}, "sliding_window"),
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


def upcycled(dense: torch.nn.Module, num: int) -> torch.nn.Module:
    """A mixture whose experts are all the dense model's MLP; its routers are random."""
    mixture = hf_model(mixtral(num_local_experts=num))
    theirs = dense.state_dict()
    with torch.no_grad():
        for name, value in mixture.named_parameters():
            path = name.partition(".mlp.")[0]
            if name.endswith("experts.gate_up_proj"):
                pair = theirs[f"{path}.mlp.gate_proj.weight"], theirs[f"{path}.mlp.up_proj.weight"]
                value.copy_(torch.cat(pair).expand_as(value))
            elif name.endswith("experts.down_proj"):
                value.copy_(theirs[f"{path}.mlp.down_proj.weight"].expand_as(value))
            elif not name.endswith("mlp.gate.weight"):
                value.copy_(theirs[name])
    return mixture


@pytest.mark.parametrize("attention", BACKENDS)
def test_a_dense_model_upcycled_to_equal_experts_gives_its_own_tokens(attention: str, tmp_path: Path) -> None:
    theta = {"rope_type": "default", "rope_theta": 1e6}
    dense = hf_model(transformers.LlamaConfig(**SIZES, rope_parameters=theta, rms_norm_eps=1e-5))
    dense.save_pretrained(tmp_path / "dense")
    upcycled(dense, 4).save_pretrained(tmp_path / "mixture")
    plain, mixed = (logits_of(tmp_path / name, attention=attention) for name in ("dense", "mixture"))
    for (tokens, logits), (mixed_tokens, mixed_logits) in zip(plain, mixed, strict=True):
        assert mixed_tokens == tokens
        torch.testing.assert_close(mixed_logits, logits, rtol=1e-4, atol=1e-4)
