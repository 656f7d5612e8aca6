"""From the body of a request for generation to the work it means. Runs in the text threads: nothing here waits."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.serving.http.fields import check_body
from quire.serving.http.json_body import decode_json
from quire.serving.http.kinds import UnsupportedParameter
from quire.serving.http.openai.conversation import render_messages, unread_values
from quire.serving.http.openai.door import check_door
from quire.serving.http.service import Service
from quire.serving.process.link import EngineReady
from quire.serving.prompts import Prompt
from quire.serving.text.chat_messages import message_text
from quire.serving.text.stop_strings import StopStrings
from quire.types.errors import InvalidRequest
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

GenerationEndpoint = Literal["chat", "completions"]
_PREFIX = {"chat": "chatcmpl", "completions": "cmpl"}
_AS_THEY_ARE = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "ignore_eos", "min_tokens",
    "prompt_logprobs", "logprob_token_ids", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "repetition_detection",
)  # fmt: skip


class PromptTooLong(InvalidRequest):
    """It leaves no room for an answer."""


@dataclass(frozen=True, slots=True)
class Caller:
    """What the HTTP head says about a request."""

    request_id: str
    named_it: bool  # the client chose the id, so it may not be unique
    principal: str
    explain: bool
    lenient: bool
    received_at: float
    warnings: tuple[str, ...] = ()  # about the query


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How the answer is to look."""

    endpoint: GenerationEndpoint
    answer_id: str
    model: str
    created: int
    fingerprint: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    wants_logprobs: bool
    tokens_as_ids: bool
    return_token_ids: bool
    explain: bool
    warnings: tuple[str, ...]
    prompt_text: str | None  # the rendered conversation, where it is to be returned
    prefaces: tuple[str, ...]  # echoed text, one per prompt; all empty without echo
    echoes_prompt: bool
    drops_answer: bool  # max_tokens=0: only the prompt is wanted


@dataclass(frozen=True, slots=True)
class Job:
    """One request for generation: an engine request per prompt, and how to answer."""

    request_id: str  # as its client knows it
    wishes: Wishes
    submits: tuple[Submit, ...]
    interval: int  # tokens per event of a stream


def prepare_job(service: Service, endpoint: GenerationEndpoint, body: bytes, caller: Caller, created: int) -> Job:
    """Check, render and tokenize. Raises InvalidRequest or ApiError; touches nothing that is shared."""
    limits, engine = service.limits, service.engine()
    given, warnings = check_body(endpoint, decode_json(body, limits["nesting"]), limits, lenient=caller.lenient)
    model = service.served_name(given.get("model"))
    warnings = [*caller.warnings, *warnings, *_drop_useless(service, engine, given, lenient=caller.lenient)]
    _check_together(endpoint, given)
    sampling, drops_answer = _sampling(endpoint, given)
    prompts, prefaces = _prompts(service, endpoint, given)
    if sampling.n * len(prompts) > limits["choices"]:
        reason = f"is {sampling.n} for {len(prompts)} prompts, more than {limits['choices']} answers"
        raise InvalidRequest("n", reason, "send fewer prompts at once")
    submits = _submits(service, engine, given, prompts, sampling, caller)
    if given.get("echo") and endpoint == "completions":
        is_cut = "truncate_prompt_tokens" in given
        prefaces = [_text_of(service, *pair, is_cut=is_cut) for pair in zip(prompts, submits, strict=True)]
    options, request_id = given.get("stream_options", {}), given.get("request_id", caller.request_id)
    wishes = Wishes(
        endpoint=endpoint,
        answer_id=f"{_PREFIX[endpoint]}-{request_id}",
        model=model,
        created=created,
        fingerprint=service.fingerprint,
        stream=given.get("stream", False),
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage_stats", False),
        wants_logprobs=sampling.logprobs is not None,
        tokens_as_ids=given.get("return_tokens_as_token_ids", False),
        return_token_ids=given.get("return_token_ids", False),
        explain=caller.explain,
        warnings=tuple(warnings),
        prompt_text=prompts[0].text if given.get("return_prompt_text") else None,
        prefaces=tuple(prefaces),
        echoes_prompt=bool(given.get("echo")) and endpoint == "completions",
        drops_answer=drops_answer,
    )
    return Job(request_id, wishes, tuple(submits), given.get("stream_interval", 1))


