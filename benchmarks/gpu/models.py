"""The models of the GPU benchmarks: real shapes, random weights."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.stored import write_gpt_oss


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A Hugging Face config, and the sizes from which its physical floor is computed."""

    config: dict[str, Any]

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers by which one token is multiplied, without the head."""
        c = self.config
        return self._attention + 3 * c["hidden_size"] * self._widths(c)

    def read_bytes(self, rows: int, weight_bytes: float) -> float:
        """Return the bytes of weights of all layers that a step of `rows` tokens reads, if routers spread tokens evenly
        over experts.

        `weight_bytes`: bytes per weight; experts may be stored in fewer.
        """
        c = self.config
        experts = self._num_experts
        if not experts:
            return self.layer_parameters * weight_bytes
        chosen, each = c["num_experts_per_tok"], 3 * c["hidden_size"] * self._expert_width
        others = self.layer_parameters - self._num_mixtures * chosen * each
        used = experts * (1 - (1 - chosen / experts) ** rows)
        expert_bytes = MXFP4_BYTES if c.get("quantization_config") else weight_bytes
        return others * weight_bytes + self._num_mixtures * used * each * expert_bytes

    @property
    def _num_mixtures(self) -> int:
        """The number of layers with experts."""
        return int(self.config["num_hidden_layers"] - self.config.get("first_k_dense_replace", 0))

    @property
    def _attention(self) -> int:
        c = self.config
        # Projections of the hidden state, from latents to keys and values, and the output projection.
        if "kv_lora_rank" in c:
            heads, nope, rope, value, rank = (c[name] for name in _LATENT)
            wide = c["hidden_size"] * (heads * (nope + rope) + rank + rope + heads * value)
            return int(c["num_hidden_layers"] * (wide + rank * heads * (nope + value)))
        heads = c["head_dim"] * (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"])
        return int(c["num_hidden_layers"] * c["hidden_size"] * heads)

    def _widths(self, config: dict[str, Any]) -> int:
        """Return the summed intermediate sizes of the MLPs that one token passes, over all layers."""
        if not self._num_experts:
            return int(config["num_hidden_layers"] * config["intermediate_size"])
        used = config["num_experts_per_tok"] + config.get("n_shared_experts", 0)
        dense = config["num_hidden_layers"] - self._num_mixtures
        mixtures = self._num_mixtures * used * self._expert_width
        return int(mixtures + dense * config["intermediate_size"])

    @property
    def head_parameters(self) -> int:
        return self.config["vocab_size"] * self.config["hidden_size"]

    @property
    def kv_numbers(self) -> int:
        """Elements that a token takes in the KV cache."""
        c = self.config
        if "kv_lora_rank" in c:
            return int(c["num_hidden_layers"] * (c["kv_lora_rank"] + c["qk_rope_head_dim"]))
        return int(2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"])

    @property
    def attention_width(self) -> int:
        """Multiply-adds of all layers for one (query, key) pair, both products counted as one."""
        c = self.config
        dim = (
            c["head_dim"] if "head_dim" in c else (c["qk_nope_head_dim"] + c["qk_rope_head_dim"] + c["v_head_dim"]) / 2
        )
        return int(c["num_hidden_layers"] * c["num_attention_heads"] * dim)

    @property
    def windows(self) -> Counter[int | None]:
        """How many layers have each window; None: all tokens."""
        c = self.config
        window, count = c.get("sliding_window"), c["num_hidden_layers"]
        if c.get("layer_types"):
            return Counter(window if kind == SLIDING else None for kind in c["layer_types"])
        every = c.get("sliding_window_pattern") or 1
        return Counter(window if (layer + 1) % every else None for layer in range(count))

    @property
    def _num_experts(self) -> int:
        """The experts among which tokens are distributed."""
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        return next((int(self.config[name]) for name in names if self.config.get(name) is not None), 0)

    @property
    def _expert_width(self) -> int:
        return int(self.config.get("moe_intermediate_size") or self.config["intermediate_size"])

    @property
    def load_format(self) -> Literal["auto", "dummy"]:
        """The `load_format` for an engine: random weights are made at load, except those that are stored quantized."""
        return "auto" if self.config.get("quantization_config") else "dummy"

    def write(self, folder: Path) -> Path:
        """Write a model directory: only the config, unless weights are stored quantized (gpt-oss)."""
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.load_format == "auto":
            write_gpt_oss(self.config, folder)
        return folder


MXFP4_BYTES = 0.5 + 1 / 32  # bytes per weight, including its share of a group's exponent
SLIDING, FULL = "sliding_attention", "full_attention"
_LATENT = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
_COMMON = {"hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": False}
MODELS = {
    "qwen3-0.6b": BenchModel(
        {
            **_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
            "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0, "tie_word_embeddings": True, "bos_token_id": 151_643, "eos_token_id": 151_645,
        }
    ),
    "qwen2.5-1.5b": BenchModel(
        {
            **_COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1536,
            "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
            "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0, "tie_word_embeddings": True, "bos_token_id": 151_643, "eos_token_id": 151_645,
        }
    ),
    "llama-3.2-3b": BenchModel(
        {
            **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 3072,
            "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 128_256, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0, "tie_word_embeddings": True, "bos_token_id": 128_000, "eos_token_id": 128_001,
            "mlp_bias": False,
        }
    ),
    "qwen3-30b-a3b": BenchModel(
        {
            **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
            "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936,
            "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
            "tie_word_embeddings": False, "bos_token_id": 151_643, "eos_token_id": 151_645,
        }
    ),
    "deepseek-v2-lite": BenchModel(
        {
            **_COMMON, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
            "intermediate_size": 10_944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False,
            "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1,
            "routed_scaling_factor": 1.0, "num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": None,
            "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "vocab_size": 102_400, "max_position_embeddings": 163_840, "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0, "tie_word_embeddings": False, "bos_token_id": 100_000, "eos_token_id": 100_001,
            "rope_scaling": {
                "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
            },
        }
    ),
    "gemma-3-4b": BenchModel(
        {
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "torch_dtype": "bfloat16",
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2560, "intermediate_size": 10_240,
            "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "vocab_size": 262_208, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "sliding_window": 1024,
            "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "attention_bias": False, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1,
        }
    ),
    "llama-3.1-8b": BenchModel(
        {
            **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
            "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 128_256, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0, "tie_word_embeddings": False, "bos_token_id": 128_000, "eos_token_id": 128_001,
            "mlp_bias": False,
        }
    ),
    "gpt-oss-20b": BenchModel(
        {
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16",
            "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
            "num_experts_per_tok": 4, "swiglu_limit": 7.0, "num_hidden_layers": 24, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201_088, "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5, "sliding_window": 128, "layer_types": [SLIDING, FULL] * 12, "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True, "tie_word_embeddings": False, "bos_token_id": 199_998, "eos_token_id": 200_002,
        }
    ),
}  # fmt: skip
MODELS["gpt-oss-20b-mxfp4"] = BenchModel(
    {**MODELS["gpt-oss-20b"].config, "quantization_config": {"quant_method": "mxfp4"}}
)


_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def find_model(name: str) -> BenchModel:
    """Return one of MODELS by its name, or any other shape from its Hugging Face config: a config.json, or a folder
    with one. Raises ValueError if it is neither."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise ValueError(f"{name} is neither one of {', '.join(MODELS)} nor a config.json or a folder with one")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object")
    if missing := [key for key in _NEEDED if type(config.get(key)) is not int or config[key] < 1]:
        fix = "give the config of a decoder; of a model for images, its text_config"
        raise ValueError(f"{path}: {', '.join(missing)} must be whole numbers above 0; {fix}")
    if config.get("quantization_config") is not None:
        raise ValueError(f"{path}: quantization_config is not read here; leave it out, and use --quantization")
    heads = config["num_attention_heads"]
    usual = {"num_key_value_heads": heads}
    if "kv_lora_rank" not in config:
        usual["head_dim"] = config["hidden_size"] // heads
    return BenchModel(config | {key: value for key, value in usual.items() if config.get(key) is None})
