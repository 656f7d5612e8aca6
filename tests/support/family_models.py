"""A tiny random model of every family, as transformers makes and saves it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from family_bench import hf_model
from packed_models import PACKED
from quire.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from quire.runtime.loading.files import files_at
from tiny_models import greedy_reference
from vision_models import MROPE, TEXTS, TOWERS
from vision_models import TOKENS as VISION_TOKENS

VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
NO_ATTENTION: dict[str, Any] = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "max_position_embeddings"), ...),
    "intermediate_size": ..., "pad_token_id": 0,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
    "moe_intermediate_size": 32,
}  # fmt: skip
SIGMOIDS: dict[str, Any] = {
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0,
}  # fmt: skip
INDEXER: dict[str, Any] = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 2.0,
}  # fmt: skip
SMOL: dict[str, Any] = {
    **dict.fromkeys(COMMON, ...), "text_config": {**COMMON, "model_type": "llama"}, "tie_word_embeddings": False,
    "image_token_id": 0,
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 7,
    },
}  # fmt: skip
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7, "model_type": "siglip_vision_model", "vision_use_head": False,
}  # fmt: skip
# What config.json of a tiny model says beside COMMON; ... takes a setting of COMMON away.
CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": {
        "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_dense_layers": 1,
        "num_shared_experts": 2, "route_scale": 2.5, "sliding_window": 9, "global_attn_every_n_layers": 2,
        "mup_enabled": True,
    },
    "apertus": {},
    "arcee": {"head_dim": 16},
    "bitnet": {},
    "bloom": {"num_key_value_heads": ..., "intermediate_size": ..., "max_position_embeddings": ...},
    "mpt": {
        **dict.fromkeys(COMMON, ...), "vocab_size": VOCAB, "d_model": 64, "n_heads": 4, "n_layers": 3,
        "max_seq_len": 512, "bos_token_id": 1, "eos_token_id": 2, "attn_config": {"clip_qkv": 2.0},
    },
    "codegen": {
        "n_inner": 96, "n_positions": 512, "n_ctx": 512, "rotary_dim": 8, "num_key_value_heads": ...,
        "intermediate_size": ..., "max_position_embeddings": ...,
    },
    "dbrx": {
        **dict.fromkeys(COMMON, ...), "vocab_size": VOCAB, "d_model": 64, "n_heads": 4, "n_layers": 3,
        "max_seq_len": 512, "bos_token_id": 1, "eos_token_id": 2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere": {"logit_scale": 0.5, "tie_word_embeddings": True, "pad_token_id": 0},
    "cohere2": {"logit_scale": 0.5, "sliding_window": 9, "sliding_window_pattern": 2, "pad_token_id": 0},
    "cwm": {
        "head_dim": 16, "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "deepseek_v2": {
        **LATENT, "q_lora_rank": None, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        **LATENT, "q_lora_rank": 24, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
        "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    },
    "deepseek_v32": {**LATENT, **SIGMOIDS, **INDEXER, "q_lora_rank": 24, "first_k_dense_replace": 1},
    "ernie4_5": {"head_dim": 16, "use_bias": True, "pad_token_id": 0},
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 1, "pad_token_id": 0,
    },
    "exaone4": {"head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 2},
    "dots1": {
        **SIGMOIDS, "head_dim": 16, "first_k_dense_replace": 1, "sliding_window": 9, "max_window_layers": 2,
        "norm_topk_prob": True,
    },
    "exaone_moe": {
        **SIGMOIDS, "head_dim": 16, "n_routed_experts": ..., "n_shared_experts": ..., "num_experts": 8,
        "num_shared_experts": 2, "sliding_window": 9, "sliding_window_pattern": 2, "num_key_value_heads": 2,
    },
    "falcon": {"num_key_value_heads": ..., "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "gemma": {"head_dim": 16, "pad_token_id": 0},
    "gemma2": {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 4.0},
    "xglm": {
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), ...), "d_model": 64,
        "hidden_size": ..., "intermediate_size": ..., "ffn_dim": 96, "attention_heads": 4, "num_layers": 3,
        "pad_token_id": 0,
    },
    "vaultgemma": {
        "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 4.0,
    },
    "gemma3_text": {
        "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3n_text": {
        "head_dim": 16, "sliding_window": 9, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB - 5, "laurel_rank": 16,
        "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.7, 0.0],
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {  # like E2B and E4B: heads twice as large, some layers read the keys of others
        "head_dim": 16, "global_head_dim": 32, "sliding_window": 9, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "glm4_moe_lite": {**LATENT, **SIGMOIDS, "q_lora_rank": 24},
    "glm_moe_dsa": {
        **LATENT, **SIGMOIDS, **INDEXER, "q_lora_rank": 24, "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_topk_freq": 2,
    },
    "glm": {"head_dim": 16, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "glm4_moe": {**SIGMOIDS, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True},
    "gpt2": {"n_inner": 96, "n_positions": 512, "num_key_value_heads": ..., "intermediate_size": ...},
    "gpt_bigcode": {"n_inner": 96, "n_positions": 512, "num_key_value_heads": ..., "intermediate_size": ...},
    "gpt_neo": {
        **dict.fromkeys(("num_key_value_heads", "num_hidden_layers", "num_attention_heads"), ...), "num_layers": 3,
        "num_heads": 4, "window_size": 9, "attention_types": [[["global", "local", "local"], 1]],
    },
    "gptj": {"n_inner": 96, "n_positions": 512, "rotary_dim": 8, "num_key_value_heads": ..., "intermediate_size": ...},
    "gpt_neox": {"num_key_value_heads": ..., "rotary_pct": 0.25},
    "gpt_oss": {
        "head_dim": 16, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.5,
    },
    "granite": GRANITE,
    "granitemoe": {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {
        **GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
    },
    "granitemoehybrid": {
        **GRANITE, **MAMBA, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48,
    },
    "mamba": {**NO_ATTENTION, "state_size": 8, "time_step_rank": 6},
    "mamba2": {**NO_ATTENTION, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "falcon_mamba": {**NO_ATTENTION, "state_size": 16, "conv_kernel": 3, "use_bias": True, "mixer_rms_eps": 1e-3},
    "jamba": {
        "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 12,
        "mamba_proj_bias": True, "pad_token_id": 0,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1], "pad_token_id": 0},
    "nemotron_h": {
        "num_hidden_layers": ..., "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
        "n_groups": 2, "hybrid_override_pattern": "M*-M", "time_step_min": 1e-9, "pad_token_id": 0,
    },
    "falcon_h1": {
        **MAMBA, "mamba_d_ssm": 96, "mamba_rms_norm": True, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.8, 0.6], "key_multiplier": 0.7, "attention_out_multiplier": 0.9,
        "attention_in_multiplier": 1.2, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.4, "pad_token_id": 0,
    },
    "recurrent_gemma": {
        "max_position_embeddings": ..., "attention_window_size": 9, "num_key_value_heads": 1, "pad_token_id": 0,
        "block_types": ["recurrent", "attention", "recurrent"],
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32, "conv_bias": True,
        "pad_token_id": 0,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "conv", "full_attention"], "conv_L_cache": 4, "num_dense_layers": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "pad_token_id": 0,
    },
    "hyperclovax": {**GRANITE, "head_dim": 16},
    "minicpm3": {
        **LATENT, "moe_intermediate_size": ..., "q_lora_rank": 24, "scale_emb": 3.0, "scale_depth": 0.9,
        "dim_model_base": 32, "rope_scaling": {
            "rope_type": "longrope", "original_max_position_embeddings": 512,
            "short_factor": [1.0, 1.25, 2.0, 3.5], "long_factor": [1.0, 1.25, 2.0, 3.5],
        },
    },
    "youtu": {**LATENT, "moe_intermediate_size": ..., "q_lora_rank": 24},
    "jais2": {"head_dim": 16},
    "granite_swa": {
        **GRANITE, "sliding_window": 9, "layer_rope_theta": [10_000.0, 500.0, 0],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "hy_v3": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    "mellum": {
        "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "helium": {"head_dim": 16, "pad_token_id": 0},
    "hunyuan_v1_dense": {"head_dim": 16, "pad_token_id": 0, "attention_bias": True},
    "internlm2": {},
    "llama": {},
    "hunyuan_v1_moe": {
        "head_dim": 16, "num_experts": 4, "moe_topk": 2, "pad_token_id": 0, "eod_token_id": 2,
    },
    "llama4_text": {
        "head_dim": 16, "intermediate_size_mlp": 96, "intermediate_size": 32, "num_local_experts": 4,
        "no_rope_layers": [1, 0, 1], "moe_layers": [1, 2], "attention_chunk_size": 16, "floor_scale": 8,
    },
    "ministral": {
        "sliding_window": 9, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
    },
    "minimax_m2": {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3},
    "ministral3": {
        "head_dim": 16, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 4,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.5,
        },
    },
    "mistral": {"sliding_window": 9, "head_dim": 16},
    "mistral4": {
        **LATENT, "q_lora_rank": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 32.0, "original_max_position_embeddings": 4,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.5,
        },
    },
    "mistral3": {
        **dict.fromkeys(COMMON, ...), "text_config": {**COMMON, "model_type": "mistral", "head_dim": 16},
        "tie_word_embeddings": False,
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14, "head_dim": 8,
        },
    },
    "llava": {
        **dict.fromkeys(COMMON, ...), "text_config": {**COMMON, "model_type": "mistral", "head_dim": 16},
        "tie_word_embeddings": False, "image_token_index": 10, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "head_dim": 8,
        },
    },
    "llava_next": {
        **dict.fromkeys(COMMON, ...), "text_config": {**COMMON, "model_type": "llama"}, "tie_word_embeddings": False,
        "image_token_index": 10, "vision_config": {**SIGLIP, "model_type": "clip_vision_model"},
        "image_grid_pinpoints": [[28, 56], [56, 28]],
    },
    "llava_onevision": {
        **dict.fromkeys(COMMON, ...), "text_config": {**COMMON, "model_type": "qwen2"}, "tie_word_embeddings": False,
        "image_token_index": 10, "vision_config": SIGLIP, "image_grid_pinpoints": [[28, 28], [56, 28]],
    },
    "internvl": {
        **dict.fromkeys(COMMON, ...), "text_config": {**COMMON, "model_type": "qwen2"}, "tie_word_embeddings": False,
        "image_token_id": 10, "vision_config": {
            "model_type": "internvl_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 7,
        },
    },
    "cohere2_vision": {
        **dict.fromkeys(COMMON, ...), "tie_word_embeddings": True, "image_token_id": 10,
        "text_config": {
            **COMMON, "model_type": "cohere2", "sliding_window": 9, "pad_token_id": 0,
            "logit_scale": 1.0,  # transformers does not apply it in models with images
        },
        "vision_config": SIGLIP, "alignment_intermediate_size": 24,
    },
    "glm4v": {"vision_config": {**TOWERS["glm4v"]}, **VISION_TOKENS, **TEXTS["glm4v"]},
    "glm4v_moe": {"vision_config": {**TOWERS["glm4v_moe"]}, **VISION_TOKENS, **TEXTS["glm4v_moe"]},
    "smolvlm": SMOL,
    "idefics3": SMOL,
    "nanochat": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "nemotron": {"head_dim": 16},
    "olmo": {"pad_token_id": 0},
    "olmo2": {},
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 16, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "olmo3": {
        "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.2,
        },
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "opt": {"num_key_value_heads": ..., "intermediate_size": ..., "ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {"partial_rotary_factor": 0.5},
    "phimoe": {
        "num_local_experts": 8, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2,
    },
    "phi3": {"original_max_position_embeddings": 512, "pad_token_id": 0},
    "mimo": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "qwen2_vl": {"vision_config": {**TOWERS["qwen2_vl"]}, **VISION_TOKENS, **MROPE},
    "qwen2_5_vl": {"vision_config": {**TOWERS["qwen2_5_vl"]}, **VISION_TOKENS, **MROPE, "tie_word_embeddings": True},
    "qwen3_vl": {"vision_config": {**TOWERS["qwen3_vl"]}, **VISION_TOKENS, **TEXTS["qwen3_vl"]},
    "qwen3_vl_moe": {"vision_config": {**TOWERS["qwen3_vl_moe"]}, **VISION_TOKENS, **TEXTS["qwen3_vl_moe"]},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_next": {
        "head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    },
    "qwen3_5_text": {
        "head_dim": 16, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe_text": {
        "intermediate_size": ..., "head_dim": 16, "layer_types": ["full_attention", *["linear_attention"] * 2],
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "linear_conv_kernel_dim": 3,
        "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    },
    "seed_oss": {"head_dim": 16, "pad_token_id": 0},
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "solar_open": {**SIGMOIDS, "head_dim": 16},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": None},
}  # fmt: skip
# Further models of a family, whose name comes before the dash.
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt_bigcode-heads": {
        "n_inner": 96, "n_positions": 512, "num_key_value_heads": ..., "intermediate_size": ..., "multi_query": False,
    },
    "granitemoehybrid-dense": {  # like Granite 4.0 H 1B: no experts
        **GRANITE, **MAMBA, "layer_types": ["mamba", "mamba", "attention"], "mamba_n_groups": 1,
        "num_local_experts": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope",
    },
    "nemotron_h-moe": {  # like Nemotron 3 Nano: experts without a gate
        "num_hidden_layers": ..., "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
        "n_groups": 2, "hybrid_override_pattern": "ME*-E", "time_step_min": 1e-9, "pad_token_id": 0,
        **SIGMOIDS, "moe_shared_expert_intermediate_size": 48,
    },
    "nemotron_h-latents": {  # like Nemotron 3 Super: experts of latents
        "num_hidden_layers": ..., "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
        "n_groups": 2, "hybrid_override_pattern": "ME*E", "time_step_min": 1e-9, "pad_token_id": 0,
        **SIGMOIDS, "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 32,
    },
    "falcon-rw": {  # like Falcon RW 1B
        "num_key_value_heads": ..., "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
    },
    "opt-350m": {  # like OPT-350m: norms after the residual additions, projected embeddings
        "num_key_value_heads": ..., "intermediate_size": ..., "ffn_dim": 96, "word_embed_proj_dim": 48,
        "do_layer_norm_before": False,
    },
    "cohere-norms": {"logit_scale": 0.5, "use_qk_norm": True, "pad_token_id": 0},  # like Command R+
    "olmo-limit": {"clip_qkv": 0.5, "pad_token_id": 0},  # like OLMo 1.7
    "stablelm-norms": {"qk_layernorm": True, "use_parallel_residual": True},  # like StableLM 2 12B
    "stablelm-parallel": {"use_parallel_residual": True, "partial_rotary_factor": 0.25},
    "gemma4_text-moe": {  # like 26B-A4B and 31B: heads twice as large, but fewer; keys are values
        "head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 4, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "sliding_window": 9, "num_hidden_layers": 5, "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] + ["full_attention"] * 2,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    },
}  # fmt: skip
CASES = CONFIGS | VARIANTS
NESTED = (
    "glm4v",
    "glm4v_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
)  # transformers takes settings of their decoders only as `text_config`
_OUTER = {"vision_config", "tie_word_embeddings", *VISION_TOKENS}
NUM_TOKENS = 12  # of every answer


def settings_of(name: str, *changes: dict[str, Any]) -> dict[str, Any]:
    """What transformers' config of a tiny model is made with."""
    wanted = COMMON | CASES[name]
    for each in changes:
        wanted = wanted | each
    settings = deepcopy({key: value for key, value in wanted.items() if value is not ...})  # transformers changes dicts
    if name not in NESTED:
        return settings
    inner = {key: value for key, value in settings.items() if key not in _OUTER}
    return {key: value for key, value in settings.items() if key in _OUTER} | {"text_config": inner}


