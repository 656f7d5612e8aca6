"""The settings of released decoders with other norms, positions or mixers, as their config.json spells them."""

from __future__ import annotations

from released_dense import Settings, decoder


def windows_but_every(every: int, layers: int) -> list[str]:
    """Return `layer_types` in which every n-th layer sees all tokens."""
    return ["full_attention" if layer % every == every - 1 else "sliding_attention" for layer in range(layers)]


GRANITE = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "mlp_bias": False, "bos_token_id": 0,
    "eos_token_id": 0, "rms_norm_eps": 1e-5, "rope_scaling": None, "torch_dtype": "bfloat16",
}  # fmt: skip
COHERE = {
    "attention_bias": False, "bos_token_id": 5, "eos_token_id": 255001, "hidden_act": "silu", "layer_norm_eps": 1e-5,
    "pad_token_id": 0, "use_qk_norm": False, "logit_scale": 0.0625,
}  # fmt: skip
GLM = {
    "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338], "hidden_act": "silu",
    "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
STARCODER2 = {
    "activation_function": "gelu", "hidden_act": "gelu_pytorch_tanh", "attention_dropout": 0.1, "bos_token_id": 0,
    "embedding_dropout": 0.1, "eos_token_id": 0, "max_position_embeddings": 16384, "mlp_type": "default",
    "norm_epsilon": 1e-05, "norm_type": "layer_norm", "residual_dropout": 0.1, "sliding_window": 4096,
    "sliding_window_type": None, "use_bias": True, "layer_norm_epsilon": 1e-5, "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
}  # fmt: skip
OPT = {
    "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu", "bos_token_id": 2,
    "do_layer_norm_before": True, "eos_token_id": 2, "init_std": 0.02, "layerdrop": 0.0,
    "max_position_embeddings": 2048, "pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16",
}  # fmt: skip
PYTHIA = {
    "hidden_act": "gelu", "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "rotary_emb_base": 10000,
    "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16", "use_parallel_residual": True,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
STABLELM = {
    "bos_token_id": 100257, "eos_token_id": 100257, "hidden_act": "silu", "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096, "partial_rotary_factor": 0.25, "rope_theta": 10000, "tie_word_embeddings": False,
    "torch_dtype": "float16", "qk_layernorm": False, "use_parallel_residual": False,
}  # fmt: skip
OLMO2 = {
    "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257, "hidden_act": "silu",
    "max_position_embeddings": 4096, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
EXAONE4 = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 361, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 65536, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
    "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "sliding_window": None, "sliding_window_pattern": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
HUNYUAN = {
    "add_classification_head": False, "attention_bias": False, "attention_head_dim": 128, "bos_token_id": 1,
    "cla_share_factor": 2, "class_num": 0, "dense_list": [4096, 0], "eod_token_id": 127967, "eos_token_id": 127960,
    "hidden_act": "silu", "im_end_id": 5, "mask_init_id": 12, "max_position_embeddings": 32768, "mlp_bias": False,
    "norm_type": "rms", "org_vocab_size": 128167, "pad_token_id": 127961, "pool_type": "last", "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sep_token_id": 127962, "use_cla": False, "use_qk_norm": True,
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "type": "dynamic"},
    "torch_dtype": "bfloat16", "use_rotary_pos_emb": True, "text_end_id": 7, "text_start_id": 6,
}  # fmt: skip
BLOOM = {
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "architectures": ["BloomForCausalLM"],
    "bias_dropout_fusion": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "hidden_dropout": 0.0,
    "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "model_type": "bloom", "offset_alibi": 100,
    "pretraining_tp": 1, "slow_but_exact": False, "unk_token_id": 0, "vocab_size": 250880,
}  # fmt: skip
MPT = {
    "architectures": ["MPTForCausalLM"], "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4,
    "init_device": "cpu", "learned_pos_emb": True, "logit_scale": None, "model_type": "mpt", "no_bias": True,
    "norm_type": "low_precision_layernorm", "resid_pdrop": 0, "torch_dtype": "bfloat16", "use_cache": False,
    "verbose": 0, "vocab_size": 50432,
}  # fmt: skip
MPT_INNER = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_impl": "torch",
    "attn_pdrop": 0,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
    "softmax_scale": None,
}
GPT_NEO = {
    "activation_function": "gelu_new", "architectures": ["GPTNeoForCausalLM"], "attention_dropout": 0,
    "bos_token_id": 50256, "embed_dropout": 0, "eos_token_id": 50256, "initializer_range": 0.02,
    "intermediate_size": None, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neo",
    "resid_dropout": 0, "vocab_size": 50257, "window_size": 256,
}  # fmt: skip
GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
LFM2 = {
    "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0,
    "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False,
    "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True, "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_heads": 32,
    "pad_token_id": 0, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "use_pos_enc": True, "vocab_size": 65536,
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048, "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8,
}  # fmt: skip
SMOLLM3 = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": 128012,
    "hidden_act": "silu", "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
    "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
    "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
    "sliding_window": None, "use_sliding_window": False, "torch_dtype": "bfloat16",
}  # fmt: skip