def _drop_useless(service: Service, engine: EngineReady, given: dict[str, Any], *, lenient: bool) -> list[str]:
    """Take out what this request, model or server can make no use of; says what. Raises the first unless lenient."""
    useless: list[InvalidRequest] = []
    if given.get("priority") and engine.policy != "priority":
        reason = f"means nothing to the {engine.policy!r} policy of this server"
        useless.append(UnsupportedParameter("priority", reason, "leave it out"))
        del given["priority"]
    if "stream_options" in given and not given.get("stream"):
        useless.append(InvalidRequest("stream_options", "needs stream=true", "set stream or leave it out"))
        del given["stream_options"]
    useless += unread_values(service, given)
    if useless and not lenient:
        raise useless[0]
    return list(map(str, useless))


def _check_together(endpoint: GenerationEndpoint, given: dict[str, Any]) -> None:
    """Parameters that depend on others."""
    streams = given.get("stream", False)
    if "prompt_logprobs" in given and streams:
        raise InvalidRequest("prompt_logprobs", "cannot be streamed", "set stream=false")
    if given.get("top_logprobs") and not given.get("logprobs"):
        raise InvalidRequest("top_logprobs", "needs logprobs=true", "set logprobs or leave it out")
    wants_logprobs = "logprobs" in given or given.get("logprob_token_ids")
    if endpoint == "completions" and given.get("echo") and streams and wants_logprobs:
        raise InvalidRequest("echo", "with logprobs cannot be streamed", "set stream=false")
    if given.get("max_tokens") == 0 and "max_completion_tokens" not in given and not given.get("echo"):
        raise InvalidRequest("max_tokens", "is 0, which leaves nothing to answer", "set echo=true or raise it")


def _sampling(endpoint: GenerationEndpoint, given: dict[str, Any]) -> tuple[SamplingParams, bool]:
    """How to decode, and whether the answer is to be dropped."""
    chosen = {name: given[name] for name in _AS_THEY_ARE if name in given}
    wanted = given.get("max_completion_tokens", given.get("max_tokens", None if endpoint == "chat" else 16))
    if endpoint == "chat":
        chosen["logprobs"] = given.get("top_logprobs", 0) if given.get("logprobs") else None
    else:
        chosen["logprobs"] = given.get("logprobs")
    sampling = SamplingParams(**chosen, max_tokens=1 if wanted == 0 else wanted)
    if endpoint == "completions" and given.get("echo") and sampling.logprobs is not None:  # the echo has them too
        sampling = replace(sampling, prompt_logprobs=max(sampling.logprobs, sampling.prompt_logprobs or 0))
    return sampling, wanted == 0


def _prompts(service: Service, endpoint: GenerationEndpoint, given: dict[str, Any]) -> tuple[list[Prompt], list[str]]:
    """What is to be continued, and the text that goes before each answer (see `echo`)."""
    if endpoint == "completions":
        prompts: list[Prompt] = given["prompt"]
        return prompts, [""] * len(prompts)
    text = render_messages(service, given)
    last = given["messages"][-1]
    is_echoed = given.get("echo") and last["role"] == "assistant"
    return [Prompt(text=text)], [message_text(last) if is_echoed else ""]


