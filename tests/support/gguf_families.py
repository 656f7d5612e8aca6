"""GGUF files of the tiny models of families, with the names, settings and orders of rows that llama.cpp's converter
gives them: the names are the `gguf` package's own. Its files of these models had the same settings, and tensors
that are equal to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from family_models import VOCAB, FamilyCase
from gguf_files import Stored, stored, write_gguf

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
Settings = Callable[[Any], Mapping[str, object]]
Turn = Callable[[str, Tensor, Any], Tensor]


def as_it_is(name: str, values: Tensor, config: Any) -> Tensor:
    return values


def in_pairs(name: str, values: Tensor, config: Any) -> Tensor:
    """Rows of a head's first half beside those of its second."""
    part = re.search(r"self_attn\.([qk])_proj", name)
    if part is None:
        return values
    heads = config.num_attention_heads if part[1] == "q" else config.num_key_value_heads
    return values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def ungrouped(name: str, values: Tensor, config: Any) -> Tensor:
    """All queries, all keys, all values, in place of groups."""
    if "query_key_value" not in name:
        return values
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_kv_heads", heads) if getattr(config, "multi_query", None) is not True else 1
    kv_heads = config.num_kv_heads if getattr(config, "new_decoder_architecture", False) else kv_heads
    groups = values.unflatten(0, (kv_heads, heads // kv_heads + 2, -1))
    parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return torch.cat([part.flatten(0, 2) for part in parts])


def by_outputs(name: str, values: Tensor, config: Any) -> Tensor:
    return values.t() if re.search(r"\.c_(attn|proj|fc)\.weight", name) else values


def plus_one(name: str, values: Tensor, config: Any) -> Tensor:
    """Weights of norms plus one."""
    return values + 1 if name.endswith("norm.weight") else values


def vectors(name: str, values: Tensor, config: Any) -> Tensor:
    """Rows of a bias as vectors."""
    return values.flatten() if "e_score" in name else values


def decoder_settings(config: Any) -> dict[str, object]:
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        **({"attention.layer_norm_rms_epsilon": config.rms_norm_eps} if hasattr(config, "rms_norm_eps") else {}),
    }


def whole_heads(config: Any) -> dict[str, object]:
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"attention.key_length": dim, "attention.value_length": dim}


def llama_settings(config: Any) -> dict[str, object]:
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {**decoder_settings(config), "vocab_size": VOCAB, "rope.dimension_count": dim}


def expert_settings(config: Any) -> dict[str, object]:
    num = getattr(config, "num_local_experts", None) or config.num_experts
    return {"expert_count": num, "expert_used_count": config.num_experts_per_tok}


def qwen_moe_settings(config: Any) -> dict[str, object]:
    shared = getattr(config, "shared_expert_intermediate_size", None)
    return {
        **decoder_settings(config), **expert_settings(config),
        **(whole_heads(config) if getattr(config, "head_dim", None) else {}),
        "expert_feed_forward_length": config.moe_intermediate_size,
        **({"expert_shared_feed_forward_length": shared} if shared else {}),
    }  # fmt: skip


def sigmoid_settings(config: Any) -> dict[str, object]:
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    return {
        **decoder_settings(config), **whole_heads(config), "rope.dimension_count": int(share * dim),
        "expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_gating_func": 2,
    }  # fmt: skip


def glm_moe_settings(config: Any) -> dict[str, object]:
    return {
        **sigmoid_settings(config),
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_group_count": config.n_group, "expert_group_used_count": config.topk_group,
    }  # fmt: skip


def afmoe_settings(config: Any) -> dict[str, object]:
    return {
        **llama_settings(config), **whole_heads(config), **expert_settings(config),
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.num_shared_experts,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_weights_scale": config.route_scale,
        "attention.sliding_window": config.sliding_window,
    }  # fmt: skip


def ernie_moe_settings(config: Any) -> dict[str, object]:
    return {
        **decoder_settings(config), "expert_count": config.moe_num_experts, "expert_used_count": config.moe_k,
        "interleave_moe_layer_step": 1, "leading_dense_block_count": config.moe_layer_start_index,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.moe_num_shared_experts,
        "expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads,
    }  # fmt: skip


