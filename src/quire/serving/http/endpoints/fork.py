"""Forks: generate a new answer from the middle of an earlier one."""

from __future__ import annotations

from quire.serving.http.endpoints.completions import DEFAULT_MAX_TOKENS, TEXT_FIELDS, CompletionFormat
from quire.serving.http.errors import ApiError
from quire.serving.http.fields import GENERATION, MODEL, Field
from quire.serving.http.generation.handler import GenerationEndpoint
from quire.serving.http.generation.settings import GenerationSettings, Origin, Parameters
from quire.serving.http.request_head import RequestHead
from quire.serving.http.service import Service
from quire.serving.http.validators.values import Flag, Text, Whole
from quire.types.errors import InvalidRequest
from quire.types.request import Branch

_FIELDS = (
    MODEL,
    Field("request_id", Text("label", 1),
          "The request to fork: the `id` of its answer, or its X-Request-Id.", is_required=True),
    Field("index", Whole(0, "choices"), "The index of the choice to fork.", 0),
    Field("at_token", Whole(0, "max_tokens"),
          "Keep this many tokens of its answer; default: all that are known."),
    *TEXT_FIELDS,
    Field("echo", Flag(), "Put the kept part of the forked answer before the new one.", False),
    *GENERATION,
)  # fmt: skip
_DESCRIPTION = """\
Continues an answer from any of its tokens, with other parameters: another temperature, more samples, a beam search.
Tokens whose KV blocks the engine still has are not computed again. The response looks like that of `/v1/completions`
and holds what follows the fork; with `echo`, also the kept part of the forked answer. A request can be forked with the
API key that sent it, while it is streamed and after its end, within the limits `fork_seconds`, `fork_requests` and
`fork_tokens`. Only the HTTP process that handled a request knows it: with `--api-workers` above 1, a fork that reaches
another process is answered with 404. Parameters that are left out have their defaults, not the values of the forked
request. The LoRA adapter is that of the forked request; if its name refers to other content by now, the fork is
answered with 409. A fork ends early when its client disconnects."""


def find_origin(service: Service, given: Parameters, head: RequestHead) -> Origin:
    """Return the point at which the request wants to fork an answer, and remove `request_id` from `given`. Raises
    ApiError (404) if the forked request is unknown or was sent with another API key."""
    found = service.recent_requests.find(head.principal, given.pop("request_id"))
    if found is None:
        message = (
            "request_id: no request of yours has this id, or it is forgotten; finished requests are kept for "
            f"{service.limits['fork_seconds']} s"
        )
        raise ApiError(404, message, code="request_not_found", param="request_id")
    choice = found.choice(given.get("index", 0))
    if choice is None:
        raise InvalidRequest(
            "index", "is not one of the request's choices", f"choose one in [0, {found.num_choices - 1}]"
        )
    answer = choice.token_ids
    if answer is None:
        reason = "its tokens are not known before its end"
        raise InvalidRequest("request_id", reason, "wait for its end, or stream it")
    spoken = answer[:-1] if answer and answer[-1] in choice.submit.rules.end_ids else answer
    at_token = given.get("at_token", len(spoken))
    if at_token > len(answer):
        reason = f"is {at_token}, but {len(answer)} tokens are generated"
        raise InvalidRequest("at_token", reason, f"choose a value in [0, {len(answer)}]")
    tokens = (*choice.submit.prompt_token_ids, *answer[:at_token])
    branch = Branch(choice.submit.request_id, choice.index, len(tokens))
    submit = choice.submit
    return Origin(tokens, at_token, branch, submit.cache_salt, submit.images, submit.adapter)


FORK = GenerationEndpoint(
    name="fork",
    paths=("/v1/fork",),
    summary="Continue an answer from any of its tokens",
    fields=_FIELDS,
    response="CompletionAnswer",
    event="CompletionChunk",
    description=_DESCRIPTION,
    generation=GenerationSettings(
        id_prefix="fork",
        prompt_field="request_id",
        make_format=CompletionFormat,
        find_origin=find_origin,
        default_max_tokens=DEFAULT_MAX_TOKENS,
    ),
)
