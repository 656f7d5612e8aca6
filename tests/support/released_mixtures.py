"""The settings of released mixtures, hybrids and models for images, as their config.json spells them."""

from __future__ import annotations

from typing import Any

from released_dense import LLAMA3_ROPE, Settings, decoder
from released_others import windows_but_every


def hybrid_layers(every: int, layers: int) -> list[str]:
    """Return `layer_types` in which every n-th layer attends and the others are recurrent."""
    return ["full_attention" if layer % every == every - 1 else "linear_attention" for layer in range(layers)]


MIXTRAL = {
    "hidden_act": "silu", "num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN_MOE = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645,
    "hidden_act": "silu", "mlp_only_layers": [], "output_router_logits": False, "rms_norm_eps": 1e-6,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}  # fmt: skip
QWEN3_MOE = QWEN_MOE | {
    "attention_bias": False, "max_position_embeddings": 40960, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_experts": 128, "num_experts_per_tok": 8, "rope_scaling": None, "rope_theta": 1000000.0,
}  # fmt: skip
QWEN3_NEXT = QWEN_MOE | {
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10,
    "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN3_5_TEXT: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
    "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2560,
    "initializer_range": 0.02, "intermediate_size": 9216, "layer_types": hybrid_layers(4, 32),
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "use_cache": True, "vocab_size": 248320, "mamba_ssm_dtype": "float32", "tie_word_embeddings": True,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
                        "rope_theta": 10000000, "partial_rotary_factor": 0.25},
}  # fmt: skip
QWEN3_5_VISION = {
    "deepstack_visual_indexes": [], "depth": 24, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024,
    "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "qwen3_5",
    "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2560, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1,
    "ep_size": 1, "hidden_act": "silu", "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_layer_freq": 1,
    "num_experts_per_tok": 6, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_theta": 10000, "seq_aux": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "v_head_dim": 128,
    "pretraining_tp": 1,
}  # fmt: skip
DEEPSEEK_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                 "original_max_position_embeddings": 4096, "type": "yarn"}  # fmt: skip
DEEPSEEK_V2_LITE = DEEPSEEK | {
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "norm_topk_prob": False, "q_lora_rank": None, "rope_scaling": DEEPSEEK_YARN, "routed_scaling_factor": 1.0,
    "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy", "bos_token_id": 100000,
    "eos_token_id": 100001,
}  # fmt: skip
DEEPSEEK_V3 = DEEPSEEK | {
    "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "rope_scaling": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
GLM4_MOE = {
    "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1, "hidden_act": "silu", "max_position_embeddings": 131072, "moe_intermediate_size": 1408,
    "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
    "topk_group": 1, "torch_dtype": "bfloat16", "use_qk_norm": False,
}  # fmt: skip
GPT_OSS = {
    "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4,
    "hidden_act": "silu", "initial_context_length": 4096, "max_position_embeddings": 131072,
    "num_experts_per_tok": 4, "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                   "lm_head"], "quant_method": "mxfp4"},
}  # fmt: skip
QWEN_VL = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "image_token_id": 151655, "max_position_embeddings": 128000, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "use_sliding_window": False, "video_token_id": 151656, "vision_end_token_id": 151653,
    "vision_start_token_id": 151652, "vision_token_id": 151654, "torch_dtype": "bfloat16",
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
}  # fmt: skip
QWEN3_VL_TEXT = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 12288, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5000000, "use_cache": True, "vocab_size": 151936,
}  # fmt: skip
QWEN3_VISION = {
    "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
    "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_vl",
    "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
GEMMA4_TEXT: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False, "bos_token_id": 2,
    "dtype": "bfloat16", "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 30.0,
    "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536,
    "hidden_size_per_layer_input": 256, "initializer_range": 0.02, "intermediate_size": 6144,
    "layer_types": [("full" if layer % 5 == 4 else "sliding") + "_attention" for layer in range(35)],
    "max_position_embeddings": 131072, "model_type": "gemma4_text", "moe_intermediate_size": None,
    "num_attention_heads": 8, "num_experts": None, "num_global_key_value_heads": None, "num_hidden_layers": 35,
    "num_key_value_heads": 1, "num_kv_shared_layers": 20, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
    "sliding_window": 512, "tie_word_embeddings": True, "top_k_experts": None, "use_bidirectional_attention": None,
    "use_cache": True, "use_double_wide_mlp": True, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
}  # fmt: skip

