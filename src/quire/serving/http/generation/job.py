"""From the body of a request for generation to the work it means. Runs in the text threads: nothing here waits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quire.serving.dispatch.mailbox import Failure
from quire.serving.http.fields import check_body
from quire.serving.http.generation.conversation import render_messages, unread_values
from quire.serving.http.generation.fork import Origin, find_origin
from quire.serving.http.generation.sampling_fields import drop_beam_fields, read_beam, read_sampling, take_structure
from quire.serving.http.generation.submits import Order, make_submits
from quire.serving.http.generation.tool_use import Frame, ToolUse, message_reading, read_tool_use, suited_to
from quire.serving.http.json_body import decode_json
from quire.serving.http.request_head import PREFIX, GenerationEndpoint, RequestHead
from quire.serving.http.service import Service
from quire.serving.http.validators.values import UnsupportedParameter
from quire.serving.process.link import EngineReady
from quire.serving.requests import Prompt
from quire.serving.text.chat_messages import message_text
from quire.serving.text.message_reading import MessageReading
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest
from quire.types.request import Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
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
    reading: MessageReading | None = None  # how a chat answer is told apart; None: it is words

    @property
    def has_reasoning(self) -> bool:
        """Whether answers may hold reasoning that is marked."""
        return self.reading is not None and self.reading.reasoning is not None


@dataclass(frozen=True, slots=True)
class Job:
    """One request for generation: an engine request per prompt, and how to answer."""

    request_id: str  # as its client knows it
    options: ResponseOptions
    submits: tuple[Submit, ...]
    interval: int  # tokens per event of a stream
    frame: Frame | None = None  # of the grammar, where there is one
    structure_field: str = "structured_outputs"  # what asked for it

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """What the answers must match. Not in force before `with_grammar`."""
        return self.submits[0].sampling.structure

    def with_grammar(self, grammar: str) -> Job:
        """The job with its structured outputs checked and written as the engine reads them."""
        sampling = replace(self.submits[0].sampling, structured_outputs=None)
        framed = grammar if self.frame is None else self.frame.around(grammar)
        rules = replace(self.submits[0].rules, grammar=framed)
        return replace(self, submits=tuple(replace(one, sampling=sampling, rules=rules) for one in self.submits))

    def named(self, failure: Failure) -> Failure:
        """A failure in the names its client used."""
        return failure if failure.error is None else replace(failure, error=self.refusal(failure.error))

    def refusal(self, error: InvalidRequest) -> InvalidRequest:
        """What is wrong with the structured outputs, by the name its client used for them."""
        is_own = self.structure_field == "structured_outputs" or not error.field.startswith("structured_outputs")
        return error if is_own else InvalidRequest(self.structure_field, error.reason, error.fix)


def prepare_job(service: Service, endpoint: GenerationEndpoint, body: bytes, head: RequestHead, created: int) -> Job:
    """Check, render and tokenize. Raises InvalidRequest or ApiError; touches nothing that is shared."""
    limits, engine = service.limits, service.engine()
    given, warnings = check_body(endpoint, decode_json(body, limits["nesting"]), limits, lenient=head.lenient)
    model = service.served_name(given.get("model"))
    warnings = [*head.warnings, *warnings, *_drop_useless(service, engine, given, lenient=head.lenient)]
    _check_together(endpoint, given)
    structure_field = take_structure(given)
    sampling, drops_answer = read_sampling(endpoint, given, service.texts.sampling_defaults)
    use = read_tool_use(service, given)
    origin = find_origin(service, given, head) if endpoint == "fork" else None
    prompts, prefaces = _prompts(service, given, use, origin)
    reading = frame = None
    if endpoint == "chat":
        reading = message_reading(service, given, use, prompts[0].text or "")
        sampling, frame = suited_to(service, sampling, use, reading)
    order = Order(endpoint, given, sampling, read_beam(given), origin)
    submits = make_submits(service, order, prompts, head)
    if given.get("echo") and endpoint == "completions":
        is_cut = "truncate_prompt_tokens" in given
        prefaces = [_text_of(service, *pair, is_cut=is_cut) for pair in zip(prompts, submits, strict=True)]
    stream_options = given.get("stream_options", {})
    request_id = head.request_id if endpoint == "fork" else given.get("request_id", head.request_id)
    options = ResponseOptions(
        endpoint=endpoint,
        answer_id=f"{PREFIX[endpoint]}-{request_id}",
        model=model,
        created=created,
        fingerprint=service.fingerprint,
        stream=given.get("stream", False),
        include_usage=stream_options.get("include_usage", False),
        continuous_usage=stream_options.get("continuous_usage_stats", False),
        wants_logprobs=sampling.logprobs is not None,
        tokens_as_ids=given.get("return_tokens_as_token_ids", False),
        return_token_ids=given.get("return_token_ids", False),
        explain=head.explain,
        warnings=tuple(warnings),
        prompt_text=prompts[0].text if given.get("return_prompt_text") else None,
        prefaces=tuple(prefaces),
        echoes_prompt=bool(given.get("echo")) and endpoint == "completions",
        drops_answer=drops_answer,
        reading=reading,
    )
    interval = given.get("stream_interval", 1)
    return Job(request_id, options, tuple(submits), interval, frame, structure_field or "tools")


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
    useless += drop_beam_fields(given) if not given.get("use_beam_search") else []
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
    if given.get("stream_best") and not streams:
        raise InvalidRequest("stream_best", "needs stream=true", "set stream or leave it out")


def _prompts(
    service: Service, given: dict[str, Any], use: ToolUse, origin: Origin | None
) -> tuple[list[Prompt], list[str]]:
    """What is to be continued, and the text that goes before each answer (see `echo`)."""
    if origin is not None:
        kept = origin.token_ids[len(origin.token_ids) - origin.num_kept :] if given.get("echo") else ()
        return [Prompt(token_ids=origin.token_ids)], [service.texts.tokenizer.decode(kept)]
    if "prompt" in given:
        prompts: list[Prompt] = given["prompt"]
        return prompts, [""] * len(prompts)
    text = render_messages(service, given, use.tools)
    last = given["messages"][-1]
    is_echoed = given.get("echo") and last["role"] == "assistant"
    return [Prompt(text=text)], [message_text(last) if is_echoed else ""]


def _text_of(service: Service, prompt: Prompt, submit: Submit, *, is_cut: bool) -> str:
    """A prompt's text as it is echoed: as it was sent, or as the tokens read that were sent or are left."""
    if prompt.text is not None and prompt.token_ids is None and not is_cut:
        return prompt.text
    tokenizer = service.texts.tokenizer
    return tokenizer.decode(submit.prompt_token_ids, submit.sampling.skip_special_tokens)
