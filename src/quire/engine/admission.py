"""What is refused at the door: requests that are wrong, or that could never fit."""

from __future__ import annotations

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.types.errors import InvalidRequest
from quire.types.request import Submit
from quire.types.sampling import check_vocabulary


def admit(request: Submit, cache: CacheConfig, config: SchedulerConfig, vocab_size: int) -> int:
    """How many tokens each sequence may reach, prompt included. Raises InvalidRequest naming field, limit and fix."""
    prompt, sampling = len(request.prompt_token_ids), request.sampling
    if prompt == 0:
        raise InvalidRequest("prompt", "is empty", "send at least one token")
    if prompt >= config.max_model_len:
        raise InvalidRequest(
            "prompt",
            f"has {prompt} tokens, which leaves no room in max_model_len={config.max_model_len}",
            f"shorten it to {config.max_model_len - 1} tokens or raise max_model_len",
        )
    if sampling.n > config.num_rows:
        raise InvalidRequest(
            "n", f"is {sampling.n}, above the {config.num_rows} sequences of a step", "lower it or raise max_num_seqs"
        )
    if request.priority and config.policy != "priority":
        reason = f"means nothing to the {config.policy!r} policy"
        raise InvalidRequest("priority", reason, 'leave it out or use policy="priority"')
    check_vocabulary("prompt", request.prompt_token_ids, vocab_size)
    check_vocabulary("stop_token_ids", sampling.stop_token_ids or (), vocab_size)
    check_vocabulary("bad_words", (token for word in request.rules.bad_words for token in word), vocab_size)
    check_vocabulary("allowed_token_ids", sampling.allowed_token_ids or (), vocab_size)
    check_vocabulary("logit_bias", sampling.logit_bias or (), vocab_size)
    check_vocabulary("logprob_token_ids", sampling.logprob_token_ids or (), vocab_size)
    room = config.max_model_len - prompt
    limit = prompt + (room if sampling.max_tokens is None else min(sampling.max_tokens, room))
    _check_fits(prompt, limit, sampling.n, cache)
    return limit


def blocks_at_most(prompt: int, limit: int, n: int, block_size: int) -> int:
    """Blocks a group can ever hold: full prompt blocks once, the rest once per sequence, the last token never."""
    shared = prompt // block_size
    return shared + n * (-(-(limit - 1) // block_size) - shared)


def _check_fits(prompt: int, limit: int, n: int, cache: CacheConfig) -> None:
    needed = blocks_at_most(prompt, limit, n, cache.block_size)
    if needed > cache.num_blocks:
        raise InvalidRequest(
            "max_tokens",
            f"{n} x {limit} tokens need {needed} kv blocks of {cache.block_size}, the cache has {cache.num_blocks}",
            "lower max_tokens, n or the prompt, or raise num_kv_blocks / kv_cache_memory",
        )
