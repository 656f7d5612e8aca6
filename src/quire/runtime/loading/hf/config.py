"""A ModelConfig from config.json. Nothing the file names is ever run: unknown architectures are refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from quire.config.model import Architecture, Dtype, Heads, ModelConfig
from quire.runtime.loading.checks import check_config, inside
from quire.runtime.loading.fields import Fields
from quire.runtime.loading.hf.json_file import read_json
from quire.runtime.loading.hf.rope import read_rope

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"


@dataclass(frozen=True, slots=True)
class _Family:
    """What transformers takes for granted when config.json is silent."""

    architecture: Architecture
    max_position: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / query heads
    window: int | None = None
    attention_bias: bool | None = False  # None: no such setting
    mlp_bias: bool = False  # is there such a setting
    qkv_bias: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", 2_048, mlp_bias=True),
    "MistralForCausalLM": _Family("mistral", 131_072, num_kv_heads=8, window=4_096, attention_bias=None),
    "Qwen2ForCausalLM": _Family("qwen2", 32_768, num_kv_heads=32, attention_bias=None, qkv_bias=True),
    "Qwen3ForCausalLM": _Family("qwen3", 32_768, num_kv_heads=32, head_dim=128),
}
_MODEL_TYPES = {family.architecture: name for name, family in _FAMILIES.items()}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")


def hf_model_config(directory: Path) -> ModelConfig:
    """Read and check the model's numbers. Raises ModelLoadError for what is missing, impossible or not supported."""
    config = Fields(str(directory / CONFIG), read_json(directory / CONFIG))
    family = _FAMILIES[_read_architecture(config)]
    if config.raw("quantization_config") is not None:
        raise config.refuse(
            "quantization_config",
            f"{_method(config)} weights are not supported",
            fix="use the unquantized model or a GGUF",
        )
    max_position = config.integer("max_position_embeddings", family.max_position)
    _refuse_windows(config, family, max_position)
    attention_bias = family.attention_bias is not None and config.flag("attention_bias", family.attention_bias)
    vocab_size = config.integer("vocab_size")
    result = ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        heads=_read_heads(config, family),
        rope=read_rope(config, max_position),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        activation=_read_activation(config),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.mlp_bias and config.flag("mlp_bias", False),
        qk_norm=family.architecture == "qwen3",
        dtype=_read_dtype(config),
        bos_id=inside(_first(_token_ids(config, "bos_token_id")), vocab_size),
        eos_ids=tuple(token for token in _read_eos_ids(directory, config) if inside(token, vocab_size) is not None),
    )
    check_config(result, config.file)
    return result


def _read_architecture(config: Fields) -> str:
    supported = f"supported: {', '.join(_FAMILIES)}"
    names = config.raw("architectures")
    if names is None:
        kind = config.text("model_type")
        if kind not in _MODEL_TYPES:
            raise config.refuse("model_type", f"{kind!r} is not supported", fix=supported)
        return _MODEL_TYPES[kind]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.refuse("architectures", "must name one architecture", fix=supported)
    if names[0] not in _FAMILIES:
        raise config.refuse("architectures", f"{names[0]} is not supported", fix=supported)
    return names[0]


def _method(config: Fields) -> str:
    quantization = config.raw("quantization_config")
    return str(quantization.get("quant_method", "quantized")) if isinstance(quantization, dict) else "quantized"


def _refuse_windows(config: Fields, family: _Family, max_position: int) -> None:
    if config.flag("use_sliding_window", False):
        raise config.refuse("use_sliding_window", "sliding-window attention is not supported")
    if family.architecture == "mistral":
        window = config.optional_integer("sliding_window") if "sliding_window" in config.values else family.window
        if window is not None and window < max_position:
            raise config.refuse(
                "sliding_window",
                f"a window of {window} tokens, below max_position_embeddings = {max_position}, is not supported",
                fix="a model whose sliding_window is null will load",
            )
    kinds = config.raw("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise config.refuse("layer_types", "only full_attention layers are supported")


def _read_heads(config: Fields, family: _Family) -> Heads:
    num_query = config.integer("num_attention_heads")
    if num_query < 1:
        raise config.refuse("num_attention_heads", f"must be at least 1, is {num_query}")
    if "num_key_value_heads" in config.values or family.num_kv_heads is None:
        num_kv = config.integer("num_key_value_heads", num_query)
    else:
        num_kv = family.num_kv_heads
    hidden = config.integer("hidden_size")
    explicit = config.optional_integer("head_dim") if "head_dim" in config.values else family.head_dim
    if explicit is None and hidden % num_query:
        raise config.refuse(
            "hidden_size", f"{hidden} is not a multiple of {num_query} heads, and head_dim is not given"
        )
    return Heads(num_query, num_kv, explicit if explicit is not None else hidden // num_query)


def _read_activation(config: Fields) -> Literal["silu", "gelu", "gelu_tanh"]:
    name = config.text("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise config.refuse("hidden_act", f"{name!r} is not supported", fix=f"supported: {', '.join(_ACTIVATIONS)}")
    return cast("Literal['silu', 'gelu', 'gelu_tanh']", _ACTIVATIONS[name])


def _read_dtype(config: Fields) -> Dtype:
    name = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in _DTYPES:
        raise config.refuse("dtype", f"{name!r} is not supported", fix=f"supported: {', '.join(_DTYPES)}")
    return name


def _read_eos_ids(directory: Path, config: Fields) -> tuple[int, ...]:
    """As transformers' generate has it: generation_config.json decides, config.json where that is silent."""
    path = directory / GENERATION_CONFIG
    generation = Fields(str(path), read_json(path) if path.is_file() else {})
    return _token_ids(generation, "eos_token_id") or _token_ids(config, "eos_token_id")


def _token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    value = fields.raw(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in values):
        raise fields.refuse(key, f"must be a token id or a list of them, is {value!r}")
    return tuple(dict.fromkeys(values))


def _first(tokens: tuple[int, ...]) -> int | None:
    return tokens[0] if tokens else None
