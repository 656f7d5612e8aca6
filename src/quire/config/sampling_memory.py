"""Memory of sampling, of grammar masks, and of the tables of rotary embeddings."""

from __future__ import annotations

from quire.config.engine import EngineConfig, SchedulerConfig
from quire.config.model import ModelConfig, QueryScaling, Rope

BYTES_PER_LOGIT = 64  # logits, a float32 copy, probabilities, their sort and its float64 sum
# With the Triton kernels, which filter and sample without sorting: 16-bit logits, and for the parts that torch does a
# float32 copy, one for logprobs, one for candidates, two masks of allowed_token_ids, and the biases added to logits.
TRITON_BYTES_PER_LOGIT = 2 + 4 + 4 + 4 + 8 + 4
# Buffers of the Triton kernels per sample: per tile of tokens the best token, the summed weight, and the tile's part of
# the list of most likely tokens; and for top_k / top_p counts, weights and candidates.
TILE_TOKENS, TILE_BYTES, LIST_BYTES = 4_096, 16, 12 + 32 * 8
FILTER_BYTES = 4 * 128 + 12 * 2_048 + 4 + 4 * 4_096
MASK_COPIES = {
    "device": 2,  # on a GPU: the mask of each row, and the masks in transfer
    "host": 3,  # masks of this step and of the last one, and a copy of those in transfer
}
MASK_PARCELS = 16  # batches of masks in pinned memory that may be in transfer to a GPU at once
PROMPT_POSITIONS = 128  # prompt logprobs are computed for this many positions at a time ...
PROMPT_BYTES_PER_LOGIT = 24  # ... with these buffers: logits in float32, log-softmax, comparison for ranks
LEAST_POSITIONS = 1_024  # fewest positions in a table of rotary embeddings


def sampling_memory(model: ModelConfig, scheduler: SchedulerConfig, attention: str) -> tuple[int, int]:
    """Return the bytes of logits and sampling buffers in a step, and the part of them that is allocated at the
    start."""
    held, each = 0, BYTES_PER_LOGIT
    if attention == "triton":
        tiles = -(-model.vocab_size // TILE_TOKENS)
        held, each = scheduler.num_samples * (tiles * (TILE_BYTES + LIST_BYTES) + FILTER_BYTES), TRITON_BYTES_PER_LOGIT
    most = max(scheduler.num_samples * each, PROMPT_POSITIONS * PROMPT_BYTES_PER_LOGIT)
    return held + model.vocab_size * most, held


def mask_memory(model: ModelConfig, config: EngineConfig, attention: str) -> tuple[int, int]:
    """Return the bytes of the grammar masks of all rows: on the device, and with a GPU also in host memory. A mask has
    one bit per token.

    With the Triton backend a GPU holds a mask per row; other backends send masks as additive logits, which count as
    sampling memory. Pinned memory is allocated in powers of two.
    """
    step = config.scheduler.num_rows * -(-model.vocab_size // 32) * 4  # the masks of all rows
    host = MASK_COPIES["host"] * step
    if config.device.device == "cpu":
        return host, 0
    if attention != "triton":
        return 0, host
    return MASK_COPIES["device"] * step, host + MASK_PARCELS * (1 << (step - 1).bit_length())


def rotary_memory(model: ModelConfig, max_model_len: int, value_bytes: int) -> int:
    """Return the bytes of the tables of rotary embeddings, one for each kind of rotary embedding in the layers, and one
    more for those that scale queries.

    A table holds cos and sin for all rotated elements of a head, and half of that again for the Triton kernels, for a
    power of two of positions.
    """
    # The last token of a sequence has a position too.
    positions = 1 << max(max_model_len, LEAST_POSITIONS - 1).bit_length()
    tables: set[tuple[Rope | QueryScaling, int, bool]] = set()
    for layer in model.layers:
        rope = model.rope_of(layer)
        if rope is None and model.query_scaling is not None:
            tables.add((model.query_scaling, model.heads_of(layer).dim, True))
        if rope is not None:
            whole = model.heads_of(layer).dim if model.latent is None else model.latent.rope_dim
            tables.add((rope, whole if rope.dim is None else rope.dim, False))
            if rope.scales_queries:
                tables.add((rope, whole if model.latent is None else model.latent.scaled_dim, True))
    return sum(positions * 3 * dim * value_bytes for _, dim, _ in tables)
