"""Where a fork begins: a place in an answer that the edge remembers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.serving.http.errors import ApiError
from quire.serving.http.request_head import RequestHead
from quire.serving.http.service import Service
from quire.types.errors import InvalidRequest
from quire.types.request import Branch


@dataclass(frozen=True, slots=True)
class Origin:
    """The tokens a fork begins with, of which the last `num_kept` are the answer's, and where they stand."""

    token_ids: tuple[int, ...]
    num_kept: int
    branch: Branch
    salt: str


def find_origin(service: Service, given: dict[str, Any], head: RequestHead) -> Origin:
    """The place that is asked for. Raises ApiError (404) for a request that is not known, or that another key sent."""
    found = service.recent_requests.find(head.principal, given["request_id"])
    if found is None:
        message = (
            "request_id: no request of yours is called so, or it is forgotten; finished ones are kept for "
            f"{service.limits['fork_seconds']} s"
        )
        raise ApiError(404, message, code="request_not_found", param="request_id")
    choice = found.choice(given.get("index", 0))
    if choice is None:
        raise InvalidRequest("index", "is none of the request's choices", f"choose one in [0, {found.num_choices - 1}]")
    answer = choice.token_ids
    if answer is None:
        reason = "its tokens are not known before it ends"
        raise InvalidRequest("request_id", reason, "wait for its end, or stream it")
    spoken = answer[:-1] if answer and answer[-1] in choice.submit.rules.end_ids else answer
    at_token = given.get("at_token", len(spoken))
    if at_token > len(answer):
        reason = f"is {at_token}, but {len(answer)} tokens are generated"
        raise InvalidRequest("at_token", reason, f"choose a value in [0, {len(answer)}]")
    tokens = (*choice.submit.prompt_token_ids, *answer[:at_token])
    branch = Branch(choice.submit.request_id, choice.index, len(tokens))
    return Origin(tokens, at_token, branch, choice.submit.cache_salt)