MIXTURES: dict[str, Settings] = {
    "Mixtral-8x7B": decoder("mixtral", "MixtralForCausalLM", 4096, 14336, 32, (32, 8), 32000, **MIXTRAL | {
        "max_position_embeddings": 32768}),
    "Mixtral-8x22B": decoder("mixtral", "MixtralForCausalLM", 6144, 16384, 56, (48, 8), 32768, **MIXTRAL | {
        "max_position_embeddings": 65536}),
    "Qwen1.5-MoE-A2.7B": decoder("qwen2_moe", "Qwen2MoeForCausalLM", 2048, 5632, 24, (16, 16), 151936, **QWEN_MOE | {
        "max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408,
        "norm_topk_prob": False, "num_experts": 60, "num_experts_per_tok": 4, "rope_theta": 1000000.0,
        "shared_expert_intermediate_size": 5632, "sliding_window": 32768}),
    "Qwen2-57B-A14B": decoder("qwen2_moe", "Qwen2MoeForCausalLM", 3584, 18944, 28, (28, 4), 151936, **QWEN_MOE | {
        "max_position_embeddings": 32768, "max_window_layers": 28, "moe_intermediate_size": 2560,
        "norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8, "rope_theta": 1000000.0,
        "shared_expert_intermediate_size": 20480, "sliding_window": 65536}),
    "Qwen3-30B-A3B": decoder("qwen3_moe", "Qwen3MoeForCausalLM", 2048, 6144, 48, (32, 4, 128), 151936, **QWEN3_MOE),
    "Qwen3-235B-A22B": decoder("qwen3_moe", "Qwen3MoeForCausalLM", 4096, 12288, 94, (64, 4, 128), 151936, **QWEN3_MOE |
                               {"moe_intermediate_size": 1536}),
    "Qwen3-Coder-30B-A3B": decoder("qwen3_moe", "Qwen3MoeForCausalLM", 2048, 5472, 48, (32, 4, 128), 151936,
                                   **QWEN3_MOE | {"max_position_embeddings": 262144, "qkv_bias": False,
                                                  "rope_theta": 10000000, "shared_expert_intermediate_size": 0,
                                                  "use_qk_norm": True}),
    "Qwen3-Next-80B-A3B": decoder("qwen3_next", "Qwen3NextForCausalLM", 2048, 5120, 48, (16, 2, 256), 151936,
                                  **QWEN3_NEXT),
    "Qwen3.5-4B": {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
                   "image_token_id": 248056, "text_config": QWEN3_5_TEXT, "tie_word_embeddings": True,
                   "video_token_id": 248057, "vision_config": QWEN3_5_VISION, "vision_end_token_id": 248054,
                   "vision_start_token_id": 248053},
    "gpt-oss-20b": decoder("gpt_oss", "GptOssForCausalLM", 2880, 2880, 24, (64, 8, 64), 201088, **GPT_OSS | {
        "layer_types": ["sliding_attention", "full_attention"] * 12, "num_local_experts": 32}),
    "gpt-oss-120b": decoder("gpt_oss", "GptOssForCausalLM", 2880, 2880, 36, (64, 8, 64), 201088, **GPT_OSS | {
        "layer_types": ["sliding_attention", "full_attention"] * 18, "num_local_experts": 128}),
    "DeepSeek-V2-Lite": decoder("deepseek_v2", "DeepseekV2ForCausalLM", 2048, 10944, 27, (16, 16), 102400,
                                **DEEPSEEK_V2_LITE),
    "DeepSeek-V2": decoder("deepseek_v2", "DeepseekV2ForCausalLM", 5120, 12288, 60, (128, 128), 102400,
                           **DEEPSEEK_V2_LITE | {
        "moe_intermediate_size": 1536, "n_group": 8, "n_routed_experts": 160, "q_lora_rank": 1536, "topk_group": 3,
        "routed_scaling_factor": 16.0, "topk_method": "group_limited_greedy"}),
    "DeepSeek-R1": decoder("deepseek_v3", "DeepseekV3ForCausalLM", 7168, 18432, 61, (128, 128), 129280, **DEEPSEEK_V3),
    "DeepSeek-V3.2": decoder("deepseek_v32", "DeepseekV32ForCausalLM", 7168, 18432, 61, (128, 128), 129280,
                             **DEEPSEEK_V3 | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}),
    "Moonlight-16B-A3B": decoder("deepseek_v3", "DeepseekV3ForCausalLM", 2048, 11264, 27, (16, 16), 163840,
                                 **DEEPSEEK_V3 | {
        "first_k_dense_replace": 1, "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "q_lora_rank": None,
        "rope_scaling": None, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "topk_group": 1,
        "quantization_config": None, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5}),
    "Kimi-K2": decoder("kimi_k2", "DeepseekV3ForCausalLM", 7168, 18432, 61, (64, 64), 163840, **DEEPSEEK_V3 | {
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 163584,
        "eos_token_id": 163585, "first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1,
        "n_routed_experts": 384, "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
        "topk_group": 1, "rope_scaling": DEEPSEEK_YARN | {"beta_fast": 1.0, "factor": 32.0, "mscale": 1.0,
                                                          "mscale_all_dim": 1.0}}),
    "GLM-4.5-Air": decoder("glm4_moe", "Glm4MoeForCausalLM", 4096, 10944, 46, (96, 8, 128), 151552, **GLM4_MOE),
    "GLM-4.6": decoder("glm4_moe", "Glm4MoeForCausalLM", 5120, 12288, 92, (96, 8, 128), 151552, **GLM4_MOE | {
        "first_k_dense_replace": 3, "max_position_embeddings": 202752, "moe_intermediate_size": 1536,
        "n_routed_experts": 160, "routed_scaling_factor": 2.5, "use_qk_norm": True}),
    "GLM-4.7-Flash": decoder("glm4_moe_lite", "Glm4MoeLiteForCausalLM", 2048, 10240, 47, (20, 20), 154880,
                             **GLM4_MOE | {
        "attention_bias": False, "eos_token_id": [154820, 154827, 154829], "kv_lora_rank": 512,
        "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "routed_scaling_factor": 1.8, "topk_method": "noaux_tc", "v_head_dim": 256,
        "pad_token_id": 154820, "use_qk_norm": None}),
    "MiniMax-M2": decoder("minimax_m2", "MiniMaxM2ForCausalLM", 3072, 1536, 62, (48, 8, 128), 200064,
                          attention_dropout=0.0, attn_type_list=[1] * 62, bos_token_id=None, eos_token_id=None,
                          auto_map={"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}, hidden_act="silu",
                          layernorm_full_attention_beta=1.0, layernorm_linear_attention_beta=1.0,
                          layernorm_mlp_beta=1.0, max_position_embeddings=196608, mlp_intermediate_size=8192,
                          mtp_transformer_layers=1, num_experts_per_tok=8, num_local_experts=256, num_mtp_modules=3,
                          output_router_logits=False, qk_norm_type="per_layer", rms_norm_eps=1e-6,
                          rope_theta=5000000, rotary_dim=64, scoring_func="sigmoid", shared_intermediate_size=0,
                          shared_moe_mode="sigmoid", sliding_window=None, tie_word_embeddings=False,
                          use_mtp=True, use_qk_norm=True, use_routing_bias=True,
                          quantization_config={"activation_scheme": "dynamic", "fmt": "float8_e4m3fn",
                                               "quant_method": "fp8", "weight_block_size": [128, 128],
                                               "modules_to_not_convert": ["gate", "e_score_correction_bias",
                                                                          "lm_head"]}),
    "OLMoE-1B-7B": decoder("olmoe", "OlmoeForCausalLM", 2048, 1024, 16, (16, 16), 50304, attention_bias=False,
                           clip_qkv=None, eos_token_id=50279, hidden_act="silu", max_position_embeddings=4096,
                           norm_topk_prob=False, num_experts=64, num_experts_per_tok=8, rms_norm_eps=1e-5,
                           rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=False, torch_dtype="bfloat16"),
    "granite-3.1-1b-a400m": decoder("granitemoe", "GraniteMoeForCausalLM", 1024, 512, 24, (16, 8), 49155,
                                    attention_bias=False, attention_multiplier=0.015625, embedding_multiplier=12.0,
                                    hidden_act="silu", logits_scaling=6.0, max_position_embeddings=131072,
                                    num_experts_per_tok=8, num_local_experts=32, residual_multiplier=0.22,
                                    rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1500000.0,
                                    tie_word_embeddings=True, torch_dtype="bfloat16"),
    "granite-4.0-h-tiny": decoder("granitemoehybrid", "GraniteMoeHybridForCausalLM", 1536, 512, 40, (12, 4), 100352,
                                  attention_bias=False, attention_multiplier=0.0078125, embedding_multiplier=12,
                                  hidden_act="silu", init_method="mup", logits_scaling=6, mamba_chunk_size=256,
                                  layer_types=["attention" if layer in (5, 15, 25, 35) else "mamba"
                                               for layer in range(40)],
                                  mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64, mamba_d_state=128,
                                  mamba_expand=2, mamba_n_groups=1, mamba_n_heads=48, mamba_proj_bias=False,
                                  max_position_embeddings=131072, normalization_function="rmsnorm",
                                  num_experts_per_tok=6, num_local_experts=64, position_embedding_type="nope",
                                  residual_multiplier=0.22, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000,
                                  shared_intermediate_size=1024, tie_word_embeddings=True, torch_dtype="bfloat16"),
    "LFM2-8B-A1B": decoder("lfm2_moe", "Lfm2MoeForCausalLM", 2048, 7168, 24, (32, 8), 65536, bos_token_id=1,
                           conv_L_cache=3, conv_bias=False, dtype="bfloat16", eos_token_id=7, norm_eps=1e-5,
                           layer_types=["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv"
                                        for layer in range(24)],
                           max_position_embeddings=128000, moe_intermediate_size=1792, norm_topk_prob=True,
                           num_dense_layers=2, num_experts=32, num_experts_per_tok=4, rope_theta=1000000.0,
                           routed_scaling_factor=1.0, use_expert_bias=True),
    "ERNIE-4.5-21B-A3B-PT": decoder("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", 2560, 12288, 28, (20, 4), 103424,
                                    bos_token_id=1, eos_token_id=2, hidden_act="silu", moe_capacity=[64, 64, 64],
                                    max_position_embeddings=131072, moe_gate="topk", moe_intermediate_size=1536,
                                    moe_k=6, moe_layer_end_index=27, moe_layer_interval=1, moe_layer_start_index=1,
                                    moe_num_experts=64, moe_num_shared_experts=2, moe_use_aux_free=True,
                                    num_nextn_predict_layers=1, pad_token_id=0, rms_norm_eps=1e-5,
                                    rope_theta=500000.0, tie_word_embeddings=True, torch_dtype="bfloat16",
                                    use_bias=False),
    "dots.llm1": decoder("dots1", "Dots1ForCausalLM", 4096, 10944, 62, (32, 32), 152064, attention_bias=False,
                         attention_dropout=0.0, eos_token_id=151645, first_k_dense_replace=1, hidden_act="silu",
                         max_position_embeddings=32768, max_window_layers=62, moe_intermediate_size=1408,
                         moe_layer_freq=1, n_routed_experts=128, n_shared_experts=2, norm_topk_prob=True,
                         num_experts_per_tok=6, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000000,
                         routed_scaling_factor=2.5, scoring_func="noaux_tc", sliding_window=None, n_group=1,
                         tie_word_embeddings=False, topk_group=1, use_sliding_window=False),
    "Qwen2-VL-7B": decoder("qwen2_vl", "Qwen2VLForConditionalGeneration", 3584, 18944, 28, (28, 4), 152064,
                           **QWEN_VL | {"max_position_embeddings": 32768, "max_window_layers": 28, "vision_config": {
        "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 3584,
        "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2}}),
    "Qwen2.5-VL-7B": decoder("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", 3584, 18944, 28, (28, 4), 152064,
                             **QWEN_VL | {"max_window_layers": 28, "tie_word_embeddings": False, "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
        "temporal_patch_size": 2}}),
    "Qwen3-VL-8B": {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
                    "image_token_id": 151655, "text_config": QWEN3_VL_TEXT, "tie_word_embeddings": False,
                    "video_token_id": 151656, "vision_config": QWEN3_VISION, "vision_end_token_id": 151653,
                    "vision_start_token_id": 151652},
    "gemma-4-E2B-it": {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
                       "audio_config": None, "dtype": "bfloat16", "eos_token_id": [1, 106], "image_token_id": 258880,
                       "text_config": GEMMA4_TEXT, "tie_word_embeddings": True, "vision_soft_tokens_per_image": 280},
    "Llama-4-Scout": {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
                      "boi_token_index": 200080, "image_token_index": 200092, "torch_dtype": "bfloat16",
                      "text_config": {
        "_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192,
        "attention_dropout": 0.0, "bos_token_id": 200000, "eos_token_id": [200001, 200007, 200008],
        "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760, "model_type": "llama4_text", "no_rope_layers": [],
        "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "num_local_experts": 16, "output_router_logits": False, "pad_token_id": 200018, "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0, "router_jitter_noise": 0.0, "use_qk_norm": True,
        "vocab_size": 202048}},
    "K-EXAONE-236B-A23B": decoder("exaone_moe", "ExaoneMoEForCausalLM", 6144, 18432, 48, (64, 8, 128), 153600,
                                  bos_token_id=1, eos_token_id=53, first_k_dense_replace=1, hidden_act="silu",
                                  is_moe_layer=[False] + [True] * 47, layer_types=windows_but_every(4, 48),
                                  max_position_embeddings=262144, moe_intermediate_size=2048, n_group=1,
                                  norm_topk_prob=True, num_experts=128, num_experts_per_tok=8, num_shared_experts=1,
                                  num_nextn_predict_layers=1, pad_token_id=0, rms_norm_eps=1e-5,
                                  rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
                                  routed_scaling_factor=2.5, scoring_func="sigmoid", sliding_window=128,
                                  sliding_window_pattern="LLLG", tie_word_embeddings=False, topk_group=1,
                                  topk_method="noaux_tc", dtype="bfloat16"),
}  # fmt: skip
