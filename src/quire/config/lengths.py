"""The longest sequence of a model, and the one that the engine is asked for."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import gcd

from quire.config.arguments import DEFAULT_BLOCK_SIZE, EngineArguments
from quire.config.model import ModelConfig
from quire.types.errors import ConfigError

logger = logging.getLogger("quire")


def model_length(model: ModelConfig) -> int:
    """Return the length of the longest sequence that Quire runs exactly as the model does, including its RoPE
    scaling."""
    trained = _trained_length(model)
    return trained if model.context_limit is None else min(trained, model.context_limit[1])


def wanted_length(args: EngineArguments, model: ModelConfig) -> int:
    """Return `max_model_len`, by default the longest possible length. Raises ConfigError if it is too long."""
    longest, trained = model_length(model), _trained_length(model)
    if args.max_model_len is None:
        if longest < trained:
            logger.warning("max_model_len is %d: %s", longest, _why_limited(model))
        return longest
    if args.max_model_len > longest:
        known = f"the model knows {longest} positions" if longest == trained else _why_limited(model)
        reason = f"is {args.max_model_len}, but {known}"
        raise ConfigError("max_model_len", reason, f"set it to {longest} or less")
    return args.max_model_len


def with_usable_indexer(model: ModelConfig, args: EngineArguments, device: str) -> ModelConfig:
    """Return the model without its indexer where that cannot run, as the Triton kernels have none, or is not needed, as
    it chooses all tokens of a short sequence. `device`: the one that "auto" names."""
    own, device = model.indexer, device if args.device == "auto" else args.device
    if own is None:
        return model
    runs = device == "cpu" or args.attention_backend in ("gather", "reference")
    if runs and (args.max_model_len is None or args.max_model_len > own.num_chosen):
        return model
    return replace(model, indexer=None, context_limit=("index_topk", own.num_chosen))


def check_chunks(model: ModelConfig, block_size: int) -> None:
    """Raise ConfigError if a chunk that the model's layers attend within is not a whole number of blocks."""
    sizes = {size for size in model.windows if size is not None} if model.has_chunks else set()
    for size in sizes:
        if size % block_size:
            reason = (
                f"is {block_size}, but this model attends within chunks of {size} tokens, which must be whole blocks"
            )
            raise ConfigError("block_size", reason, f"set it to {gcd(size, DEFAULT_BLOCK_SIZE)}")


def _trained_length(model: ModelConfig) -> int:
    rope, scaling = model.rope, dict(model.rope.scaling)
    if rope.kind in ("linear", "dynamic"):
        return int(rope.max_position * scaling.get("factor", 1.0))
    if rope.kind == "yarn":
        trained = scaling.get("original_max_position_embeddings", float(rope.max_position))
        return max(rope.max_position, int(trained * scaling.get("factor", 1.0)))
    return rope.max_position


def _why_limited(model: ModelConfig) -> str:
    assert model.context_limit is not None
    key, length = model.context_limit
    return f"beyond {length} tokens ({key} of config.json) this model attends in a way that Quire does not support"
