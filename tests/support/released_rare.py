"""The settings of released models with unusual entries, as their config.json spells them."""

from __future__ import annotations

from released_dense import Settings

# By which MiniCPM 3 divides its frequencies, in short and in long texts.
MINICPM3_FACTORS = [
    1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725, 2.093982484148734,
    3.1446935121267696, 4.937952647693647, 7.524541999994549, 10.475458000005451, 13.062047352306353, 14.85530648787323,
    15.906017515851266, 16.461961959767827, 16.740306425132907, 16.87581087164081, 16.940876586213283,
]  # fmt: skip
RARE: dict[str, Settings] = {
    "Jamba-v0.1": {
        "architectures": ["JambaForCausalLM"], "model_type": "jamba", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "vocab_size": 65536, "num_attention_heads": 32, "num_key_value_heads": 8,
        "attention_dropout": 0.0, "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1,
        "expert_layer_period": 2, "hidden_act": "silu", "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16,
        "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_proj_bias": False, "num_experts": 16, "num_experts_per_tok": 2,
        "num_logits_to_keep": 1, "output_router_logits": False, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "use_mamba_kernels": True},
    "bitnet-b1.58-2B-4T": {
        "architectures": ["BitNetForCausalLM"], "model_type": "bitnet", "hidden_size": 2560, "intermediate_size": 6912,
        "num_hidden_layers": 30, "vocab_size": 128256, "num_attention_heads": 20, "num_key_value_heads": 5,
        "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "relu2", "initializer_range": 0.02,
        "max_position_embeddings": 4096, "quantization_config": {"quant_method": "bitnet", "linear_class":
        "autobitlinear", "quantization_mode": "offline"}, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True},
    "codegen-350M-mono": {
        "architectures": ["CodeGenForCausalLM"], "model_type": "codegen", "activation_function": "gelu_new",
        "attn_pdrop": 0.0, "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": False,
        "layer_norm_epsilon": 1e-05, "n_ctx": 2048, "n_embd": 1024, "n_head": 16, "n_inner": None, "n_layer": 20,
        "n_positions": 2048, "resid_pdrop": 0.0, "rotary_dim": 32, "scale_attn_weights": True, "tie_word_embeddings":
        False, "use_cache": True, "vocab_size": 51200},
    "xglm-564M": {
        "architectures": ["XGLMForCausalLM"], "model_type": "xglm", "activation_dropout": 0, "activation_function":
        "gelu", "attention_dropout": 0.1, "attention_heads": 16, "bos_token_id": 0, "d_model": 1024,
        "decoder_start_token_id": 2, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 4096, "init_std": 0.02, "layerdrop":
        0.0, "max_position_embeddings": 2048, "num_layers": 24, "pad_token_id": 1, "scale_embedding": True,
        "use_cache": True, "vocab_size": 256008},
    "GLM-4.5V": {
        "architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe", "image_token_id": 151363,
        "video_token_id": 151364, "text_config": {
            "model_type": "glm4v_moe_text", "attention_bias": True, "attention_dropout": 0.0, "eos_token_id":
            [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size":
            4096, "intermediate_size": 10944, "max_position_embeddings": 65536, "moe_intermediate_size": 1408,
            "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": {"mrope_section": [8, 12, 12],
            "rope_type": "default"}, "rope_theta": 10000.0, "routed_scaling_factor": 1.0, "topk_group": 1,
            "use_qk_norm": False, "vocab_size": 151552},
        "vision_config": {
            "model_type": "glm4v_moe", "attention_bias": False, "depth": 24, "hidden_act": "silu", "hidden_size": 1536,
            "image_size": 336, "in_channels": 3, "intermediate_size": 10944, "num_heads": 12, "out_hidden_size": 4096,
            "patch_size": 14, "rms_norm_eps": 1e-05, "spatial_merge_size": 2, "temporal_patch_size": 2}},
    "gemma-3n-E2B-it": {
        "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "eos_token_id": [1, 106],
        "text_config": {
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "altup_active_idx": 0, "altup_coef_clip": 120.0,
            "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4, "attention_bias": False,
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size":
            2048, "hidden_size_per_layer_input": 256, "intermediate_size": [8192] * 30, "laurel_rank": 64,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6, "max_position_embeddings": 32768,
            "model_type": "gemma3n_text", "num_attention_heads": 8, "num_hidden_layers": 30, "num_key_value_heads": 2,
            "num_kv_shared_layers": 10, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq":
            10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "vocab_size": 262400,
            "vocab_size_per_layer_input": 262144},
        "vision_config": {"architecture": "mobilenetv5_300m_enc", "model_type": "gemma3n_vision", "hidden_size": 2048},
        "audio_config": {"model_type": "gemma3n_audio", "hidden_size": 1536}},
    "HyperCLOVAX-SEED-Think-14B": {
        "architectures": ["HyperCLOVAXForCausalLM"], "model_type": "hyperclovax", "hidden_size": 6144,
        "intermediate_size": 14336, "num_hidden_layers": 38, "vocab_size": 110592, "num_attention_heads": 48,
        "num_key_value_heads": 8, "head_dim": 128, "attention_bias": False, "attention_multiplier": 0.0078125,
        "embedding_multiplier": 10.0, "hidden_act": "silu", "logits_scaling": 0.125, "max_position_embeddings": 131072,
        "mlp_bias": False, "residual_multiplier": 1.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta":
        100000000, "tie_word_embeddings": False, "use_post_norm": True, "pretraining_tp": 1},
    "MiniCPM3-4B": {
        "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "hidden_size": 2560, "intermediate_size":
        6400, "num_hidden_layers": 62, "vocab_size": 73448, "num_attention_heads": 40, "num_key_value_heads": 40,
        "attention_bias": False, "bos_token_id": 1, "dim_model_base": 256, "eos_token_id": [2, 73440], "hidden_act":
        "silu", "kv_lora_rank": 256, "max_position_embeddings": 32768, "q_lora_rank": 768, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "rms_norm_eps": 1e-05, "rope_scaling": {"type": "longrope", "long_factor":
        MINICPM3_FACTORS, "short_factor": MINICPM3_FACTORS, "original_max_position_embeddings": 32768},
        "scale_depth": 1.4, "scale_emb": 12},
    "Trinity-Mini": {
        "architectures": ["AfmoeForCausalLM"], "model_type": "afmoe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 32, "vocab_size": 200192, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim":
        128, "global_attn_every_n_layers": 4, "hidden_act": "silu", "layer_types": (["sliding_attention"] * 3 +
        ["full_attention"]) * 8, "load_balance_coeff": 0.001, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1024, "mup_enabled": True, "n_group": 1, "num_dense_layers": 2, "num_expert_groups": 1,
        "num_experts": 128, "num_experts_per_tok": 8, "num_limited_groups": 1, "num_shared_experts": 1, "rms_norm_eps":
        1e-05, "rope_scaling": None, "rope_theta": 10000, "route_norm": True, "route_scale": 2.826, "score_func":
        "sigmoid", "sliding_window": 2048, "tie_word_embeddings": False, "topk_group": 1, "use_grouped_mm": True},
    "granite-4.0-micro": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 2560,
        "intermediate_size": 8192, "num_hidden_layers": 40, "vocab_size": 100352, "num_attention_heads": 40,
        "num_key_value_heads": 8, "attention_bias": False, "attention_multiplier": 0.015625, "embedding_multiplier": 12,
        "hidden_act": "silu", "init_method": "mup", "layer_types": ["attention"] * 40, "logits_scaling": 10,
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 256,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 80, "mamba_proj_bias": False,
        "max_position_embeddings": 131072, "normalization_function": "rmsnorm", "num_experts_per_tok": 0,
        "num_local_experts": 0, "position_embedding_type": "rope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000000, "shared_intermediate_size": 8192, "tie_word_embeddings": True},
    "Nemotron-H-8B": {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 4096, "intermediate_size":
        21504, "num_hidden_layers": 52, "vocab_size": 131072, "num_attention_heads": 32, "num_key_value_heads": 8,
        "attention_bias": False, "attention_head_dim": 128, "head_dim": 128, "chunk_size": 128, "conv_kernel": 4,
        "expand": 2, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 128,
        "mamba_proj_bias": False, "max_position_embeddings": 8192, "mlp_bias": False, "mlp_hidden_act": "relu2",
        "n_groups": 8, "num_logits_to_keep": 1, "rescale_prenorm_residual": True, "residual_in_fp32": False,
        "rms_norm_eps": 1e-05, "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False,
        "time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001,
        "time_step_rank": 256, "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True, "auto_map":
        {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}},
    "Bamba-9B": {
        "architectures": ["BambaForCausalLM"], "model_type": "bamba", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8,
        "attention_bias": False, "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "hidden_act": "silu",
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False,
        "max_position_embeddings": 262144, "mlp_bias": False, "num_logits_to_keep": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False},
    "AFM-4.5B": {
        "architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_size": 2560, "intermediate_size": 18432,
        "num_hidden_layers": 36, "vocab_size": 128004, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim":
        128, "attention_bias": False, "hidden_act": "relu2", "max_position_embeddings": 65536, "mlp_bias": False,
        "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0,
        "original_max_position_embeddings": 3276, "rope_type": "yarn", "type": "yarn"}, "rope_theta": 10000.0,
        "tie_word_embeddings": False},
    "helium-1-2b": {
        "architectures": ["HeliumForCausalLM"], "model_type": "helium", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 28, "vocab_size": 64000, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim":
        128, "attention_bias": False, "hidden_act": "silu", "max_position_embeddings": 4096, "mlp_bias": False,
        "rms_norm_eps": 1e-08, "rope_theta": 20000.0, "tie_word_embeddings": False},
    "Hunyuan-A13B": {
        "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "hidden_size": 4096,
        "intermediate_size": 3072, "num_hidden_layers": 32, "vocab_size": 128167, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "add_classification_head": False, "attention_bias": False,
        "attention_head_dim": 128, "cla_share_factor": 2, "class_num": 0, "dense_list": [4096, 0], "eod_token_id":
        127967, "group_limited_greedy": False, "hidden_act": "silu", "mlp_bias": False, "moe_drop_tokens": False,
        "moe_intermediate_size": [3072] * 32, "moe_layer_num_skipped": 0, "moe_random_routing_dropped_token": False,
        "moe_topk": [8] * 32, "n_group": None, "norm_topk_prob": True, "norm_type": "rms", "num_experts": 64,
        "num_shared_expert": [1] * 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_scaling":
        {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type":
        "dynamic"}, "rope_theta": 10000.0, "routed_scaling_factor": 1.0, "tie_word_embeddings": True, "topk_group":
        None, "use_cla": False, "use_mixed_mlp_moe": True, "use_qk_norm": True, "use_rotary_pos_emb": True,
        "capacity_factor": 1.0, "kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": None, "qk_rope_head_dim":
        None, "v_head_dim": None, "qk_norm": True, "router_aux_loss_coef": 0.0, "pad_id": 127961},
    "GLM-5": {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144,
        "intermediate_size": 12288, "num_hidden_layers": 78, "vocab_size": 154880, "num_attention_heads": 64,
        "num_key_value_heads": 64, "head_dim": 64, "attention_bias": False, "dtype": "bfloat16", "eos_token_id":
        [154820, 154827, 154829], "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "index_head_dim": 128,
        "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True, "kv_lora_rank": 512,
        "max_position_embeddings": 202752, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim":
        192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_interleave": True, "rope_parameters": {"rope_theta":
        1000000, "rope_type": "default"}, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256},
    "Solar-Open-100B": {
        "architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open", "hidden_size": 4096, "intermediate_size":
        10240, "num_hidden_layers": 48, "vocab_size": 196608, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "attention_bias": False, "first_k_dense_replace": 0, "hidden_act": "silu",
        "max_position_embeddings": 131072, "moe_intermediate_size": 1280, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 2.0,
        "original_max_position_embeddings": 65536, "rope_type": "yarn", "type": "yarn", "attention_factor": 1.0},
        "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
        "use_qk_norm": False},
    "FlexOlmo-7x7B": {
        "architectures": ["FlexOlmoForCausalLM"], "model_type": "flex_olmo", "hidden_size": 4096, "intermediate_size":
        11008, "num_hidden_layers": 32, "vocab_size": 100352, "num_attention_heads": 32, "num_key_value_heads": 32,
        "attention_bias": False, "hidden_act": "silu", "max_position_embeddings": 4096, "norm_topk_prob": False,
        "num_experts": 7, "num_experts_per_tok": 7, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000,
        "tie_word_embeddings": False},
}  # fmt: skip
