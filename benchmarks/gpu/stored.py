"""Random checkpoints in the format in which a model is published, for models whose weights cannot be made at load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.runtime.quantization.mxfp4 import GROUP, GROUP_BYTES

SPREAD = 0.02  # standard deviation of the weights
EXPONENT = 120  # of MXFP4 groups: stored values have a standard deviation of 2.9, so the weights have one of 0.023


def write_gpt_oss(config: dict[str, Any], folder: Path) -> None:
    """Write weights of gpt-oss with experts in MXFP4, one file per layer. All layers have the same weights."""
    hidden, heads, kv, dim = (
        config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layer = {
        "input_layernorm.weight": _ones(hidden), "post_attention_layernorm.weight": _ones(hidden),
        "self_attn.sinks": _numbers(heads), "mlp.router.weight": _numbers(config["num_local_experts"], hidden),
        "mlp.router.bias": _numbers(config["num_local_experts"]),
        **_linear("self_attn.q_proj", heads * dim, hidden), **_linear("self_attn.k_proj", kv * dim, hidden),
        **_linear("self_attn.v_proj", kv * dim, hidden), **_linear("self_attn.o_proj", hidden, heads * dim),
        **_experts("mlp.experts.gate_up_proj", config["num_local_experts"], 2 * config["intermediate_size"], hidden),
        **_experts("mlp.experts.down_proj", config["num_local_experts"], hidden, config["intermediate_size"]),
    }  # fmt: skip
    vocabulary = config["vocab_size"]
    rest = {
        "model.embed_tokens.weight": _numbers(vocabulary, hidden), "lm_head.weight": _numbers(vocabulary, hidden),
        "model.norm.weight": _ones(hidden),
    }  # fmt: skip
    files = {"model-rest.safetensors": rest}
    for number in range(config["num_hidden_layers"]):
        named = {f"model.layers.{number}.{name}": tensor for name, tensor in layer.items()}
        files[f"model-{number:05}.safetensors"] = named
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    index = {"weight_map": {tensor: name for name, tensors in files.items() for tensor in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _ones(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def _numbers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=SPREAD)


def _linear(name: str, outputs: int, inputs: int) -> dict[str, Tensor]:
    return {f"{name}.weight": _numbers(outputs, inputs), f"{name}.bias": _numbers(outputs)}


def _experts(name: str, num: int, outputs: int, inputs: int) -> dict[str, Tensor]:
    shape = (num, outputs, inputs // GROUP)
    return {
        f"{name}_blocks": torch.randint(256, (*shape, GROUP_BYTES), dtype=torch.uint8),
        f"{name}_scales": torch.full(shape, EXPONENT, dtype=torch.uint8),
        f"{name}_bias": _numbers(num, outputs),
    }
