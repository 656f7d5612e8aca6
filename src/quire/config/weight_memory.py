"""Memory of a model's weights in the form in which the layers hold them."""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.config.facts import HardwareFacts, cuda_index
from quire.config.level_bytes import integer_bytes, packed_bytes
from quire.config.model import DTYPE_BYTES, ModelConfig


def weight_memory(model: ModelConfig, config: EngineConfig, facts: HardwareFacts, *, has_triton: bool) -> int:
    """Return the bytes of the weights. `has_triton`: the Triton backend runs the model."""
    if config.device.device == "cpu":
        return _on_cpu(model, config, facts)
    return _on_gpu(model, config, facts, has_triton=has_triton)


def _on_gpu(model: ModelConfig, config: EngineConfig, facts: HardwareFacts, *, has_triton: bool) -> int:
    """Return the bytes of the weights on a GPU. The Triton backend keeps quantized weights quantized; other backends
    expand them to the run dtype."""
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
    """Return the bytes of the weights on a CPU.

    16-bit weights are repacked, so a tied output head is a second copy of the embedding table. For float32 rows,
    bfloat16 weights of the layers and of an untied head stay bfloat16. The native kernels keep a quantized embedding
    table as stored, and with integer arithmetic, `level_panels` or `tile_units` all quantized weights. With integer
    arithmetic a tied head uses the table itself.
    """
    quantization, levels, dtype = config.device.quantization, model.levels, config.device.dtype
    weight_bytes = facts.weight_bytes(dtype, "cpu")
    table = model.head_vocab_size * model.embedding_size
    tied = table if model.tie_word_embeddings else 0
    copied = tied if weight_bytes < DTYPE_BYTES["float32"] else 0
    has_levels, is_native = levels.parameters > 0 and quantization is None, facts.native_refusal is None
    quantizes = quantization in ("int8", "int4")
    has_integers = config.device.integer_gemms and is_native and dtype != "float16"
    integer = has_integers and (levels.integer_bytes > 0 if has_levels else quantizes)
    panels = facts.level_panels and facts.has_halves(dtype)
    saved = _halved(model, config, facts) * (weight_bytes - DTYPE_BYTES["bfloat16"])
    keeps_levels = integer or {
        "float32": is_native and facts.level_panels,
        "bfloat16": facts.tile_units or panels,
    }.get(dtype, False)
    if has_levels and keeps_levels:
        table_bytes = 0 if integer else levels.table_bytes  # integer_bytes counts the panels, which a tied head shares
        beside = table_bytes if levels.has_table else copied * weight_bytes
        held = levels.integer_bytes if integer else levels.num_bytes
        return (model.num_parameters - levels.parameters) * weight_bytes + held + beside - saved
    if quantizes and keeps_levels:
        small = model.layer_weights[0]
        nibbles = quantization == "int4"
        held = packed_bytes(small, nibbles=nibbles)
        if integer and not nibbles:  # panels without offsets
            held = integer_bytes(small, -127, 127, has_offsets=False, group=32)
        return (model.num_parameters - small + copied) * weight_bytes + held - saved
    if weight_bytes == DTYPE_BYTES["float32"] and saved:
        return model.num_parameters * weight_bytes - saved
    if weight_bytes == DTYPE_BYTES["float32"]:
        has_table = has_levels and dtype == "float32" and is_native and levels.has_table and model.tie_word_embeddings
        return model.num_parameters * weight_bytes + (levels.table_bytes if has_table else 0)
    return (model.num_parameters + copied) * weight_bytes


def _halved(model: ModelConfig, config: EngineConfig, facts: HardwareFacts) -> int:
    """Return the number of weights that stay bfloat16 and are multiplied by float32 rows.

    0 for encoders and for GGUF files with quantized weights. With pipeline stages only weights in blocks are counted,
    because it is not known here which stage has the output head.
    """
    if config.device.dtype != "float32" or model.dtype != "bfloat16" or not facts.has_halves("float32"):
        return 0
    levels = model.levels
    if model.encoder is not None or (levels.parameters > 0 and levels.has_table):
        return 0
    in_blocks = 0 if config.device.quantization is not None else model.layer_weights[0]
    beside = model.weights.plain_linears if config.parallel.pipeline == 1 else 0
    return max(0, in_blocks + beside - levels.parameters - levels.expanded)


def _quantized(model: ModelConfig, quantization: str) -> tuple[int, int]:
    """Return the number of weights that a GPU holds quantized, and their bytes. fp8 and int8 have a float32 scale per
    output."""
    if quantization == "int4":
        return model.weights.int4_parameters, model.weights.int4_bytes
    small, outputs = model.layer_weights
    return small, small + outputs * DTYPE_BYTES["float32"]