def write_line_break(folder: Path) -> None:
    """Give the token that ends a tile of Command A Vision a number within the tiny vocabulary."""
    tokens = {"added_tokens_decoder": {"11": {"content": "<|IMG_LINE_BREAK|>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))


@dataclass
class FamilyCase:
    """One family's tiny model, and what transformers answers with it."""

    name: str
    directory: Path
    changes: dict[str, Any] = field(default_factory=dict)  # of the family's settings
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @cached_property
    def model(self) -> torch.nn.Module:
        """Saves it too."""
        import transformers

        settings = settings_of(self.name, self.changes)
        kind = self.name.partition("-")[0]
        packed = PACKED.get(kind)
        config = transformers.AutoConfig.for_model(packed.source if packed else kind, **settings)
        config._attn_implementation = "sdpa" if self.name == "falcon-rw" else "eager"  # which adds its ALiBi twice
        model = hf_model(config)
        model.save_pretrained(self.directory)
        if kind == "cohere2_vision":
            write_line_break(self.directory)
        if packed is not None:
            packed.pack(self.directory, config)
        return model

    def checkpoint(self) -> Checkpoint:
        assert self.model is not None  # its files are there
        return open_checkpoint(files_at(self.directory))

    @property
    def odd_block(self) -> int:
        """A block size that is no power of two, except where chunks must be whole blocks."""
        return 4 if self.checkpoint().config.has_chunks else 3

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        return random.Random(seed).choices(range(3, VOCAB), k=length)

    def expected(self, prompt: list[int]) -> list[int]:
        """transformers' greedy tokens."""
        key = tuple(prompt)
        if key not in self.answers:
            self.answers[key], _ = greedy_reference(self.model, prompt, NUM_TOKENS)
        return self.answers[key]

    def logprob(self, prompt: list[int], answer: Sequence[int]) -> float:
        """The sum of the logprobs that transformers gives the tokens of an answer."""
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        return float(logits.double().log_softmax(-1).gather(1, torch.tensor([answer]).T).sum())

    def beams(self, prompt: list[int], width: int) -> list[tuple[int, ...]]:
        """A beam search of NUM_TOKENS tokens by transformers' model, best first: no cache, and no token ends it."""
        found, scores = torch.tensor([prompt]), torch.zeros(1, 1, dtype=torch.float64)
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                logits = self.model(found, use_cache=False).logits[:, -1]
                after = (scores + logits.double().log_softmax(-1)).flatten()
                best, places = after.topk(width)
                found = torch.cat((found[places // logits.shape[1]], places[:, None] % logits.shape[1]), dim=1)
                scores = best[:, None]
        return [tuple(each[len(prompt) :].tolist()) for each in found]
