"""Checkpoints of families that transformers has no class for, made of those of a family that computes the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

_NAMES = {
    "self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    "model.embed_tokens": "model.tok_embeddings", "lm_head": "output",
}  # fmt: skip


def pack_internlm2(folder: Path, config: Any) -> None:
    """Rename the tensors of a Llama, and pack queries, keys and values by group."""
    file, packed = folder / "model.safetensors", {}
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".self_attn.q_proj." in name:
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            groups = [part.unflatten(0, (config.num_key_value_heads, -1)) for part in parts]
            packed[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(groups, dim=1).flatten(0, 1)
        elif not re.search(r"self_attn\.[kv]_proj", name):
            found = next((place for place in _NAMES if f"{place}." in name), None)
            packed[name if found is None else name.replace(found, _NAMES[found])] = tensor.clone()
    save_file(packed, file)
    pack_internlm2_config(folder)


def pack_internlm2_config(folder: Path) -> None:
    """Name a Llama's config.json as InternLM 2's are named."""
    told = json.loads((folder / "config.json").read_text())
    told |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": told["attention_bias"]}
    (folder / "config.json").write_text(json.dumps(told))


def pack_mimo(folder: Path, config: Any) -> None:
    pack_mimo_config(folder)


def pack_mimo_config(folder: Path) -> None:
    """Name a Qwen2's config.json as MiMo's are named."""
    told = json.loads((folder / "config.json").read_text())
    told |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(told))


class Packed(NamedTuple):
    """The family of transformers that computes the same, and what turns its files into those of the other family."""

    source: str
    pack: Callable[[Path, Any], None]
    pack_config: Callable[[Path], None]


PACKED = {
    "internlm2": Packed("llama", pack_internlm2, pack_internlm2_config),
    "mimo": Packed("qwen2", pack_mimo, pack_mimo_config),
}
