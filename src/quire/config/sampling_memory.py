"""The memory that choosing tokens takes, and that tables of rotary positions take."""

from __future__ import annotations

from quire.config.engine import EngineConfig, SchedulerConfig
from quire.config.model import ModelConfig

BYTES_PER_LOGIT = 64  # logits, a float32 copy, probabilities, their sort and its float64 sum
# By the Triton kernels, which filter and choose without sorting: logits in 16 bits, and for what torch does beside them
# a float32 copy, one for logprobs, one for candidates, bans of allowed_token_ids twice, and what is added to logits.
TRITON_BYTES_PER_LOGIT = 2 + 4 + 4 + 4 + 8 + 4
# What the Triton kernels hold of each sample: of each tile of tokens its best one, its weight, and its share of a list
# of likeliest tokens; counts, weights and candidates of rows with top_k or top_p.
TILE_TOKENS, TILE_BYTES, LIST_BYTES = 4_096, 16, 12 + 32 * 8
FILTER_BYTES = 4 * 128 + 12 * 2_048 + 4 + 4 * 4_096
MASK_COPIES = {
    "device": 2,  # masks of allowed tokens on a GPU: one per row that stays, and those that are being sent
    "host": 3,  # masks of this step and of the step before, and a copy of those that are sent
}
MASK_PARCELS = 16  # batches of masks in pinned memory that may be on their way to a GPU
PROMPT_POSITIONS = 128  # prompt logprobs are computed for so many positions at a time ...
PROMPT_BYTES_PER_LOGIT = 24  # ... with these buffers: logits in float32, log-softmax, comparison for ranks
LEAST_POSITIONS = 1_024  # of a table of rotary positions


def sampling_memory(model: ModelConfig, scheduler: SchedulerConfig, attention: str) -> tuple[int, int]:
    """Bytes of logits and of the sampler's buffers in a step, and those of them that are held from the start."""
    held, each = 0, BYTES_PER_LOGIT
    if attention == "triton":
        tiles = -(-model.vocab_size // TILE_TOKENS)
        held, each = scheduler.num_samples * (tiles * (TILE_BYTES + LIST_BYTES) + FILTER_BYTES), TRITON_BYTES_PER_LOGIT
    most = max(scheduler.num_samples * each, PROMPT_POSITIONS * PROMPT_BYTES_PER_LOGIT)
    return held + model.vocab_size * most, held


def mask_memory(model: ModelConfig, config: EngineConfig, attention: str) -> tuple[int, int]:
    """Bytes of the masks of all rows on the device, and beside a GPU in host memory. A mask has a bit for each token.

    On a GPU the Triton kernels keep a mask for each row; other backends send masks as logits, which count as sampling.
    Pinned memory is allocated in powers of two."""
    step = config.scheduler.num_rows * -(-model.vocab_size // 32) * 4  # the masks of all rows
    host = MASK_COPIES["host"] * step
    if config.device.device == "cpu":
        return host, 0
    if attention != "triton":
        return 0, host
    return MASK_COPIES["device"] * step, host + MASK_PARCELS * (1 << (step - 1).bit_length())


def rotary_memory(model: ModelConfig, max_model_len: int, value_bytes: int) -> int:
    """Bytes of the tables of rotary positions, one for each kind of positions that layers have: cos and sin of all
    numbers of a head, and for the Triton kernels those of half of them again, up to a power of two of positions."""
    positions = 1 << max(max_model_len, LEAST_POSITIONS - 1).bit_length()  # the token that ends a sequence has one too
    tables = set()
    for layer in model.layers:
        if (rope := model.rope_of(layer)) is not None:
            whole = model.heads_of(layer).dim if model.latent is None else model.latent.rope_dim
            tables.add((rope, whole if rope.dim is None else rope.dim))
    return sum(positions * 3 * dim * value_bytes for _, dim in tables)
