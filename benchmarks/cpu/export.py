"""Writes a model that Quire can open as a Hugging Face directory, so that the peers run exactly the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.config.model import ModelConfig
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.model_config import read_model_config
from quire.runtime.loading.resolve import resolve_model

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def export_hugging_face(model: str | None, folder: Path, dtype: str) -> Path:
    """Write config.json and model.safetensors to `folder` and return it; a Hugging Face directory is returned
    unchanged.

    There is no tokenizer, because the workloads are token ids.
    """
    files = resolve_model(model)
    if files.kind == "hf":
        return files.path
    import torch
    from safetensors.torch import save_file

    checkpoint = open_checkpoint(files)
    try:
        kind: torch.dtype = getattr(torch, dtype)
        tensors = {name: checkpoint.read(name).to(kind).contiguous() for name in checkpoint.names}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    finally:
        checkpoint.close()
    (folder / "config.json").write_text(json.dumps(hugging_face_config(read_model_config(files), dtype), indent=1))
    return folder


def hugging_face_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json that describes the model."""
    assert not config.rope.frequency_factors, "transformers has no spelling for explicit frequency factors"
    rope: dict[str, Any] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta, **dict(config.rope.scaling)}
    return {
        "architectures": [CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.heads.num_query,
        "num_key_value_heads": config.heads.num_kv,
        "head_dim": config.heads.dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": rope,
        "max_position_embeddings": config.rope.max_position,
        "hidden_act": ACTIVATIONS[config.activation],
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": None,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
        "torch_dtype": dtype,
    }
