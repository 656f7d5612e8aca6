"""Memory of LoRA adapters, on the device and in host memory."""

from __future__ import annotations

from quire.config.adapters import AdapterConfig
from quire.config.model import ModelConfig

# Slots pad the rank of an adapter to a multiple of RANK_STEP, in which kernels read it. The CPU's tile units (AMX) read
# ranks above TILE_RANKS in whole tiles of TILE_RANKS.
RANK_STEP, TILE_RANKS = 16, 32
OUTPUT_STEP = 16  # to a multiple of which slots pad the outputs of a layer
_SPLITS = 8  # split-K of the Triton kernels: at most this many partial sums per row
MANY_TOKENS = 512  # from this many tokens in a step, LoRA on a GPU takes large tiles, and runs after a layer's gemm
EXPERT_PLACES = 8_192  # least number of (row, expert) pairs for which the Triton kernels hold partial sums


def padded_rank(rank: int, *, tiled: bool = False) -> int:
    """Return the rank to which a slot pads an adapter. `tiled`: the CPU's tile units (AMX) multiply adapters."""
    step = TILE_RANKS if tiled and rank > TILE_RANKS else RANK_STEP
    return -(-rank // step) * step


def adapter_memory(
    model: ModelConfig, adapters: AdapterConfig | None, value_bytes: int, max_tokens: int, *, tiled: bool = False
) -> int:
    """Return the bytes of all device slots, plus the intermediate results between A and B of a step of `max_tokens`
    tokens, in the layer where these are largest."""
    if adapters is None:
        return 0
    rank, counts = padded_rank(adapters.max_rank, tiled=tiled), model.weights
    slots = adapters.slots * rank * _width(model, adapters) * value_bytes
    sums = max_tokens * rank * counts.adapter_parts * 4 * _SPLITS
    if not adapters.experts or model.experts is None or max_tokens == 0:
        return slots + sums
    pairs = max_tokens * model.experts.num_used  # gate and up outputs of each pair are kept until the activation
    of_pairs = max(pairs, EXPERT_PLACES) * rank * 2 * 4 + pairs * 2 * model.experts.size * value_bytes
    return slots + max(sums, of_pairs)


def host_adapter_memory(model: ModelConfig, adapters: AdapterConfig | None, value_bytes: int) -> int:
    """Return the bytes of the adapters in host memory, if all have the largest rank."""
    if adapters is None:
        return 0
    return adapters.host_adapters * padded_rank(adapters.max_rank) * _width(model, adapters) * value_bytes


def _width(model: ModelConfig, adapters: AdapterConfig) -> int:
    """Return the summed inputs and outputs of all matrices that a slot holds."""
    counts = model.weights
    return counts.adapter_width + (counts.adapter_expert_width if adapters.experts else 0)