def minimax_settings(config: Any) -> dict[str, object]:
    return {**sigmoid_settings(config), "expert_feed_forward_length": config.intermediate_size}


def granite_settings(config: Any) -> dict[str, object]:
    return {
        **llama_settings(config),
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def phi3_settings(config: Any) -> dict[str, object]:
    rope = config.rope_parameters or {}
    dim = config.hidden_size // config.num_attention_heads
    scaling: dict[str, object] = {
        "rope.dimension_count": dim,
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
    }
    if "long_factor" in rope:
        scaling["rope.scaling.attn_factor"] = 1.1055415868759155  # of sequences four times as long as 512 tokens
    return {**decoder_settings(config), **scaling, "attention.sliding_window": config.sliding_window or 0}


def neox_settings(config: Any) -> dict[str, object]:
    share = config.rope_parameters["partial_rotary_factor"]
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "rope.dimension_count": int(share * (config.hidden_size // config.num_attention_heads)),
        "use_parallel_residual": config.use_parallel_residual,
    }


def phi_settings(config: Any) -> dict[str, object]:
    share, settings = config.rope_parameters["partial_rotary_factor"], decoder_settings(config)
    del settings["rope.freq_base"]
    return {
        **settings,
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "rope.dimension_count": int(share * (config.hidden_size // config.num_attention_heads)),
    }


def falcon_settings(config: Any) -> dict[str, object]:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": 2_048,  # whatever config.json says
        "tensor_data_layout": "jploski",
        "embedding_length": config.hidden_size,
        "feed_forward_length": 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_kv_heads if config.new_decoder_architecture else 1,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }


def bloom_settings(config: Any) -> dict[str, object]:
    return {
        "block_count": config.n_layer,
        "context_length": 2_048,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 4 * config.hidden_size,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_head,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }


def gpt2_settings(config: Any) -> dict[str, object]:
    return {
        "block_count": config.n_layer,
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "feed_forward_length": 4 * config.n_embd,
        "attention.head_count": config.n_head,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }


def starcoder2_settings(config: Any) -> dict[str, object]:
    return {**decoder_settings(config), "attention.layer_norm_epsilon": config.norm_epsilon}


def glm_settings(config: Any) -> dict[str, object]:
    share = config.rope_parameters["partial_rotary_factor"]
    return {
        **decoder_settings(config), **whole_heads(config), "rope.dimension_count": int(share * config.head_dim),
    }  # fmt: skip


def cohere_settings(config: Any) -> dict[str, object]:
    return {
        **decoder_settings(config), "attention.layer_norm_epsilon": config.layer_norm_eps,
        "logit_scale": config.logit_scale, "rope.scaling.type": "none",
    }  # fmt: skip


def cohere2_settings(config: Any) -> dict[str, object]:
    return {
        **cohere_settings(config), "vocab_size": VOCAB, "rope.dimension_count": config.head_dim,
        "attention.sliding_window": config.sliding_window,
    }  # fmt: skip


def gemma_settings(config: Any) -> dict[str, object]:
    settings = {**decoder_settings(config), **whole_heads(config)}
    del settings["rope.freq_base"]
    return settings


def nemotron_settings(config: Any) -> dict[str, object]:
    return {
        **glm_settings(config), "vocab_size": VOCAB, "attention.layer_norm_epsilon": config.norm_eps,
        "rope.scaling.type": "none",
    }  # fmt: skip


def stablelm_settings(config: Any) -> dict[str, object]:
    share, settings = config.rope_parameters["partial_rotary_factor"], decoder_settings(config)
    del settings["rope.freq_base"]
    return {
        **settings, "use_parallel_residual": config.use_parallel_residual,
        "rope.dimension_count": int(share * (config.hidden_size // config.num_attention_heads)),
        "attention.layer_norm_epsilon": config.layer_norm_eps,
    }  # fmt: skip


def window_settings(config: Any) -> dict[str, object]:
    """Which layers have a window, as a list."""
    kinds, window = config.layer_types, config.sliding_window
    windows = {
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
    }
    return {**decoder_settings(config), **whole_heads(config), "vocab_size": VOCAB, **(windows if window else {})}


def lfm2_settings(config: Any) -> dict[str, object]:
    kinds, settings = config.layer_types, decoder_settings(config)
    size = 2 * config.intermediate_size // 3 if config.model_type == "lfm2" else config.intermediate_size
    return {
        **settings, "vocab_size": VOCAB,
        "feed_forward_length": -(-size // 32) * 32,
        "attention.head_count_kv": [config.num_key_value_heads * (kind == "full_attention") for kind in kinds],
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "shortconv.l_cache": config.conv_L_cache,
    }  # fmt: skip


def lfm2_moe_settings(config: Any) -> dict[str, object]:
    return {
        **lfm2_settings(config), **expert_settings(config),
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": 2,
    }  # fmt: skip


def mamba_settings(config: Any, heads: int, dim: int, groups: int, state: int, width: int) -> dict[str, object]:
    return {
        "vocab_size": VOCAB, "ssm.conv_kernel": width, "ssm.inner_size": heads * dim, "ssm.state_size": state,
        "ssm.time_step_rank": heads, "ssm.group_count": groups,
    }  # fmt: skip


def nemotron_h_settings(config: Any) -> dict[str, object]:
    kinds = config.layers_block_type
    return {
        **decoder_settings(config), **whole_heads(config),
        **mamba_settings(
            config, config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size,
            config.conv_kernel,
        ),
        "attention.head_count_kv": [config.num_key_value_heads * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [config.intermediate_size * (kind == "mlp") for kind in kinds],
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
    }  # fmt: skip


def granite_hybrid_settings(config: Any) -> dict[str, object]:
    sizes = config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state, config.mamba_d_conv
    kinds = config.layer_types
    return {
        **granite_settings(config), **mamba_settings(config, *sizes), "rope.scaling.finetuned": False,
        "attention.head_count_kv": [config.num_key_value_heads * (kind == "full_attention") for kind in kinds],
        **(expert_settings(config) if config.num_local_experts else {}),
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
    }  # fmt: skip


def falcon_h1_settings(config: Any) -> dict[str, object]:
    sizes = config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state, config.mamba_d_conv
    return {**decoder_settings(config), **whole_heads(config), **mamba_settings(config, *sizes)}


def selective_settings(config: Any) -> dict[str, object]:
    return {
        "context_length": 1 << 20, "embedding_length": config.hidden_size, "feed_forward_length": 0,
        "attention.head_count": 0, "block_count": config.num_hidden_layers, "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.intermediate_size, "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.time_step_rank, "ssm.dt_b_c_rms": False,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
    }  # fmt: skip


def mamba2_settings(config: Any) -> dict[str, object]:
    sizes = config.num_heads, config.head_dim, config.n_groups, config.state_size, config.conv_kernel
    return {
        "context_length": 1 << 20, "embedding_length": config.hidden_size, "feed_forward_length": 0,
        "attention.head_count": 0, "block_count": config.num_hidden_layers, **mamba_settings(config, *sizes),
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
    }  # fmt: skip


def selective_tensors(name: str, values: Tensor, config: Any) -> Tensor:
    """Rates as factors, convolutions as matrices."""
    return -values.exp() if name.endswith("A_log") else flat_convolutions(name, values, config)


def mamba_tensors(name: str, values: Tensor, config: Any) -> Tensor:
    """Decays as factors, with D in columns, norms by group, convolutions as matrices."""
    if name.endswith("A_log"):
        return -values.exp()[:, None]
    if name.endswith(".D"):
        return values[:, None]
    return (
        values.view(config.n_groups, -1)
        if name.endswith("mixer.norm.weight")
        else flat_convolutions(name, values, config)
    )


def flat_convolutions(name: str, values: Tensor, config: Any) -> Tensor:
    return values.squeeze(1) if values.dim() == 3 else values


@dataclass(frozen=True)
class Layout:
    """How files of a family are laid out. `changes`: of the tiny model, where files leave a setting out."""

    architecture: str
    settings: Settings = decoder_settings
    turn: Turn = as_it_is
    changes: Mapping[str, Any] = field(default_factory=dict)


_PLAIN = ("gate_inp", "position", "conv.conv", "ssm_conv", "ssm_a", "ssm_d", "ssm_norm")  # names of float tensors
FACTORS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
LONG_ROPE = {
    "type": "longrope", "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 512,
    "short_factor": [1.0 + 0.125 * step for step in range(8)],
    "long_factor": [2.0 + 0.25 * step for step in range(8)],
}  # fmt: skip
# By the names of CASES in family_models, or with a dash: another model of a family.
LAYOUTS: dict[str, Layout] = {
    "llama": Layout("llama", lambda config: {**llama_settings(config), **whole_heads(config)}, in_pairs),
    "qwen2": Layout("qwen2"),
    "qwen3": Layout("qwen3", lambda config: {**decoder_settings(config), **whole_heads(config)}),
    "mixtral": Layout(
        "llama", lambda config: {**llama_settings(config), **expert_settings(config)}, in_pairs,
        {"sliding_window": None},
    ),
    "qwen2_moe": Layout("qwen2moe", qwen_moe_settings),
    "qwen3_moe": Layout("qwen3moe", qwen_moe_settings, changes={"norm_topk_prob": True}),
    "glm4_moe": Layout("glm4moe", glm_moe_settings),
    "glm4_moe-air": Layout("glm4moe", glm_moe_settings, changes={"use_qk_norm": False}),
    "ernie4_5_moe": Layout("ernie4_5-moe", ernie_moe_settings, vectors),
    "afmoe": Layout(
        "afmoe", afmoe_settings, vectors, {"num_hidden_layers": 5, "global_attn_every_n_layers": 4, "route_scale": 2.5}
    ),
    "dots1": Layout("dots1", glm_moe_settings, changes={"sliding_window": None}),
    "minimax_m2": Layout("minimax-m2", minimax_settings),
    "olmoe": Layout("olmoe", lambda config: {**decoder_settings(config), **expert_settings(config)}),
    "granite": Layout("granite", granite_settings, in_pairs),
    "granitemoe": Layout(
        "granitemoe", lambda config: {**granite_settings(config), **expert_settings(config)}, in_pairs
    ),
    "smollm3": Layout(
        "smollm3", llama_settings, in_pairs, {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}
    ),
    "olmo2": Layout("olmo2"),
    "granitemoehybrid": Layout(
        "granitehybrid", granite_hybrid_settings,
        lambda name, values, config: mamba_tensors(name, in_pairs(name, values, config), config),
        {"mamba_n_groups": 1, "shared_intermediate_size": 64},
    ),
    "granitemoehybrid-dense": Layout(
        "granitehybrid", granite_hybrid_settings,
        lambda name, values, config: mamba_tensors(name, in_pairs(name, values, config), config),
        {"mamba_n_groups": 1, "num_local_experts": 0, "shared_intermediate_size": 96},
    ),
    "mamba": Layout("mamba", selective_settings, selective_tensors),
    "mamba2": Layout("mamba2", mamba2_settings, mamba_tensors),
    "nemotron_h": Layout("nemotron_h", nemotron_h_settings, mamba_tensors),
    "falcon_h1": Layout(
        "falcon-h1", falcon_h1_settings, mamba_tensors,
        {
            **dict.fromkeys((f"{name}_multiplier" for name in FACTORS), 1.0), "mlp_multipliers": None,
            "ssm_multipliers": None, "mamba_rms_norm": False,
        },
    ),
    "lfm2": Layout("lfm2", lfm2_settings, flat_convolutions, {"conv_bias": False}),
    "lfm2_moe": Layout("lfm2moe", lfm2_moe_settings, flat_convolutions),
    "phi3": Layout("phi3", phi3_settings),
    "phi3-window": Layout("phi3", phi3_settings, changes={"sliding_window": 7}),
    "phi3-long": Layout("phi3", phi3_settings, changes={"max_position_embeddings": 2_048, "rope_scaling": LONG_ROPE}),
    "gemma": Layout("gemma", gemma_settings, plus_one),
    "arcee": Layout("arcee", lambda config: {**llama_settings(config), **whole_heads(config)}, in_pairs),
    "nemotron": Layout("nemotron", nemotron_settings, plus_one),
    "olmo": Layout("olmo", lambda config: {**llama_settings(config), "attention.layer_norm_epsilon": 1e-5}, in_pairs),
    "olmo-limit": Layout(
        "olmo",
        lambda config: {
            **llama_settings(config), "attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": config.clip_qkv,
        },
        in_pairs,
        changes={"clip_qkv": 0.5},
    ),
    "stablelm": Layout("stablelm", stablelm_settings),
    "stablelm-parallel": Layout("stablelm", stablelm_settings, changes={"use_parallel_residual": True}),
    "hunyuan_v1_dense": Layout(
        "hunyuan-dense",
        lambda config: {
            **decoder_settings(config), **whole_heads(config), "rope.scaling.type": "none", "rope.scaling.factor": 1.0,
            "rope.scaling.original_context_length": 512,
        },
    ),
    "glm4": Layout("glm4", glm_settings),
    "cohere": Layout("command-r", cohere_settings),
    "cohere-norms": Layout("command-r", cohere_settings, changes={"use_qk_norm": True}),
    "cohere2": Layout("cohere2", cohere2_settings, changes={"sliding_window_pattern": 4, "num_hidden_layers": 5}),
    "seed_oss": Layout("seed_oss", lambda config: {**decoder_settings(config), **whole_heads(config)}),
    "ernie4_5": Layout("ernie4_5", lambda config: {**decoder_settings(config), **whole_heads(config)}),
    "exaone4": Layout("exaone4", window_settings),
    "exaone4-small": Layout(
        "exaone4", window_settings, changes={"sliding_window": None, "layer_types": ["full_attention"] * 3}
    ),
    "starcoder2": Layout("starcoder2", starcoder2_settings),
    "phi": Layout("phi2", phi_settings, changes={"num_key_value_heads": 4, "intermediate_size": 256}),
    "gpt2": Layout("gpt2", gpt2_settings, by_outputs, {"n_inner": ...}),
    "gpt_bigcode": Layout(
        "starcoder", lambda config: {**gpt2_settings(config), "attention.head_count_kv": 1}, changes={"n_inner": ...}
    ),
    "gpt_neox": Layout("gptneox", neox_settings, ungrouped),
    "gpt_neox-serial": Layout("gptneox", neox_settings, ungrouped, {"use_parallel_residual": False}),
    "bloom": Layout("bloom", bloom_settings, ungrouped),
    "falcon": Layout("falcon", falcon_settings, ungrouped),
    "falcon-7b": Layout(
        "falcon", falcon_settings, ungrouped,
        {"new_decoder_architecture": False, "num_kv_heads": ..., "multi_query": True},
    ),
}  # fmt: skip


def gguf_case(name: str, directory: Path) -> FamilyCase:
    """The tiny model of a family of LAYOUTS."""
    return FamilyCase(name.partition("-")[0], directory, dict(LAYOUTS[name].changes))


def write_family(path: Path, name: str, case: FamilyCase, kind: str = "F32") -> Path:
    """`kind`: the type of matrices. Norms, biases and routers are float32."""
    layout = LAYOUTS[name]
    tensors = [*family_tensors(layout, case, kind), *_rope_factors(case.model.config)]
    return write_gguf(path, family_metadata(layout, case), tensors)


def family_metadata(layout: Layout, case: FamilyCase) -> dict[str, object]:
    settings = {f"{layout.architecture}.{key}": value for key, value in layout.settings(case.model.config).items()}
    return {
        "general.architecture": layout.architecture, **settings,
        "tokenizer.ggml.tokens": [f"token{number}" for number in range(VOCAB)],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip


def family_tensors(layout: Layout, case: FamilyCase, kind: str) -> list[Stored]:
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == layout.architecture), 8
    )
    checkpoint, found = case.checkpoint(), dict[str, Tensor]()
    experts: dict[str, list[Tensor]] = {}
    for name in sorted(checkpoint.names, key=_expert_number):
        if name == "lm_head.weight" and checkpoint.config.tie_word_embeddings:
            continue
        values, match = layout.turn(name, checkpoint.read(name), case.model.config), _EXPERT.fullmatch(name)
        if name.endswith("shared_expert.input_linear.weight"):  # of Granite
            for word, part in zip(("gate", "up"), values.chunk(2), strict=True):
                found[name.replace("input_linear", f"{word}_proj")] = part
        elif match is None:
            found[name] = values
        else:
            experts.setdefault(f"{match[1]}.{match[3]}".replace("model.layers", _outer(name)), []).append(values)
    found |= {name: torch.stack(parts) for name, parts in experts.items()}
    checkpoint.close()
    made = []
    for name, values in found.items():
        stored_as = names.get_name(
            _published(name, layout.architecture, has_experts=bool(experts)), try_suffixes=(".weight", ".bias")
        )
        assert stored_as is not None, name
        if kind != "F32" and "gate_inp_shexp" in stored_as:
            values = values.squeeze(0)  # as llama-quantize writes a matrix of one row
        is_plain = values.ndim < 2 or stored_as.endswith("_norm.weight") or any(word in stored_as for word in _PLAIN)
        made.append(stored(stored_as, values.contiguous().numpy(), "F32" if is_plain else kind))
    return made


_PUBLISHED = {  # of LFM2
    "model.norm.": "model.embedding_norm.", ".o_proj.": ".out_proj.",
    ".feed_forward.gate.e_score_correction_bias": ".feed_forward.expert_bias.bias",
}  # fmt: skip


def _published(name: str, architecture: str, *, has_experts: bool) -> str:
    """What the converter's table calls a few tensors."""
    name = name.replace(".dt_bias", ".dt_proj.bias")
    if architecture == "bloom":
        return name.removeprefix("transformer.")
    if architecture == "granitehybrid":
        name = name.replace("output_linear", "down_proj")
        name = name if has_experts else name.replace("mlp.shared_expert.", "mlp.")
    if architecture == "falcon-h1":
        name = name.replace(".post_attention_layernorm.", ".pre_ff_layernorm.")
    if architecture in ("nemotron_h", "mamba", "mamba2"):
        for ours, theirs in (("embed_tokens", "embeddings"), ("model.norm.", "model.norm_f."), ("model.", "backbone.")):
            name = name.replace(ours, theirs, 1)
        return name
    if architecture.startswith("lfm2"):
        for ours, theirs in _PUBLISHED.items():
            name = name.replace(ours, theirs)
        return name
    if name.endswith("_proj.weight"):
        name = name.replace(".block_sparse_moe.experts.", ".mlp.experts.")  # of Granite
    name = name.replace(".block_sparse_moe.experts.", ".feed_forward.experts.")
    name = name.replace("block_sparse_moe.gate.e_score", "mlp.gate.e_score").replace("_bias", ".bias")
    return "embed_out.weight" if name == "lm_head.weight" else name


def _outer(path: str) -> str:
    """The same for experts of Mixtral and LFM2."""
    return "layers" if re.search(r"(block_sparse_moe|feed_forward).*\.w\d", path) else "model.layers"


def _expert_number(name: str) -> tuple[int, str]:
    match = _EXPERT.fullmatch(name)
    return (-1 if match is None else int(match[2]), name)


def _rope_factors(config: Any) -> list[Stored]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [
        stored(f"rope_factors_{each}.weight", torch.tensor(rope[f"{each}_factor"]).numpy())
        for each in ("long", "short")
        if f"{each}_factor" in rope
    ]