def _submits(
    service: Service,
    engine: EngineReady,
    given: dict[str, Any],
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    caller: Caller,
) -> list[Submit]:
    maker, field = service.texts.maker(engine.eos_ids), "prompt" if "prompt" in given else "messages"
    add_special = given.get("add_special_tokens", "prompt" in given)
    if "truncate_prompt_tokens" not in given:
        _check_texts(service, field, prompts, engine.max_model_len)
    token_ids = [_cut(ids, given, sampling, engine) for ids in maker.tokenize(prompts, add_special)]
    for place, ids in enumerate(token_ids):
        _check_length(f"{field}[{place}]" if len(token_ids) > 1 else field, len(ids), engine.max_model_len)
        _check_room(given, len(ids), engine.max_model_len)
    total = sum(map(len, token_ids))
    if total > service.limits["prompt_tokens"]:
        reason = f"has {total} tokens in all, limit {service.limits['prompt_tokens']}"
        raise InvalidRequest(field, reason, "send fewer at once")
    StopStrings(sampling.stops)  # refuses here what would fail later, on the link's thread
    rules, salt = maker.rules(sampling), _salt(caller.principal, given.get("cache_salt", ""))
    prefix = _PREFIX["completions" if "prompt" in given else "chat"]
    base = f"{prefix}-{given.get('request_id', caller.request_id)}"
    if caller.named_it or "request_id" in given:
        base += f"~{secrets.token_hex(3)}"
    names = [base] if len(token_ids) == 1 else [f"{base}.{place}" for place in range(len(token_ids))]
    priority = given.get("priority", 0)
    submits = [Submit(name, ids, sampling, rules, priority, salt) for name, ids in zip(names, token_ids, strict=True)]
    check_door(engine, submits)
    return submits


def _cut(
    token_ids: tuple[int, ...], given: dict[str, Any], sampling: SamplingParams, engine: EngineReady
) -> tuple[int, ...]:
    """The prompt after `truncate_prompt_tokens`."""
    keep = given.get("truncate_prompt_tokens")
    if keep is None:
        return token_ids
    if keep == -1:
        keep = max(1, engine.max_model_len - (sampling.max_tokens or 1))
    if keep == 0:
        raise InvalidRequest("truncate_prompt_tokens", "is 0, which leaves no prompt", "keep at least 1 token")
    return token_ids[:keep] if given.get("truncation_side") == "right" else token_ids[-keep:]


def _check_texts(service: Service, field: str, prompts: Sequence[Prompt], max_model_len: int) -> None:
    """Refuse what is certainly too long before it costs the time and memory of tokenizing it."""
    for prompt in prompts:
        fewest = service.texts.tokenizer.fewest_tokens(prompt.text or "")
        if fewest >= max_model_len:
            reason = f"has at least {fewest} tokens, which leaves no room in max_model_len={max_model_len}"
            raise PromptTooLong(field, reason, "shorten it or set truncate_prompt_tokens")


def _check_length(field: str, num_tokens: int, max_model_len: int) -> None:
    if num_tokens == 0:
        raise InvalidRequest(field, "is empty: it has no tokens", "send at least one token")
    if num_tokens >= max_model_len:
        reason = f"has {num_tokens} tokens, which leaves no room in max_model_len={max_model_len}"
        raise PromptTooLong(field, reason, f"shorten it to {max_model_len - 1} tokens or set truncate_prompt_tokens")


def _check_room(given: dict[str, Any], num_tokens: int, max_model_len: int) -> None:
    """An answer of the length that was asked for must fit behind the prompt."""
    field = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    room = max_model_len - num_tokens
    if given.get(field, 0) > room:
        reason = (
            f"is {given[field]}, but after {num_tokens} prompt tokens max_model_len={max_model_len} has room for {room}"
        )
        raise PromptTooLong(field, reason, "lower it or shorten the prompt")


def _salt(principal: str, asked: str) -> str:
    """Clients with different keys never share cached prompts, whatever salt they send."""
    if not principal and not asked:
        return ""
    framed = f"{len(principal)}:{principal}{asked}"
    return hashlib.sha256(framed.encode()).hexdigest()


def _text_of(service: Service, prompt: Prompt, submit: Submit, *, is_cut: bool) -> str:
    """A prompt's text as it is echoed: as it was sent, or as the tokens read that were sent or are left."""
    if prompt.text is not None and prompt.token_ids is None and not is_cut:
        return prompt.text
    tokenizer = service.texts.tokenizer
    return tokenizer.decode(submit.prompt_token_ids, submit.sampling.skip_special_tokens)