OTHERS: dict[str, Settings] = {
    "granite-3.3-2b": decoder("granite", "GraniteForCausalLM", 2048, 8192, 40, (32, 8), 49159, **GRANITE | {
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
        "max_position_embeddings": 131072, "residual_multiplier": 0.22, "rope_theta": 10000000.0,
        "tie_word_embeddings": True}),
    "SmolLM3-3B": decoder("smollm3", "SmolLM3ForCausalLM", 2048, 11008, 36, (16, 4), 128256, **SMOLLM3),
    "c4ai-command-r-v01": decoder("cohere", "CohereForCausalLM", 8192, 22528, 40, (64, 64), 256000, **COHERE | {
        "max_position_embeddings": 8192, "model_max_length": 131072, "rope_theta": 8000000.0,
        "torch_dtype": "float16"}),
    "c4ai-command-r-plus": decoder("cohere", "CohereForCausalLM", 12288, 33792, 64, (96, 8), 256000, **COHERE | {
        "max_position_embeddings": 8192, "model_max_length": 131072, "logit_scale": 0.8333333333333334,
        "rope_theta": 75000000.0, "torch_dtype": "float16", "use_qk_norm": True}),
    "aya-23-8B": decoder("cohere", "CohereForCausalLM", 4096, 14336, 32, (32, 8), 256000, **COHERE | {
        "max_position_embeddings": 8192, "rope_theta": 10000, "torch_dtype": "float16"}),
    "c4ai-command-r7b-12-2024": decoder("cohere2", "Cohere2ForCausalLM", 4096, 14336, 32, (32, 8, 128), 256000,
                                        **COHERE | {
        "_sliding_window_pattern": 4, "cache_implementation": "hybrid", "logit_scale": 0.25,
        "order_of_interleaved_layers": "local_attn_first", "max_position_embeddings": 132096,
        "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
        "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
        "use_parallel_block": True, "use_parallel_embedding": True, "torch_dtype": "bfloat16"}),
    "glm-4-9b-chat-hf": decoder("glm", "GlmForCausalLM", 4096, 13696, 40, (32, 2, 128), 151552, **GLM | {
        "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07}),
    "GLM-4-9B-0414": decoder("glm4", "Glm4ForCausalLM", 4096, 13696, 40, (32, 2, 128), 151552, **GLM | {
        "attention_bias": True, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05}),
    "GLM-4-32B-0414": decoder("glm4", "Glm4ForCausalLM", 6144, 23040, 61, (48, 2, 128), 151552, **GLM | {
        "attention_bias": False, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05}),
    "starcoder2-3b": decoder("starcoder2", "Starcoder2ForCausalLM", 3072, 12288, 30, (24, 2), 49152, **STARCODER2 | {
        "rope_theta": 999999.4420358813}),
    "starcoder2-15b": decoder("starcoder2", "Starcoder2ForCausalLM", 6144, 24576, 40, (48, 4), 49152, **STARCODER2 | {
        "rope_theta": 100000, "torch_dtype": "bfloat16"}),
    "falcon-7b": {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
        "hidden_size": 4544, "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": True,
        "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True,
        "torch_dtype": "bfloat16", "vocab_size": 65024},
    "falcon-40b": {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "bias": False, "hidden_size": 8192, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
        "multi_query": True, "new_decoder_architecture": True, "num_attention_heads": 128, "num_hidden_layers": 60,
        "num_kv_heads": 8, "parallel_attn": True, "torch_dtype": "bfloat16", "vocab_size": 65024},
    "falcon-11B": {
        "activation": "gelu", "alibi": False, "architectures": ["FalconForCausalLM"], "bias": False,
        "ff_factor": 4, "ffn_hidden_size": 16384, "hidden_size": 4096, "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 8192, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": True,
        "num_attention_heads": 32, "num_hidden_layers": 60, "num_kv_heads": 8, "num_ln_in_parallel_attn": 1,
        "parallel_attn": True, "rope_scaling": None, "rope_theta": 500042.0, "vocab_size": 65024},
    "pythia-160m": decoder("gpt_neox", "GPTNeoXForCausalLM", 768, 3072, 12, (12,), 50304, **PYTHIA),
    "pythia-6.9b": decoder("gpt_neox", "GPTNeoXForCausalLM", 4096, 16384, 32, (32,), 50432, **PYTHIA),
    "gpt-neox-20b": decoder("gpt_neox", "GPTNeoXForCausalLM", 6144, 24576, 44, (64,), 50432, **PYTHIA | {
        "attention_probs_dropout_prob": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0}),
    "opt-125m": OPT | {"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 3072, "hidden_size": 768,
                       "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 50272,
                       "word_embed_proj_dim": 768, "dropout": 0.1, "attention_dropout": 0.0},
    "opt-350m": OPT | {"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 4096, "hidden_size": 1024,
                       "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 50272,
                       "word_embed_proj_dim": 512, "do_layer_norm_before": False, "dropout": 0.1,
                       "attention_dropout": 0.0},
    "bloom-560m": BLOOM | {"n_embed": 1024, "n_layer": 24, "num_attention_heads": 16},
    "bloom-7b1": BLOOM | {"n_embed": 4096, "n_layer": 30, "num_attention_heads": 32},
    "bloom": BLOOM | {"hidden_size": 14336, "n_layer": 70, "n_head": 112, "seq_length": 2048},
    "mpt-7b": MPT | {"d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048, "attn_config": MPT_INNER},
    "mpt-30b": MPT | {"d_model": 7168, "n_heads": 64, "n_layers": 48, "max_seq_len": 8192, "attn_config": MPT_INNER},
    "falcon-rw-1b": {
        "alibi": True, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0, "bias": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0,
        "hidden_size": 2048, "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": False,
        "new_decoder_architecture": False, "num_attention_heads": 32, "num_hidden_layers": 24, "parallel_attn": False,
        "vocab_size": 50304},
    "gpt-neo-125m": GPT_NEO | {"attention_types": [[["global", "local"], 6]], "hidden_size": 768, "num_heads": 12,
                               "num_layers": 12},
    "gpt-neo-1.3B": GPT_NEO | {"attention_types": [[["global", "local"], 12]], "hidden_size": 2048, "num_heads": 16,
                               "num_layers": 24},
    "gpt2": GPT2,
    "gpt2-xl": GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True},
    "phi-2": decoder("phi", "PhiForCausalLM", 2560, 10240, 32, (32, 32), 51200, bos_token_id=50256, embd_pdrop=0.0,
                     eos_token_id=50256, hidden_act="gelu_new", layer_norm_eps=1e-5, max_position_embeddings=2048,
                     partial_rotary_factor=0.4, qk_layernorm=False, resid_pdrop=0.1, rope_scaling=None,
                     rope_theta=10000.0, tie_word_embeddings=False, torch_dtype="float16"),
    "stablelm-2-1_6b": decoder("stablelm", "StableLmForCausalLM", 2048, 5632, 24, (32, 32), 100352, **STABLELM | {
        "use_qkv_bias": True}),
    "stablelm-2-12b": decoder("stablelm", "StableLmForCausalLM", 5120, 13824, 40, (32, 8), 100352, **STABLELM | {
        "use_qkv_bias": False, "qk_layernorm": True, "use_parallel_residual": True}),
    "stablelm-3b-4e1t": decoder("stablelm", "StableLmForCausalLM", 2560, 6912, 32, (32, 32), 50304, **STABLELM | {
        "use_qkv_bias": False, "rope_scaling": None}),
    "OLMo-1B-hf": decoder("olmo", "OlmoForCausalLM", 2048, 8192, 16, (16, 16), 50304, attention_bias=False,
                          clip_qkv=None, eos_token_id=50279, hidden_act="silu", max_position_embeddings=2048,
                          pad_token_id=1, rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=True),
    "OLMo-1.7-7B-hf": decoder("olmo", "OlmoForCausalLM", 4096, 11008, 32, (32, 32), 50304, attention_bias=False,
                              clip_qkv=8.0, eos_token_id=50279, hidden_act="silu", max_position_embeddings=4096,
                              pad_token_id=1, rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=False),
    "Apertus-8B-Instruct-2509": decoder(
        "apertus", "ApertusForCausalLM", 4096, 21504, 32, (32, 8), 131072, attention_bias=False, attention_dropout=0.0,
        bos_token_id=1, eos_token_id=68, hidden_act="xielu", max_position_embeddings=65536, mlp_bias=False,
        pad_token_id=3, post_norm=False, qk_norm=True, rms_norm_eps=1e-05, rope_theta=12000000,
        rope_scaling={"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                      "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        tie_word_embeddings=False, torch_dtype="bfloat16"),
    "OLMo-2-1124-7B": decoder("olmo2", "Olmo2ForCausalLM", 4096, 11008, 32, (32, 32), 100352, **OLMO2),
    "Olmo-3-7B-Instruct": decoder("olmo3", "Olmo3ForCausalLM", 4096, 11008, 32, (32, 32), 100278, **OLMO2 | {
        "dtype": "bfloat16", "layer_types": windows_but_every(4, 32), "max_position_embeddings": 65536,
        "sliding_window": 4096, "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn"}}),
    "EXAONE-4.0-1.2B": decoder("exaone4", "Exaone4ForCausalLM", 2048, 4096, 30, (32, 8), 102400, **EXAONE4 | {
        "layer_types": ["full_attention"] * 30}),
    "EXAONE-4.0-32B": decoder("exaone4", "Exaone4ForCausalLM", 5120, 27392, 64, (40, 8), 102400, **EXAONE4 | {
        "head_dim": 128, "max_position_embeddings": 131072, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
        "layer_types": windows_but_every(4, 64), "tie_word_embeddings": False}),
    "Hunyuan-7B-Instruct": decoder("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", 4096, 14336, 32, (32, 8, 128),
                                   128167, **HUNYUAN),
    "Seed-OSS-36B": decoder("seed_oss", "SeedOssForCausalLM", 5120, 27648, 64, (80, 8, 128), 155136,
                            attention_bias=True, attention_out_bias=False, attention_dropout=0.1, bos_token_id=0,
                            eos_token_id=2, hidden_act="silu", max_position_embeddings=524288, mlp_bias=False,
                            pad_token_id=1, residual_dropout=0.1, rms_norm_eps=1e-6, rope_theta=10000000.0,
                            rope_scaling={"rope_type": "default"}, tie_word_embeddings=False),
    "ERNIE-4.5-0.3B-PT": decoder("ernie4_5", "Ernie4_5_ForCausalLM", 1024, 3072, 18, (16, 2, 128), 103424,
                                 bos_token_id=1, eos_token_id=2, hidden_act="silu", max_position_embeddings=131072,
                                 pad_token_id=0, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=True,
                                 torch_dtype="bfloat16", use_bias=False),
    "LFM2-1.2B": LFM2,
    "LFM2-1.2B with layer types": LFM2 | {"dtype": "bfloat16", "tie_embedding": True, "layer_types": [
        "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)]},
    "Minitron-4B-Base": decoder("nemotron", "NemotronForCausalLM", 3072, 9216, 32, (24, 8, 128), 256000,
                                attention_bias=False, bos_token_id=2, eos_token_id=3, hidden_act="relu2",
                                max_position_embeddings=4096, mlp_bias=False, norm_eps=1e-5,
                                partial_rotary_factor=0.5, rope_theta=10000, tie_word_embeddings=False),
    "gpt-j-6b": {
        "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0,
        "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": False,
        "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_inner": None,
        "n_layer": 28, "n_positions": 2048, "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 64,
        "scale_attn_weights": True, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 50400},
    "starcoderbase-1b": {
        "activation_function": "gelu_pytorch_tanh", "architectures": ["GPTBigCodeForCausalLM"],
        "attention_softmax_in_fp32": True, "attn_pdrop": 0.1, "bos_token_id": 0, "embd_pdrop": 0.1, "eos_token_id": 0,
        "inference_runner": 0, "layer_norm_epsilon": 1e-05, "max_batch_size": None, "max_sequence_length": None,
        "model_type": "gpt_bigcode", "multi_query": True, "n_embd": 2048, "n_head": 16, "n_inner": 8192,
        "n_layer": 24, "n_positions": 8192, "pad_key_length": True, "pre_allocate_kv_cache": False,
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "summary_type": "cls_index",
        "validate_runner_input": True, "vocab_size": 49152},
}  # fmt: skip
