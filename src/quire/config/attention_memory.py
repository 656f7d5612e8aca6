"""GPU memory of attention besides the KV cache: partial results, and scratch memory for the keys and values that prompt
chunks see: a dequantized copy of a quantized cache, or those of expanded latents."""

from __future__ import annotations

from quire.config.engine import EngineConfig, SchedulerConfig
from quire.config.facts import HardwareFacts, cuda_index
from quire.config.kv_cache import SCALED_DTYPES
from quire.config.model import DTYPE_BYTES, Latent, ModelConfig
from quire.config.sizes import MIB

LATENT_PARTS_BYTES = 80 * MIB  # partial results of attention over latents, which all query heads share
# Partial results of attention with heads larger than LARGE_DIM, or with two kinds of heads.
LARGE_PARTS_BYTES, LARGE_DIM = 48 * MIB, 256
SCRATCH_BYTES = 256 * MIB  # upper bound of the dequantized or expanded keys and values that prompt chunks read
LEAST_SCRATCH_TOKENS = 16_384
HOPPER = 9  # major compute capability of GPUs whose attention kernel cannot read a quantized cache
HOPPER_DIMS = (64, 80, 96, 128, 256)  # head sizes that kernel supports
EXPANDED_DIM = 256  # largest size of a key without rotation, and of a value, that latents are expanded to
EXPANDED_PAGE = 128  # tokens of a page of scratch memory: a sequence takes whole pages
EXPANDED_PASSES = 4  # most passes of a step over expanded latents, each with a part of the heads


def attention_parts(model: ModelConfig, config: EngineConfig) -> int:
    """Return the bytes of partial attention results in float32: of rows whose keys are split, and of shared prefixes. 0
    where they are small."""
    heads = model.heads
    found = config.scheduler.num_rows * heads.num_query * heads.value_dim * DTYPE_BYTES["float32"]
    if heads.latent is not None:
        return LATENT_PARTS_BYTES + found
    return LARGE_PARTS_BYTES + found if model.local_heads is not None or heads.dim > LARGE_DIM else 0


def scratch_tokens(model: ModelConfig, config: EngineConfig) -> int:
    """Return of how many tokens of one layer scratch memory holds the keys and values of all heads. Prompt chunks
    attend over it.

    Enough for one sequence or for what a usual step reads, up to SCRATCH_BYTES. `model`: the model of one rank.
    """
    scheduler = config.scheduler
    usual = max(scheduler.max_model_len, 2 * scheduler.max_num_batched_tokens, LEAST_SCRATCH_TOKENS)
    found = min(usual, scheduler.num_rows * scheduler.max_model_len, SCRATCH_BYTES // _token_bytes(model, config))
    return found if model.latent is None else -(-found // EXPANDED_PAGE) * EXPANDED_PAGE


def scratch_memory(model: ModelConfig, config: EngineConfig, facts: HardwareFacts, *, has_triton: bool) -> int:
    """Return the bytes of scratch memory; 0 where prompt chunks read the cache itself."""
    device = config.device
    if not has_triton or device.device.partition(":")[0] != "cuda":
        return 0
    if model.latent is not None:
        return scratch_tokens(model, config) * _token_bytes(model, config) if is_expanded(model.latent) else 0
    if device.kv_dtype not in SCALED_DTYPES or model.alibi is not None:
        return 0
    is_hopper = facts.cuda[cuda_index(device.device)].capability[0] == HOPPER
    takes = model.local_heads is None and model.heads.dim in HOPPER_DIMS
    sees_all = any(spec.kind == "full" for spec in model.kv_specs)
    if not (is_hopper and takes and sees_all and device.dtype != "float32"):
        return 0
    return scratch_tokens(model, config) * _token_bytes(model, config)


def chosen_memory(model: ModelConfig, scheduler: SchedulerConfig) -> int:
    """Return the bytes that choosing tokens and attention to them take. `model`: the model of one rank."""
    if model.indexer is None:
        return 0
    sizes = (model.heads.dim, model.heads.num_query, scheduler.max_num_batched_tokens, scheduler.max_model_len)
    return model.indexer.scratch_memory(*sizes)


def is_expanded(latent: Latent) -> bool:
    """Whether the kernels support heads of these sizes in the expanded form."""
    return max(latent.nope_dim, latent.value_dim) <= EXPANDED_DIM


def _token_bytes(model: ModelConfig, config: EngineConfig) -> int:
    if (latent := model.latent) is not None:  # sizes are padded to powers of two
        nope, rope, value = (
            1 << (size - 1).bit_length() for size in (latent.nope_dim, latent.rope_dim, latent.value_dim)
        )
        every = model.heads.num_query * (nope + value) + EXPANDED_PASSES * rope
        return every * DTYPE_BYTES[config.device.dtype]
    return 2 * model.heads.kv_size * DTYPE_BYTES[config.device.dtype]
