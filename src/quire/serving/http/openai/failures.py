"""Why a request that was let in has no answer, or no more of it, as its client is told: whole or in a stream alike."""

from __future__ import annotations

from quire.serving.desk.desk import Draining, QueueFull
from quire.serving.desk.mailbox import Failure
from quire.serving.http.errors import ApiError, as_api_error, too_busy
from quire.serving.process.grammar_check import ChecksBusy
from quire.types.errors import QuireError

_RETRY = ((b"retry-after", b"1"),)
_FAILURES = {
    "engine_down": (503, "the engine was restarted while it worked on this request; send it again", "engine_restarted"),
    "engine_error": (500, "the request failed inside the engine; the cause is in the server's log", "engine_error"),
    "admin": (503, "the request was ended by an administrator", "aborted"),
    "slow_reader": (503, "the stream was read too slowly", "slow_reader"),
    "drain": (503, "the server shut down before the request was done", "shutting_down"),
}
_WORTH_A_RETRY = ("engine_down", "drain")


def as_refusal(error: QuireError) -> ApiError:
    """A request that the desk did not take in."""
    if isinstance(error, QueueFull):
        return too_busy(str(error), error.retry_after)
    if isinstance(error, ChecksBusy):
        return too_busy(str(error), 1)
    if isinstance(error, Draining):
        return ApiError(503, str(error), code="shutting_down", headers=_RETRY)
    return as_api_error(error)


def as_failure(failure: Failure) -> ApiError:
    """A request that was taken in and came to nothing."""
    if failure.error is not None:
        return as_api_error(failure.error)
    status, message, code = _FAILURES[failure.kind]
    return ApiError(status, message, code=code, headers=_RETRY if failure.kind in _WORTH_A_RETRY else ())
