"""Writes GGUF files of DeepSeek, Qwen3-Next and Qwen3.5 from folders that transformers saved, in the layout that
llama.cpp's converter gives them: the tensors of its files of the same folders were compared with these, bit for bit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from gguf_files import Stored, stored, write_gguf

OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
INNER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b", "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    **{f"mlp.shared_expert{s}.{word}_proj": f"ffn_{word}_shexp" for s in ("", "s") for word in ("gate", "up", "down")},
    **{f"mlp.experts.{word}_proj": f"ffn_{word}_exps" for word in ("gate", "up", "down")},
}  # fmt: skip
WHOLE = {
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}  # fmt: skip
NAMES = {"deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def export_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    old: bool = False,
    settings: Mapping[str, object] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: Sequence[str] = (),
) -> Path:
    """Write the folder's model as a GGUF file. `kind`: of matrices whose rows it divides. `old`: in the layout of the
    first files of the family. `settings` and `tensors`: other ones, or more; a setting of None is taken away, as are
    the tensors `without`."""
    config = json.loads((folder / "config.json").read_text())
    name = NAMES.get(config["model_type"], "qwen35moe")
    numbers = (_deepseek(config, old) if name == "deepseek2" else _hybrid(config)) | dict(settings or {})
    metadata = {f"{name}.{key}": value for key, value in numbers.items() if value is not None}
    written = gguf_tensors(folder, old=old) | dict(tensors or {})
    stored_ones = [quantized_as(each, values, kind) for each, values in written.items() if each not in without]
    return write_gguf(path, {"general.architecture": name, **metadata}, stored_ones)


def gguf_tensors(folder: Path, *, old: bool = False) -> dict[str, np.ndarray]:
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    tied = config.get("tie_word_embeddings", False)
    found: dict[str, np.ndarray] = {}
    for name, value in _stack_experts(weights).items():
        if name in OUTER:
            shifts = name == "model.norm.weight" and "qwen" in config["model_type"]
            if not (tied and name == "lm_head.weight"):
                found[OUTER[name]] = (value + 1 if shifts else value).numpy()
            continue
        match = _LAYER.fullmatch(name)
        assert match is not None, name
        for inner, numbers in _inner(config, match[2], value, old=old):
            found[f"blk.{match[1]}.{inner}"] = numbers.contiguous().numpy()
    return found


def _inner(config: dict[str, Any], name: str, value: Tensor, *, old: bool) -> Iterator[tuple[str, Tensor]]:
    path, _, ending = name.rpartition(".")
    if "qwen" in config["model_type"]:
        yield from _hybrid_tensors(config, name, value, old=old)
    elif path == "self_attn.kv_b_proj" and not old:
        nope, dim = config["qk_nope_head_dim"], config["v_head_dim"]
        keys, values = value.view(config["num_attention_heads"], nope + dim, -1).split([nope, dim], dim=1)
        yield "attn_k_b.weight", keys.transpose(1, 2)
        yield "attn_v_b.weight", values
    elif name == "post_attention_layernorm.weight":
        yield "ffn_norm.weight", value
    else:
        yield WHOLE.get(name, f"{INNER.get(path)}.{ending}"), value


def _hybrid_tensors(config: dict[str, Any], name: str, value: Tensor, *, old: bool) -> Iterator[tuple[str, Tensor]]:
    path, _, ending = name.rpartition(".")
    word = name.removeprefix("linear_attn.").removesuffix(".weight")
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    size, shared = 2 * groups * dim, heads // groups
    tiled = config["model_type"] != "qwen3_next"

    def tile(numbers: Tensor, each: int, axis: int = 0) -> Tensor:
        """The first value head of each key head first."""
        shape = numbers.shape
        by_head = numbers.unflatten(axis, (groups, shared, each)).transpose(axis, axis + 1)
        return by_head.reshape(shape) if tiled else numbers

    if word == "in_proj_qkvz":
        if old:
            yield "ssm_in.weight", value
            return
        by_group = value.view(groups, -1, value.shape[1])
        parts = by_group.split([dim, dim, shared * value_dim, shared * value_dim], dim=1)
        *qkv, gates = (part.reshape(-1, value.shape[1]) for part in parts)
        yield "attn_qkv.weight", torch.cat(qkv)
        yield "attn_gate.weight", gates
    elif word in ("in_proj_qkv", "conv1d"):
        value = value.squeeze(1) if word == "conv1d" else value
        yield f"{INNER[path]}.weight", torch.cat((value[:size], tile(value[size:], value_dim)))
    elif word == "in_proj_z":
        yield "attn_gate.weight", tile(value, value_dim)
    elif word == "out_proj":
        yield "ssm_out.weight", tile(value, value_dim, axis=1)
    elif word in ("in_proj_b", "in_proj_a", "dt_bias", "A_log"):
        value = -torch.exp(value) if word == "A_log" else value
        yield WHOLE.get(name, f"{INNER.get(path)}.{ending}"), tile(value, 1)
    elif name == "post_attention_layernorm.weight":
        yield "post_attention_norm.weight", value + 1
    else:
        is_norm = path.endswith("norm") and path != "linear_attn.norm"
        yield f"{INNER[path]}.{ending}", value + 1 if is_norm else value


def _stack_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """All experts of a layer in one tensor for gate, up and down."""
    found: dict[str, Tensor] = {}
    single: dict[str, dict[int, Tensor]] = {}
    for name, value in weights.items():
        match = re.fullmatch(r"(.+\.mlp\.experts\.)(\d+\.)?(\w+?)(\.weight)?", name)
        if match is None:
            found[name] = value
        elif match[2] is not None:
            single.setdefault(f"{match[1]}{match[3]}.weight", {})[int(match[2][:-1])] = value
        elif match[3] == "gate_up_proj":
            gate, up = value.chunk(2, dim=1)
            found |= {f"{match[1]}gate_proj.weight": gate, f"{match[1]}up_proj.weight": up}
        else:
            found[f"{match[1]}{match[3]}.weight"] = value
    return found | {name: torch.stack([each[number] for number in sorted(each)]) for name, each in single.items()}


def quantized_as(name: str, values: np.ndarray, kind: str) -> Stored:
    """Small tensors stay float32, as do those whose rows are no whole blocks."""
    plain = values.ndim < 2 or "norm" in name or name.endswith(("ssm_conv1d.weight", "ffn_gate_inp.weight"))
    return stored(name, values, "F32" if plain or values.shape[-1] % 32 else kind)


def _common(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
    }  # fmt: skip


def _deepseek(config: dict[str, Any], old: bool) -> dict[str, Any]:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value, is_v3 = config["qk_nope_head_dim"] + rope, config["v_head_dim"], config["model_type"] == "deepseek_v3"
    heads = config["num_attention_heads"] if old else 1
    scaling = config["rope_parameters"]
    groups = ("n_group", "topk_group") if is_v3 or config["topk_method"] != "greedy" else ()
    yarn = {
        "rope.scaling.type": "yarn", "rope.scaling.factor": scaling["factor"],
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"],
        "rope.scaling.yarn_beta_fast": float(scaling["beta_fast"]),
        "rope.scaling.yarn_beta_slow": float(scaling["beta_slow"]),
    } if scaling["rope_type"] == "yarn" else {}  # fmt: skip
    return _common(config) | yarn | {
        "attention.head_count_kv": heads, "vocab_size": config["vocab_size"],
        "attention.key_length": key if old else rank + rope, "attention.value_length": value if old else rank,
        "attention.key_length_mla": None if old else key, "attention.value_length_mla": None if old else value,
        "attention.kv_lora_rank": rank, "attention.q_lora_rank": config["q_lora_rank"], "rope.dimension_count": rope,
        "expert_count": config["n_routed_experts"], "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"], "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": True if is_v3 and config["norm_topk_prob"] else None,
        "expert_gating_func": 2 if is_v3 else None, "leading_dense_block_count": config["first_k_dense_replace"],
        **{f"expert_group_{word}count": config[key] for word, key in zip(("", "used_"), groups, strict=False)},
    }  # fmt: skip


def _hybrid(config: dict[str, Any]) -> dict[str, Any]:
    kinds, share = config["layer_types"], config["rope_parameters"].get("partial_rotary_factor", 0.25)
    experts = {
        "expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
    } if "num_experts" in config else {}  # fmt: skip
    return _common(config) | experts | {
        "attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"], "rope.dimension_count": int(config["head_dim"] * share),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"], "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"], "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "full_attention_interval": kinds.index("full_attention") + 1,
    }  # fmt: skip
