"""The settings of released dense decoders, as their config.json spells them: old and new names, nulls, nested texts.

Only what the model's output or our reader depends on, and the entries that a reader may stumble over.
"""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip


def decoder(
    kind: str, name: str, hidden: int, inner: int, layers: int, heads: tuple[int, ...], vocab: int, **others: Any
) -> Settings:
    """Return a config.json with the usual names. `heads`: query heads, key heads and their size, if they are given."""
    sizes = dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=False))
    return {
        "architectures": [name], "model_type": kind, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "vocab_size": vocab, "initializer_range": 0.02, "use_cache": True,
    } | sizes | others  # fmt: skip


def llama(hidden: int, inner: int, layers: int, heads: tuple[int, ...], vocab: int, **others: Any) -> Settings:
    usual = {"hidden_act": "silu", "pretraining_tp": 1, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
             "transformers_version": "4.43.0.dev0", "tie_word_embeddings": False, "attention_bias": False}  # fmt: skip
    return decoder("llama", "LlamaForCausalLM", hidden, inner, layers, heads, vocab, **usual | others)


def qwen(kind: str, hidden: int, inner: int, layers: int, heads: tuple[int, ...], vocab: int, **o: Any) -> Settings:
    name = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    usual = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": None,
             "use_sliding_window": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
             "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645}  # fmt: skip
    return decoder(kind, name, hidden, inner, layers, heads, vocab, **usual | o)


def gemma2(hidden: int, inner: int, layers: int, heads: tuple[int, ...], scale: int) -> Settings:
    return decoder(
        "gemma2", "Gemma2ForCausalLM", hidden, inner, layers, heads, 256000, query_pre_attn_scalar=scale,
        attention_bias=False, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, cache_implementation="hybrid",
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192,
        rms_norm_eps=1e-6, rope_theta=10000.0, sliding_window=4096, sliding_window_size=4096,
        torch_dtype="bfloat16", bos_token_id=2, eos_token_id=[1, 107], pad_token_id=0,
    )  # fmt: skip


# 4 windows of 5 are written as nothing but a pattern: the file relies on transformers' defaults.
GEMMA3_SMALL = decoder(
    "gemma3_text", "Gemma3ForCausalLM", 1152, 6912, 26, (4, 1, 256), 262144, attn_logit_softcapping=None,
    attention_bias=False, cache_implementation="hybrid", final_logit_softcapping=None,
    hidden_activation="gelu_pytorch_tanh", max_position_embeddings=32768, query_pre_attn_scalar=256,
    rms_norm_eps=1e-6, rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
    sliding_window_pattern=6, torch_dtype="bfloat16", bos_token_id=2, eos_token_id=[1, 106],
)  # fmt: skip
GEMMA3_TEXT = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
               "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
GEMMA3_LARGE = {"hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text", "head_dim": 128,
                "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
                "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024}  # fmt: skip


def gemma3(text: Settings) -> Settings:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "boi_token_index": 255999,
        "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144, "mm_tokens_per_image": 256,
        "text_config": text, "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16,
                          "model_type": "siglip_vision_model", "num_hidden_layers": 27, "patch_size": 14,
                          "vision_use_head": False},
    }  # fmt: skip


def phi3(hidden: int, inner: int, layers: int, heads: tuple[int, ...], vocab: int, **others: Any) -> Settings:
    usual = {"attention_bias": False, "embd_pdrop": 0.0, "hidden_act": "silu", "rms_norm_eps": 1e-5,
             "resid_pdrop": 0.0, "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1,
             "eos_token_id": 32000, "original_max_position_embeddings": 4096, "torch_dtype": "bfloat16",
             "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}  # fmt: skip
    return decoder("phi3", "Phi3ForCausalLM", hidden, inner, layers, heads, vocab, **usual | others)


def long_rope(pairs: int) -> Settings:
    return {"type": "longrope", "short_factor": [1.0 + pair / 99 for pair in range(pairs)],
            "long_factor": [1.5 + pair for pair in range(pairs)]}  # fmt: skip


def mistral(hidden: int, inner: int, layers: int, heads: tuple[int, ...], vocab: int, **others: Any) -> Settings:
    usual = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
             "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    return decoder("mistral", "MistralForCausalLM", hidden, inner, layers, heads, vocab, **usual | others)


MINISTRAL3_ROPE = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                   "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                   "rope_type": "yarn", "type": "yarn"}  # fmt: skip
SMALL_3_1 = {"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
             "initializer_range": 0.02, "intermediate_size": 32768, "max_position_embeddings": 131072,
             "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
             "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True,
             "vocab_size": 131072}  # fmt: skip
MISTRAL3 = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10,
            "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
            "torch_dtype": "bfloat16", "vision_feature_layer": -1, "text_config": SMALL_3_1,
            "vision_config": {"head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
                              "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16,
                              "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14,
                              "rope_theta": 10000.0}}  # fmt: skip

