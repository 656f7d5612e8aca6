"""Turns the body of a request into engine requests and response options. Runs in a text thread and never waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from quire.serving.dispatch.mailbox import Failure
from quire.serving.http.fields import Field, check_body
from quire.serving.http.generation.admission_checks import check_logprobs
from quire.serving.http.generation.conversation import render_prompt, unread_values
from quire.serving.http.generation.sampling_fields import drop_beam_fields, read_beam, read_sampling, take_structure
from quire.serving.http.generation.settings import GenerationSettings, Origin, Parameters, ResponseOptions
from quire.serving.http.generation.submits import Work, make_submits
from quire.serving.http.generation.tool_use import (
    ToolUse,
    answer_plan,
    keep_special_tokens,
    message_reading,
    read_tool_use,
)
from quire.serving.http.json_body import decode_json
from quire.serving.http.request_head import RequestHead
from quire.serving.http.service import Service
from quire.serving.http.validators.values import UnsupportedParameter
from quire.serving.requests import Prompt
from quire.serving.text.answer_grammar import AnswerPlan
from quire.serving.text.chat_messages import message_text
from quire.types.errors import InvalidRequest
from quire.types.grammar import CheckedGrammar
from quire.types.request import Submit

_OF_PROMPTS = ("messages", "taken_images")  # may be large, and are not read after the prompts are made


@dataclass(frozen=True, slots=True)
class Job:
    """One request to generate: an engine request per prompt, and the options of its response."""

    request_id: str  # the id that the client knows
    options: ResponseOptions
    submits: tuple[Submit, ...]
    interval: int  # tokens per event of a stream
    plan: AnswerPlan | None = None  # for the grammar of the answers, which is built later: see `with_grammar`
    structure_field: str = "structured_outputs"  # the field that the grammar comes from

    @property
    def num_pixel_bytes(self) -> int:
        """Bytes of pixels of the images in its prompts."""
        return sum(len(image.pixels) for submit in self.submits for image in submit.images)

    def with_grammar(self, grammar: CheckedGrammar) -> Job:
        """Return the job with the grammar that was built and validated from its plan."""
        rules = replace(self.submits[0].rules, grammar=grammar.text, grammar_digest=grammar.digest)
        submits = [
            replace(one, sampling=replace(one.sampling, structured_outputs=None), rules=rules) for one in self.submits
        ]
        return replace(self, submits=tuple(submits))

    def named(self, failure: Failure) -> Failure:
        """Return the failure with field names as the client sent them."""
        return failure if failure.error is None else replace(failure, error=self.refusal(failure.error))

    def refusal(self, error: InvalidRequest) -> InvalidRequest:
        """Return an error about structured outputs under the name of the field that the client used; other errors
        unchanged."""
        is_own = self.structure_field == "structured_outputs" or not error.field.startswith("structured_outputs")
        return error if is_own else InvalidRequest(self.structure_field, error.reason, error.fix)


def prepare_job(
    service: Service, settings: GenerationSettings, fields: Mapping[str, Field], body: bytes, head: RequestHead
) -> Job:
    """Validate the body, render the prompt and tokenize it. Raises InvalidRequest or ApiError. Changes no shared
    state."""
    limits, created = service.limits, int(datetime.now(UTC).timestamp())
    given, warnings = check_body(fields, decode_json(body, limits["nesting"]), limits, strict=head.strict)
    given = settings.translate(service, given, head)
    model = service.served_name(given.get("model"))
    warnings = [*head.warnings, *warnings, *_drop_useless(service, settings, given, strict=head.strict)]
    _check_together(settings, given)
    check_logprobs(service, given)
    structure_field = take_structure(given)
    sampling, drops_answer = read_sampling(settings, given, service.texts.sampling_defaults)
    use = read_tool_use(service, given)
    origin = None if settings.find_origin is None else settings.find_origin(service, given, head)
    prompts, prefaces = _prompts(service, given, use, origin)
    reading = message_reading(service, given, use, prompts[0].text or "") if "messages" in given else None
    sampling = keep_special_tokens(service, sampling, reading)
    plan = answer_plan(service, sampling.structure, use, reading, given.get("thinking_token_budget"))
    adapter = service.adapter_of(model)
    if origin is not None:  # a fork keeps the adapter of the forked request
        adapter, model = origin.adapter, origin.adapter or model
    can_cut = "truncate_prompt_tokens" in {*fields, *settings.own_names}
    work = Work(settings, given, sampling, read_beam(given), origin, adapter, can_cut)
    submits, cuts = make_submits(service, work, prompts, head)
    warnings += cuts
    echoes_prompt = settings.echoes_prompt and given.get("echo", False)
    if echoes_prompt:
        is_cut = "truncate_prompt_tokens" in given
        prefaces = [_text_of(service, *pair, is_cut=is_cut) for pair in zip(prompts, submits, strict=True)]
    stream_options = given.get("stream_options", {})
    include_usage = stream_options.get("include_usage", False) or service.config.force_include_usage
    request_id = given.get("request_id", head.request_id)
    options = ResponseOptions(
        response_id=given.get("response_id", f"{settings.id_prefix}-{request_id}"),
        model=model,
        created=created,
        fingerprint=service.fingerprint,
        stream=given.get("stream", False),
        include_usage=include_usage,
        continuous_usage=include_usage and stream_options.get("continuous_usage_stats", False),
        wants_logprobs=sampling.logprobs is not None,
        prompt_logprobs=given.get("prompt_logprobs"),
        tokens_as_ids=given.get("return_tokens_as_token_ids", False),
        return_token_ids=given.get("return_token_ids", False),
        explain=head.explain,
        warnings=tuple(warnings),
        prompt_text=prompts[0].text if given.get("return_prompt_text") else None,
        prefaces=tuple(prefaces),
        echoes_prompt=echoes_prompt,
        drops_answer=drops_answer,
        parameters={name: value for name, value in given.items() if name not in _OF_PROMPTS},
        reading=reading,
    )
    interval = given.get("stream_interval", 1)
    return Job(request_id, options, tuple(submits), interval, plan, structure_field or "tools")


def _drop_useless(service: Service, settings: GenerationSettings, given: Parameters, *, strict: bool) -> list[str]:
    """Remove parameters that have no effect with this request, model or server. Returns warnings about them; if
    `strict`, raises the first one as an error."""
    useless: list[InvalidRequest] = []
    engine = service.engine()
    if given.get("priority") and engine.policy != "priority":
        reason = f"has no effect with the {engine.policy!r} policy of this server"
        useless.append(UnsupportedParameter("priority", reason, "leave it out"))
        del given["priority"]
    useless += drop_beam_fields(given) if not given.get("use_beam_search") else []
    useless += unread_values(service, given)
    if useless and strict:
        raise useless[0]
    return [str(settings.in_own_names(error)) for error in useless]


def _check_together(settings: GenerationSettings, given: Parameters) -> None:
    """Raise InvalidRequest for combinations of parameters that are not allowed."""
    streams = given.get("stream", False)
    if "prompt_logprobs" in given and streams:
        raise InvalidRequest("prompt_logprobs", "cannot be streamed", "set stream=false")
    wants_logprobs = "logprobs" in given or given.get("logprob_token_ids")
    if settings.echoes_prompt and given.get("echo") and streams and wants_logprobs:
        raise InvalidRequest("echo", "with logprobs cannot be streamed", "set stream=false")
    if given.get("max_tokens") == 0 and "max_completion_tokens" not in given and not given.get("echo"):
        raise InvalidRequest("max_tokens", "is 0, so there is no answer", "set echo=true or raise it")
    if "stream_options" in given and not streams:
        raise InvalidRequest("stream_options", "needs stream=true", "set stream or leave it out")
    if given.get("stream_best") and not streams:
        raise InvalidRequest("stream_best", "needs stream=true", "set stream or leave it out")


def _prompts(
    service: Service, given: Parameters, use: ToolUse, origin: Origin | None
) -> tuple[list[Prompt], list[str]]:
    """Return the prompts, and the text to write before the answers to each (see `echo`)."""
    if origin is not None:
        kept = origin.token_ids[len(origin.token_ids) - origin.num_kept :] if given.get("echo") else ()
        return [Prompt(token_ids=origin.token_ids, images=origin.images)], [service.texts.tokenizer.decode(kept)]
    if "prompt" in given:
        prompts: list[Prompt] = given["prompt"]
        return prompts, [""] * len(prompts)
    prompt = render_prompt(service, given, use.tools)
    last = given["messages"][-1]
    is_echoed = given.get("echo") and last["role"] == "assistant"
    return [prompt], [message_text(last) if is_echoed else ""]


def _text_of(service: Service, prompt: Prompt, submit: Submit, *, is_cut: bool) -> str:
    """Return the echoed text of a prompt: as it was sent, or decoded from the token ids that were sent or were left by
    truncation. Special tokens that the client sent are included; a BOS token that the tokenizer added is not."""
    tokenizer, token_ids = service.texts.tokenizer, submit.prompt_token_ids
    if prompt.text is None:
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    if not is_cut:
        return prompt.text
    is_added = len(token_ids) > 0 and token_ids[0] == tokenizer.bos_id
    return tokenizer.decode(token_ids[1:] if is_added else token_ids, skip_special_tokens=False)
