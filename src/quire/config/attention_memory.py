"""GPU memory of attention besides the KV cache: partial results and the dequantized scratch copy."""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.config.facts import HardwareFacts, cuda_index
from quire.config.kv_cache import SCALED_DTYPES
from quire.config.model import DTYPE_BYTES, ModelConfig
from quire.config.sizes import MIB

LATENT_PARTS_BYTES = 80 * MIB  # partial results of attention over latents, which all query heads share
# Partial results of attention with heads larger than LARGE_DIM, or with two kinds of heads.
LARGE_PARTS_BYTES, LARGE_DIM = 48 * MIB, 256
SCRATCH_BYTES = 256 * MIB  # upper bound of the dequantized keys and values that prompt chunks read
LEAST_SCRATCH_TOKENS = 16_384
HOPPER = 9  # major compute capability of GPUs whose attention kernel cannot read a quantized cache
HOPPER_DIMS = (64, 80, 96, 128, 256)  # head sizes that kernel supports


def attention_parts(model: ModelConfig, config: EngineConfig) -> int:
    """Return the bytes of partial attention results in float32: of rows whose keys are split, and of shared prefixes. 0
    where they are small."""
    heads = model.heads
    found = config.scheduler.num_rows * heads.num_query * heads.value_dim * DTYPE_BYTES["float32"]
    if heads.latent is not None:
        return LATENT_PARTS_BYTES + found
    return LARGE_PARTS_BYTES + found if model.local_heads is not None or heads.dim > LARGE_DIM else 0


def scratch_tokens(model: ModelConfig, config: EngineConfig) -> int:
    """Return how many tokens of one layer the dequantized scratch copy of a quantized cache holds. Prompt chunks attend
    over it.

    Enough for one sequence or for what a usual step reads, up to SCRATCH_BYTES. `model`: the model of one rank.
    """
    scheduler = config.scheduler
    usual = max(scheduler.max_model_len, 2 * scheduler.max_num_batched_tokens, LEAST_SCRATCH_TOKENS)
    return min(usual, scheduler.num_rows * scheduler.max_model_len, SCRATCH_BYTES // _token_bytes(model, config))


def scratch_memory(model: ModelConfig, config: EngineConfig, facts: HardwareFacts, *, has_triton: bool) -> int:
    """Return the bytes of the dequantized scratch copy; 0 where prompt chunks read the quantized cache itself."""
    device = config.device
    if not has_triton or device.device.partition(":")[0] != "cuda" or device.kv_dtype not in SCALED_DTYPES:
        return 0
    is_hopper = facts.cuda[cuda_index(device.device)].capability[0] == HOPPER
    takes = model.local_heads is None and model.heads.latent is None and model.heads.dim in HOPPER_DIMS
    sees_all = any(spec.kind == "full" for spec in model.kv_specs)
    if not (is_hopper and takes and sees_all and device.dtype != "float32"):
        return 0
    return scratch_tokens(model, config) * _token_bytes(model, config)


def _token_bytes(model: ModelConfig, config: EngineConfig) -> int:
    return 2 * model.heads.kv_size * DTYPE_BYTES[config.device.dtype]
