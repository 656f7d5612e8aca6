"""The memory of LoRA adapters, on the device and in host memory."""

from __future__ import annotations

from quire.config.adapters import AdapterConfig
from quire.config.model import ModelConfig

RANK_STEP, TILE_RANKS = 16, 32  # kernels read ranks in steps of so many: slots have room for a multiple;
# tile units read ranks above a tile's in whole tiles
OUTPUT_STEP = 16  # compiled kernels hold the outputs of a layer in panels of so many
_SPLITS = 8  # partial sums that Triton kernels may hold of each row
MANY_TOKENS = 512  # of a step, from which they multiply many rows of an adapter together
EXPERT_PLACES = 8_192  # of partial sums that they hold of pairs of a row and an expert, if there are fewer pairs


def padded_rank(rank: int, *, tiled: bool = False) -> int:
    """The rank that a slot has room for. `tiled`: the CPU's tile units (AMX) multiply adapters."""
    step = TILE_RANKS if tiled and rank > TILE_RANKS else RANK_STEP
    return -(-rank // step) * step


def adapter_memory(
    model: ModelConfig, adapters: AdapterConfig | None, value_bytes: int, max_tokens: int, *, tiled: bool = False
) -> int:
    """Bytes of all slots, and of what a step of so many tokens computes between A and B, in the widest layer."""
    if adapters is None:
        return 0
    rank, counts = padded_rank(adapters.max_rank, tiled=tiled), model.weights
    slots = adapters.slots * rank * _width(model, adapters) * value_bytes
    sums = max_tokens * rank * counts.adapter_parts * 4 * _SPLITS
    if not adapters.experts or model.experts is None or max_tokens == 0:
        return slots + sums
    pairs = max_tokens * model.experts.num_used  # their gates and ups are kept before the activation
    of_pairs = max(pairs, EXPERT_PLACES) * rank * 2 * 4 + pairs * 2 * model.experts.size * value_bytes
    return slots + max(sums, of_pairs)


def host_adapter_memory(model: ModelConfig, adapters: AdapterConfig | None, value_bytes: int) -> int:
    """Bytes of the adapters in host memory, all of them of the largest rank."""
    if adapters is None:
        return 0
    return adapters.host_adapters * padded_rank(adapters.max_rank) * _width(model, adapters) * value_bytes


def _width(model: ModelConfig, adapters: AdapterConfig) -> int:
    """Inputs and outputs of all matrices that slots have room for."""
    counts = model.weights
    return counts.adapter_width + (counts.adapter_expert_width if adapters.experts else 0)
