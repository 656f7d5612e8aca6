"""The memory that attention on a GPU takes beside the KV cache, where that is much."""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.config.facts import HardwareFacts, cuda_index
from quire.config.kv_cache import SCALED_DTYPES
from quire.config.model import DTYPE_BYTES, ModelConfig
from quire.config.sizes import MIB

LATENT_PARTS_BYTES = 80 * MIB  # partial results of attention over latents on a GPU, which all query heads share
LARGE_PARTS_BYTES, LARGE_DIM = 48 * MIB, 256  # the same of heads of more numbers, and of a second kind of heads
SCRATCH_BYTES = 256 * MIB  # the most that keys and values take which prompt chunks read dequantized
LEAST_SCRATCH_TOKENS = 16_384
HOPPER = 9  # major compute capability of the GPUs whose attention kernel reads plain numbers alone
HOPPER_DIMS = (64, 80, 96, 128, 256)  # numbers of the heads it takes


def attention_parts(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of what rows found so far, in float32: parts of rows that are cut, and of shared prefixes."""
    heads = model.heads
    found = config.scheduler.num_rows * heads.num_query * heads.value_dim * DTYPE_BYTES["float32"]
    if heads.latent is not None:
        return LATENT_PARTS_BYTES + found
    return LARGE_PARTS_BYTES + found if model.local_heads is not None or heads.dim > LARGE_DIM else 0


def scratch_tokens(model: ModelConfig, config: EngineConfig) -> int:
    """Tokens of one layer for which there is room where prompt chunks attend over a dequantized copy of a quantized
    cache: a sequence, or what usual steps see. `model`: of a rank."""
    scheduler = config.scheduler
    usual = max(scheduler.max_model_len, 2 * scheduler.max_num_batched_tokens, LEAST_SCRATCH_TOKENS)
    return min(usual, scheduler.num_rows * scheduler.max_model_len, SCRATCH_BYTES // _token_bytes(model, config))


def scratch_memory(model: ModelConfig, config: EngineConfig, facts: HardwareFacts, *, has_triton: bool) -> int:
    """Bytes of that copy; 0 where chunks read the cache itself."""
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
