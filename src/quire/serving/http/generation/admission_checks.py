"""Refuses, at the edge, requests that the engine would refuse: prompts and answers that are too long, and invalid
requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.policy import PolicyName
from quire.engine.submission import FEWER_SCORED, MAX_ANSWER, check_answer_size, check_request, prompt_logprob_bytes
from quire.serving.http.service import Service
from quire.serving.process.link import EngineReady
from quire.serving.requests import Prompt
from quire.types.errors import InvalidRequest
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

_CUT = " or set truncate_prompt_tokens"


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for the answer in max_model_len."""


def cut(
    token_ids: tuple[int, ...], given: dict[str, Any], sampling: SamplingParams, engine: EngineReady
) -> tuple[int, ...]:
    """Return the prompt after applying `truncate_prompt_tokens`."""
    keep = given.get("truncate_prompt_tokens")
    if keep is None:
        return token_ids
    if keep == -1:
        keep = max(1, engine.max_model_len - (sampling.max_tokens or 1))
    if keep == 0:
        raise InvalidRequest("truncate_prompt_tokens", "is 0, which leaves no prompt", "keep at least 1 token")
    return token_ids[:keep] if given.get("truncation_side") == "right" else token_ids[-keep:]


def check_texts(service: Service, field: str, prompts: Sequence[Prompt], max_model_len: int, *, can_cut: bool) -> None:
    """Refuse prompts that are certainly too long, by a lower bound of their tokens, before tokenizing them costs time
    and memory. `can_cut`: whether the endpoint has a field for cutting prompts."""
    for prompt in prompts:
        fewest = service.texts.tokenizer.fewest_tokens(prompt.text or "")
        if fewest >= max_model_len:
            reason = f"has at least {fewest} tokens, which leaves no room in max_model_len={max_model_len}"
            raise PromptTooLong(field, reason, f"shorten it{_CUT if can_cut else ''}")


def check_length(field: str, num_tokens: int, max_model_len: int, *, can_cut: bool) -> None:
    if num_tokens == 0:
        raise InvalidRequest(field, "is empty: it has no tokens", "send at least one token")
    if num_tokens >= max_model_len:
        reason = f"has {num_tokens} tokens, which leaves no room in max_model_len={max_model_len}"
        raise PromptTooLong(field, reason, f"shorten it to {max_model_len - 1} tokens{_CUT if can_cut else ''}")


def length_excess(given: dict[str, Any], num_tokens: int, max_model_len: int) -> PromptTooLong | None:
    """Return an error if the requested answer length does not fit after the prompt, else None."""
    field = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    room = max_model_len - num_tokens
    if given.get(field, 0) <= room:
        return None
    reason = (
        f"is {given[field]}, but after {num_tokens} prompt tokens max_model_len={max_model_len} has room for {room}"
    )
    return PromptTooLong(field, reason, "lower it or shorten the prompt")


def check_logprobs(service: Service, given: dict[str, Any]) -> None:
    """Raise InvalidRequest if a request asks for the logprobs of the whole vocabulary and that is larger than the
    limit."""
    limit, size = service.limits["logprobs"], service.engine().vocab_size
    for name in ("logprobs", "prompt_logprobs"):
        if given.get(name) == -1 and size > limit:
            field = "top_logprobs" if name == "logprobs" and "messages" in given else name
            reason = f"is -1, which asks for all {size} tokens of the vocabulary, limit {limit}"
            raise InvalidRequest(field, reason, "ask for fewer, or have the operator raise --limit logprobs")


def check_admission(engine: EngineReady, submits: Sequence[Submit], num_calls: int = 1) -> None:
    """Raise InvalidRequest for requests that the engine would refuse, so that they are not queued first. An engine that
    restarts with other sizes may decide otherwise. All prompts of a request share the limit on the size of prompt
    logprobs; if the HTTP request makes `num_calls` calls, each gets an equal part of it."""
    cache_config, scheduler = _sections(engine)
    for submit in submits:
        check_request(submit, cache_config, scheduler, engine.vocab_size, has_text=True)
        check_answer_size(submit, scheduler, engine.vocab_size)
    size = sum(prompt_logprob_bytes(submit, engine.vocab_size) for submit in submits)
    if size > MAX_ANSWER // num_calls:
        reason = f"makes logprobs of {size} bytes for {len(submits)} prompts, limit {MAX_ANSWER // num_calls}"
        reason += f" for each of {num_calls} conversations" if num_calls > 1 else ""
        raise InvalidRequest("prompt_logprobs", reason, f"lower it or n, send fewer prompts at once, {FEWER_SCORED}")


@lru_cache(maxsize=4)
def _sections(engine: EngineReady) -> tuple[CacheConfig, SchedulerConfig]:
    scheduler = SchedulerConfig(
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        policy=cast("PolicyName", engine.policy),
        images=engine.images,
    )
    return CacheConfig(engine.block_size, engine.num_blocks, groups=engine.groups), scheduler