DENSE: dict[str, Settings] = {
    "TinyLlama-1.1B": llama(2048, 5632, 22, (32, 4), 32000, max_position_embeddings=2048, rope_scaling=None),
    "Llama-2-7b": llama(4096, 11008, 32, (32, 32), 32000, max_position_embeddings=4096, torch_dtype="float16",
                        rope_scaling=None, bos_token_id=1, eos_token_id=2),
    "vicuna-7b-v1.5-16k": llama(4096, 11008, 32, (32, 32), 32000, max_position_embeddings=4096,
                                max_sequence_length=16384, rope_scaling={"factor": 4.0, "type": "linear"}),
    "CodeLlama-7b": llama(4096, 11008, 32, (32, 32), 32016, max_position_embeddings=16384, rope_theta=1000000),
    "Yi-1.5-9B": llama(4096, 11008, 48, (32, 4), 64000, max_position_embeddings=4096, rms_norm_eps=1e-6,
                       rope_theta=5000000.0, pad_token_id=0),
    "DeepSeek-Coder-6.7b": llama(4096, 11008, 32, (32, 32), 32256, max_position_embeddings=16384, rope_theta=100000,
                                 rms_norm_eps=1e-6, rope_scaling={"factor": 4.0, "type": "linear"}),
    "Llama-3-8B": llama(4096, 14336, 32, (32, 8), 128256, max_position_embeddings=8192, rope_theta=500000.0,
                        rope_scaling=None, bos_token_id=128000, eos_token_id=128001),
    "Llama-3.1-8B-Instruct": llama(4096, 14336, 32, (32, 8), 128256, max_position_embeddings=131072, mlp_bias=False,
                                   rope_theta=500000.0, rope_scaling=LLAMA3_ROPE, bos_token_id=128000,
                                   eos_token_id=[128001, 128008, 128009]),
    "Llama-3.2-1B": llama(2048, 8192, 16, (32, 8, 64), 128256, max_position_embeddings=131072, mlp_bias=False,
                          rope_theta=500000.0, rope_scaling=LLAMA3_ROPE | {"factor": 32.0}, tie_word_embeddings=True),
    "Llama-3.2-3B": llama(3072, 8192, 28, (24, 8, 128), 128256, max_position_embeddings=131072, mlp_bias=False,
                          rope_theta=500000.0, rope_scaling=LLAMA3_ROPE | {"factor": 32.0}, tie_word_embeddings=True),
    "DeepSeek-R1-Distill-Llama-8B": llama(4096, 14336, 32, (32, 8), 128256, max_position_embeddings=131072,
                                          rope_theta=500000.0, rope_scaling=LLAMA3_ROPE, mlp_bias=False,
                                          bos_token_id=128000, eos_token_id=128001),
    "SmolLM2-135M": llama(576, 1536, 30, (9, 3), 49152, max_position_embeddings=8192, rope_theta=100000,
                          rope_scaling=None, rope_interleaved=False, is_llama_config=True, tie_word_embeddings=True,
                          bos_token_id=0, eos_token_id=0),
    "Mistral-7B-v0.1": mistral(4096, 14336, 32, (32, 8), 32000, max_position_embeddings=32768, rope_theta=10000.0,
                               sliding_window=4096),
    "Mistral-7B-Instruct-v0.3": mistral(4096, 14336, 32, (32, 8), 32768, max_position_embeddings=32768,
                                        rope_theta=1000000.0, sliding_window=None),
    "Mistral-Nemo-2407": mistral(5120, 14336, 40, (32, 8, 128), 131072, max_position_embeddings=128000,
                                 rope_theta=1000000.0, sliding_window=None),
    "Ministral-8B-2410": mistral(4096, 12288, 36, (32, 8, 128), 131072, max_position_embeddings=32768,
                                 rope_theta=100000000.0, sliding_window=32768),
    "Mistral-Small-24B-2501": mistral(5120, 32768, 40, (32, 8, 128), 131072, max_position_embeddings=32768,
                                      rope_theta=100000000.0, sliding_window=None),
    "Mistral-Small-3.1-24B": MISTRAL3,
    "Ministral-3-8B": MISTRAL3 | {"dtype": "bfloat16", "tie_word_embeddings": False, "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3",
        "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_parameters": MINISTRAL3_ROPE, "sliding_window": None, "use_cache": True, "vocab_size": 131072}},
    "Qwen1.5-0.5B": qwen("qwen2", 1024, 2816, 24, (16, 16), 151936, max_position_embeddings=32768, max_window_layers=21,
                         sliding_window=32768, tie_word_embeddings=True),
    "Qwen2-7B": qwen("qwen2", 3584, 18944, 28, (28, 4), 152064, max_position_embeddings=131072, max_window_layers=28,
                     sliding_window=131072),
    "Qwen2.5-0.5B": qwen("qwen2", 896, 4864, 24, (14, 2), 151936, max_position_embeddings=32768, max_window_layers=24,
                         sliding_window=32768, use_mrope=False, tie_word_embeddings=True),
    "Qwen2.5-7B-Instruct with YaRN": qwen("qwen2", 3584, 18944, 28, (28, 4), 152064, max_position_embeddings=32768,
                                          max_window_layers=28, sliding_window=131072, rope_scaling={
                                              "factor": 4.0, "original_max_position_embeddings": 32768,
                                              "type": "yarn"}),
    "DeepSeek-R1-Distill-Qwen-7B": qwen("qwen2", 3584, 18944, 28, (28, 4), 152064, max_position_embeddings=131072,
                                        max_window_layers=28, rope_theta=10000, sliding_window=4096, use_mrope=False),
    "Qwen3-0.6B": qwen("qwen3", 1024, 3072, 28, (16, 8, 128), 151936, max_position_embeddings=40960,
                       max_window_layers=28, attention_bias=False, rope_scaling=None, tie_word_embeddings=True),
    "Qwen3-8B": qwen("qwen3", 4096, 12288, 36, (32, 8, 128), 151936, max_position_embeddings=40960,
                     max_window_layers=36, attention_bias=False, rope_scaling=None),
    "Qwen3-32B": qwen("qwen3", 5120, 25600, 64, (64, 8, 128), 151936, max_position_embeddings=40960,
                      max_window_layers=64, attention_bias=False, rope_scaling=None),
    "Qwen3-4B-Instruct-2507": qwen("qwen3", 2560, 9728, 36, (32, 8, 128), 151936, max_position_embeddings=262144,
                                   max_window_layers=36, attention_bias=False, rope_scaling=None, rope_theta=5000000,
                                   tie_word_embeddings=True),
    "Qwen3-Embedding-0.6B": qwen("qwen3", 1024, 3072, 28, (16, 8, 128), 151669, max_position_embeddings=32768,
                                 max_window_layers=28, attention_bias=False, rope_scaling=None,
                                 tie_word_embeddings=True),
    "gemma-2b": decoder("gemma", "GemmaForCausalLM", 2048, 16384, 18, (8, 1, 256), 256000, attention_bias=False,
                        hidden_act="gelu", max_position_embeddings=8192, rms_norm_eps=1e-6, rope_scaling=None,
                        rope_theta=10000.0, torch_dtype="bfloat16", bos_token_id=2, eos_token_id=1),
    "gemma-1.1-7b-it": decoder("gemma", "GemmaForCausalLM", 3072, 24576, 28, (16, 16, 256), 256000,
                               attention_bias=False, hidden_act="gelu_pytorch_tanh", max_position_embeddings=8192,
                               hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6, torch_dtype="bfloat16",
                               rope_scaling=None, rope_theta=10000.0),
    "gemma-2-2b-it": gemma2(2304, 9216, 26, (8, 4, 256), 256),
    "gemma-2-27b": gemma2(4608, 36864, 46, (32, 16, 128), 144),
    "gemma-3-1b-it": GEMMA3_SMALL,
    "gemma-3-4b-it": gemma3(GEMMA3_TEXT),
    "gemma-3-27b-it": gemma3(GEMMA3_LARGE),
    "gemma-3-270m": GEMMA3_SMALL | {
        "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "_sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0, "use_bidirectional_attention": False,
        "layer_types": [("full" if layer % 6 == 5 else "sliding") + "_attention" for layer in range(18)]},
    "Phi-3-mini-4k": phi3(3072, 8192, 32, (32, 32), 32064, max_position_embeddings=4096, rope_scaling=None,
                          sliding_window=2047, pad_token_id=32000),
    "Phi-3-mini-128k": phi3(3072, 8192, 32, (32, 32), 32064, max_position_embeddings=131072, sliding_window=262144,
                            rope_scaling=long_rope(48)),
    "Phi-3.5-mini": phi3(3072, 8192, 32, (32, 32), 32064, max_position_embeddings=131072, sliding_window=262144,
                         rope_scaling=long_rope(48)),
    "phi-4": phi3(5120, 17920, 40, (40, 10), 100352, max_position_embeddings=16384, rope_theta=250000,
                  original_max_position_embeddings=16384, rope_scaling=None, sliding_window=None,
                  bos_token_id=100257, eos_token_id=100257),
    "Phi-4-mini": phi3(3072, 8192, 32, (24, 8), 200064, max_position_embeddings=131072, partial_rotary_factor=0.75,
                       rope_scaling=long_rope(48), sliding_window=262144, tie_word_embeddings=True,
                       full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False,
                       bos_token_id=199999, eos_token_id=199999),
}  # fmt: skip
