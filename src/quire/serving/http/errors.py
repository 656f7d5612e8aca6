"""Error responses in OpenAI's format. Messages to clients never contain the text of an unexpected exception, a path or
an address."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence

import msgspec

from quire.serving.dispatch.dispatcher import Draining, QueueFull
from quire.serving.dispatch.mailbox import Failure
from quire.serving.dispatch.quarantine import Quarantined
from quire.serving.process.grammar_check import ChecksBusy
from quire.types.errors import InvalidRequest, QuireError
from quire.types.standby import ENGINE_FIELD

logger = logging.getLogger("quire.edge")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    501: "server_error",
    503: "server_error",
    504: "timeout_error",
    507: "server_error",
}
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CODES = {
    "UnknownParameter": "unknown_parameter",
    "UnsupportedParameter": "unsupported_parameter",
    "PromptTooLong": "context_length_exceeded",
    "TextTooLong": "context_length_exceeded",
}
Headers = tuple[tuple[bytes, bytes], ...]


class ApiError(QuireError):
    """An error response. Its message is shown to the client."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, headers: Headers = ()
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.details()})

    def details(self) -> dict[str, object]:
        return {"message": str(self), "type": _TYPES[self.status], "param": self.param, "code": self.code}


def as_api_error(error: QuireError) -> ApiError:
    """Return the error response for an error. Only messages of ApiError and InvalidRequest are shown to the client; any
    other error is logged and becomes a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), code=_CODES.get(type(error).__name__, "invalid_value"), param=error.field)
    logger.error("answered with an internal error: %s", error)
    return internal_error()


def unexpected_error(error: Exception) -> ApiError:
    """Return the error response for an exception that no request should cause: a full disk, no file handles left, or a
    defect. The caller logs it."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _DISK_IS_FULL:
        fix = "delete files (DELETE /v1/files/ID), or ask the operator to make room"
        return ApiError(507, f"the server's disk is full; {fix}", code="disk_full")
    if number in (errno.EMFILE, errno.ENFILE):
        message = "the server has too many files and connections open; try again later"
        return ApiError(503, message, code="too_many_open_files", headers=((b"retry-after", b"5"),))
    return internal_error()


def internal_error() -> ApiError:
    return ApiError(500, "the server failed to answer; the cause is in its log", code="internal_error")


MODEL_NOT_FOUND = "model_not_found"


def model_not_found(name: str, served: Sequence[str]) -> ApiError:
    names = ", ".join(served[:8]) + (", ..." if len(served) > 8 else "")
    message = f"model: {name[:80]!a} is not served here; served: {names}; send one of them, or leave model out"
    return ApiError(404, message, code=MODEL_NOT_FOUND, param="model")


_TASKS = {
    "generate": "is served to generate text, and makes no embeddings or scores; use /v1/chat/completions or "
    "/v1/completions, or serve it with --task embed or --task score",
    "embed": "makes embeddings, and generates no text; use /v1/embeddings, /score or /rerank",
    "classify": "classifies or scores texts, and generates no text; use /classify, /score or /rerank",
}


def wrong_task(name: str, task: str) -> ApiError:
    """Return the error for a request that the model cannot serve. `task`: what the model is served for."""
    return ApiError(400, f"model: {name[:80]} {_TASKS[task]}", code="unsupported_model", param="model")


def engine_unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="engine_unavailable", headers=((b"retry-after", b"1"),))


def too_busy(message: str, retry_after: int) -> ApiError:
    headers = ((b"retry-after", str(retry_after).encode()),)
    return ApiError(429, message, code="queue_full", headers=headers)


_RETRY = ((b"retry-after", b"1"),)
_FAILURES = {
    "engine_down": (503, "the engine was restarted while it worked on this request; send it again", "engine_restarted"),
    "engine_error": (500, "the request failed inside the engine; the cause is in the server's log", "engine_error"),
    "admin": (503, "the request was ended by an administrator", "aborted"),
    "slow_reader": (503, "the stream was read too slowly", "slow_reader"),
    "cancelled": (409, "the response was cancelled", "cancelled"),
    "drain": (503, "the server shut down before the request finished", "shutting_down"),
    "timeout": (
        504,
        "the request did not finish within its time limit; ask for less, or allow more time",
        "request_timeout",
    ),
    "queue_timeout": (503, "the request waited too long for the engine; try again later", "queue_timeout"),
}
_RETRYABLE = ("engine_down", "drain", "queue_timeout")


def as_refusal(error: QuireError) -> ApiError:
    """Return the error response for a request that the dispatcher did not accept."""
    if isinstance(error, QueueFull):
        return too_busy(str(error), error.retry_after)
    if isinstance(error, ChecksBusy):
        return too_busy(str(error), 1)
    if isinstance(error, Draining):
        return ApiError(503, str(error), code="shutting_down", headers=_RETRY)
    if isinstance(error, Quarantined):
        return _quarantined(error)
    return as_api_error(error)


def _quarantined(error: Quarantined) -> ApiError:
    return ApiError(503, str(error), code="quarantined", headers=((b"retry-after", str(error.retry_after).encode()),))


def as_failure(failure: Failure) -> ApiError:
    """Return the error response for a request that was accepted and failed."""
    if failure.error is not None:
        if failure.kind == "refused" and failure.error.field == "model":  # its LoRA adapter has been unloaded
            return ApiError(404, str(failure.error), code=MODEL_NOT_FOUND, param="model")
        if failure.kind == "refused" and failure.error.field == ENGINE_FIELD:  # it sleeps, or has no weights
            return ApiError(503, str(failure.error), code="engine_asleep", headers=_RETRY)
        if failure.kind == "refused" and failure.error.field == "source.adapter":  # a fork's adapter was replaced
            message = f"request_id: {failure.error.reason}; {failure.error.fix}"
            return ApiError(409, message, code="adapter_replaced", param="request_id")
        return as_api_error(failure.error)
    if failure.retry_after is not None:
        return _quarantined(Quarantined(failure.retry_after))
    status, message, code = _FAILURES[failure.kind]
    return ApiError(status, message, code=code, headers=_RETRY if failure.kind in _RETRYABLE else ())
