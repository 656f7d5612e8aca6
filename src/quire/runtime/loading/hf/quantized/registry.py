"""The registry of supported quantized checkpoint formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config.fields import Fields

if TYPE_CHECKING:
    from quire.runtime.loading.hf.quantized.method import Method

KEYS = ("quantization_config", "compression_config")  # keys of config.json; the second is an old name
METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "bitnet")  # values of `quant_method`


def method_name(config: Fields) -> str | None:
    """Return the `quant_method` of config.json, or None if weights are not quantized. Needs no torch."""
    given = next((config.raw(key) for key in KEYS if config.raw(key) is not None), None)
    if given is None:
        return None
    return str(given.get("quant_method", "quantized")) if isinstance(given, dict) else "quantized"


def read_method(config: Fields) -> Method | None:
    """Return the quantization method of a config.json; None if weights are not quantized, or the family handles the
    method itself. Raises ModelLoadError for unsupported settings."""
    name = method_name(config)
    if name not in METHODS:
        return None
    given = next(config.raw(key) for key in KEYS if config.raw(key) is not None)
    assert isinstance(given, dict)
    from quire.runtime.loading.hf.quantized.awq import Awq
    from quire.runtime.loading.hf.quantized.bitnet import BitNet
    from quire.runtime.loading.hf.quantized.bitsandbytes import BitsAndBytes
    from quire.runtime.loading.hf.quantized.compressed_tensors import CompressedTensors
    from quire.runtime.loading.hf.quantized.float8 import Float8
    from quire.runtime.loading.hf.quantized.gptq import Gptq

    prefix = "quantization_config."
    own = Fields(config.file, {prefix + key: value for key, value in given.items()}, prefix)
    methods: dict[str, type[Gptq | Awq | CompressedTensors | Float8 | BitsAndBytes | BitNet]] = {
        each.name: each for each in (Gptq, Awq, CompressedTensors, Float8, BitsAndBytes, BitNet)
    }
    method = methods[name](own)
    method.has_cache_scheme = own.raw("kv_cache_scheme") is not None
    return method
