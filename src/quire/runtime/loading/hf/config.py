"""Makes a ModelConfig from config.json. No code that the file names is run: unknown architectures are refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.fields import Fields
from quire.config.model import MXFP4, Dtype, ModelConfig
from quire.config.mxfp4 import mxfp4_experts
from quire.runtime.loading.checks import check_config, inside
from quire.runtime.loading.hf.json_file import read_json
from quire.runtime.loading.hf.quantized.registry import METHODS, method_name, read_method
from quire.runtime.models.registry import CLASSES, ENTRIES, find_family

if TYPE_CHECKING:
    from quire.runtime.loading.hf.quantized.method import Method

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
_WHOLE, _SPECIAL = ("tie_word_embeddings", "dtype", "torch_dtype"), ("bos_token_id", "eos_token_id")
_DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")


def hf_family(directory: Path) -> str:
    """Return the name of the model's family. Needs no torch. Raises ModelLoadError if it is not supported."""
    return _read_family(Fields(str(directory / CONFIG), read_json(directory / CONFIG)))


def hf_model_config(directory: Path, *, is_head: bool = False) -> ModelConfig:
    """Read and check the config of the model, or of the MTP head in its checkpoint. Raises ModelLoadError for missing,
    impossible or unsupported values, and ConfigError if there is no such head."""
    from quire.runtime.models.build import count_weights

    config = Fields(str(directory / CONFIG), read_json(directory / CONFIG))
    family = find_family(_read_family(config))
    config = _unfold(config, family.nested)
    numbers = family.read(config)
    vocab_size = numbers.vocab_size
    result = replace(
        numbers,
        dtype=_read_dtype(config),
        quantization=method_name(config),
        bos_id=inside(_first(_token_ids(config, "bos_token_id")), vocab_size),
        eos_ids=tuple(token for token in _read_eos_ids(directory, config) if inside(token, vocab_size) is not None),
    )
    check_config(result, config.file)
    if is_head:
        from quire.runtime.loading.hf.mtp import hf_head_config

        result = hf_head_config(directory, result)
    method = read_method(config)
    if method is not None:
        from quire.runtime.loading.hf.quantized.layers import count_stored

        result = replace(result, levels=count_stored(directory, method, result))
    elif result.quantization == MXFP4:
        result = replace(result, levels=mxfp4_experts(result))
    return count_weights(result)


def hf_method(directory: Path) -> Method | None:
    """Return the quantization method of the checkpoint, or None if it has none or the family handles it itself."""
    config = Fields(str(directory / CONFIG), read_json(directory / CONFIG))
    return read_method(_unfold(config, find_family(_read_family(config)).nested))


def _unfold(config: Fields, key: str | None) -> Fields:
    """Return the settings of the text model inside a multimodal config. What counts for the whole model is read from
    the outer object, and special tokens that the inner one leaves out."""
    inner = None if key is None else config.raw(key)
    if not isinstance(inner, dict):
        return config
    outer = {name: config.raw(name) for name in _WHOLE if config.raw(name) is not None}
    outer |= {name: config.raw(name) for name in _SPECIAL if inner.get(name) is None}
    return Fields(config.file, {**config.values, **inner, **outer})


def _read_family(config: Fields) -> str:
    name = _read_name(config)
    method = method_name(config)
    known = (*ENTRIES[name].formats, *(() if ENTRIES[name].by_inputs else METHODS))
    if method is not None and method not in known:
        reason = f"{method} weights of {name} models are not supported"
        raise config.refuse(
            "quantization_config", reason, fix=f"supported: {', '.join(known) or 'unquantized weights, GGUF'}"
        )
    return name


def _supported(name: str, known: Iterable[str]) -> str:
    """Return the fix for a model of an unknown kind: the supported names that are most similar, and where all are."""
    near = get_close_matches(name, known, 3, 0.0)
    return f"supported are {', '.join(near)} and others; docs/reference/models.md lists them"


def _read_name(config: Fields) -> str:
    names = config.raw("architectures")
    if names is None:
        kind = config.text("model_type")
        if kind not in ENTRIES:
            raise config.refuse("model_type", f"{kind!r} is not supported", fix=_supported(kind, ENTRIES))
        return kind
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.refuse("architectures", "must name one architecture", fix="such as LlamaForCausalLM")
    if names[0] not in CLASSES:
        raise config.refuse("architectures", f"{names[0]} is not supported", fix=_supported(names[0], CLASSES))
    if names[0] == "LlamaForCausalLM" and config.raw("draft_vocab_size") is not None:
        return "eagle3"  # the architecture that the first published EAGLE-3 heads have
    inner = config.raw("text_config")
    is_mistral4 = isinstance(inner, dict) and inner.get("model_type") == "mistral4"
    if names[0] == "Mistral3ForConditionalGeneration" and is_mistral4:
        return "mistral4"
    return CLASSES[names[0]]


def _read_dtype(config: Fields) -> Dtype:
    usual = "float32" if method_name(config) is None else "bfloat16"
    name = config.text("dtype", config.text("torch_dtype", usual)).removeprefix("torch.")
    if name not in _DTYPES:
        raise config.refuse("dtype", f"{name!r} is not supported", fix=f"supported: {', '.join(_DTYPES)}")
    return name


def _read_eos_ids(directory: Path, config: Fields) -> tuple[int, ...]:
    """Return the end tokens like transformers' generate: from generation_config.json, or else from config.json."""
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
