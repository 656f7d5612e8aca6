"""The memory of a model's weights, as the layers will hold them."""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.config.facts import HardwareFacts, cuda_index
from quire.config.model import DTYPE_BYTES, ModelConfig, integer_bytes, packed_bytes


def weight_memory(model: ModelConfig, config: EngineConfig, facts: HardwareFacts, *, has_triton: bool) -> int:
    """Bytes of the weights. `has_triton`: the Triton backend runs the model."""
    if config.device.device == "cpu":
        return _on_cpu(model, config, facts)
    return _on_gpu(model, config, facts, has_triton=has_triton)


def _on_gpu(model: ModelConfig, config: EngineConfig, facts: HardwareFacts, *, has_triton: bool) -> int:
    """The Triton backend holds quantized weights as such; elsewhere they are expanded to the run dtype."""
    quantization, levels = config.device.quantization, model.levels
    weight_bytes = facts.weight_bytes(config.device.dtype, config.device.device)
    if not has_triton:
        return model.num_parameters * weight_bytes
    if quantization is not None:
        small, num_bytes = _quantized(model, quantization)
        return (model.num_parameters - small) * weight_bytes + num_bytes
    if levels.gpu_is_float8 and not facts.cuda[cuda_index(config.device.device)].supports_fp8:
        return model.num_parameters * weight_bytes
    return (model.num_parameters - levels.gpu_parameters) * weight_bytes + levels.gpu_bytes


def _on_cpu(model: ModelConfig, config: EngineConfig, facts: HardwareFacts) -> int:
    """Half-precision weights are repacked, so a tied output head has a copy besides the embedding table. bfloat16
    weights of the layers and of an untied head stay bfloat16 for float32 rows. The native kernels keep a quantized
    embedding table as it is stored, and with integer products, `level_panels` or `tile_units` all quantized weights;
    with integer products a tied head is the table."""
    quantization, levels, dtype = config.device.quantization, model.levels, config.device.dtype
    weight_bytes = facts.weight_bytes(dtype, "cpu")
    table = (model.vocab_size if model.eagle is None else model.eagle.vocab_size) * model.hidden_size
    tied = table if model.tie_word_embeddings else 0
    copied = tied if weight_bytes < DTYPE_BYTES["float32"] else 0
    has_levels, is_native = levels.parameters > 0 and quantization is None, facts.native_refusal is None
    quantizes = quantization in ("int8", "int4")
    has_integers = config.device.integer_products and is_native and dtype != "float16"
    integer = has_integers and (levels.integer_bytes > 0 if has_levels else quantizes)
    panels = facts.level_panels and facts.has_halves(dtype)
    saved = _halved(model, config, facts) * (weight_bytes - DTYPE_BYTES["bfloat16"])
    keeps_levels = integer or {
        "float32": is_native and facts.level_panels,
        "bfloat16": facts.tile_units or panels,
    }.get(dtype, False)
    if has_levels and keeps_levels:
        table_bytes = 0 if integer else levels.table_bytes  # panels are among those held; a tied head's are the table
        beside = table_bytes if levels.has_table else copied * weight_bytes
        held = levels.integer_bytes if integer else levels.num_bytes
        return (model.num_parameters - levels.parameters) * weight_bytes + held + beside - saved
    if quantizes and keeps_levels:
        small = model.layer_weights[0]
        nibbles = quantization == "int4"
        held = packed_bytes(small, nibbles=nibbles)
        if integer and not nibbles:  # without offsets
            held = integer_bytes(small, -127, 127, has_offsets=False, group=32)
        return (model.num_parameters - small + copied) * weight_bytes + held - saved
    if weight_bytes == DTYPE_BYTES["float32"] and saved:
        return model.num_parameters * weight_bytes - saved
    if weight_bytes == DTYPE_BYTES["float32"]:
        has_table = has_levels and dtype == "float32" and is_native and levels.has_table and model.tie_word_embeddings
        return model.num_parameters * weight_bytes + (levels.table_bytes if has_table else 0)
    return (model.num_parameters + copied) * weight_bytes


def _halved(model: ModelConfig, config: EngineConfig, facts: HardwareFacts) -> int:
    """The weights that float32 rows are multiplied by and that stay bfloat16, as their checkpoint has them. Of a GGUF
    file with quantized weights none are counted, of an encoder there are none. Stages count none beside the blocks:
    which of them has the output head is not known here."""
    if config.device.dtype != "float32" or model.dtype != "bfloat16" or not facts.has_halves("float32"):
        return 0
    levels = model.levels
    if model.encoder is not None or (levels.parameters > 0 and levels.has_table):
        return 0
    in_blocks = 0 if config.device.quantization is not None else model.layer_weights[0]
    beside = model.weights.plain_linears if config.parallel.pipeline == 1 else 0
    return max(0, in_blocks + beside - levels.parameters - levels.expanded)


def _quantized(model: ModelConfig, quantization: str) -> tuple[int, int]:
    """The weights that a GPU holds quantized, and their bytes: fp8 and int8 have a float32 scale for each output."""
    if quantization == "int4":
        return model.weights.int4_parameters, model.weights.int4_bytes
    small, outputs = model.layer_weights
    return small, small + outputs * DTYPE_BYTES["float32"]
