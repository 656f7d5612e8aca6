"""The router's errors, in the error format of the API that the request's path belongs to."""

from __future__ import annotations

import msgspec

from quire.serving.http.errors import ApiError

_TGI_PATHS = ("/", "/generate_stream")
_encode = msgspec.json.encode


def error_body(path: str, error: ApiError) -> bytes:
    """Return the body of an error response in the format of the path's API: Anthropic's, Ollama's, Text Generation
    Inference's or OpenAI's."""
    if _is_anthropic(path):
        return _encode({"type": "error", "error": {"type": _anthropic_type(error), "message": str(error)}})
    if path.startswith("/api/"):
        return _encode({"error": str(error)})
    if path in _TGI_PATHS:
        kind = "overloaded" if error.status in (429, 503) else "generation" if error.status >= 500 else "validation"
        return _encode({"error": str(error), "error_type": kind})
    return error.body()


def error_event(path: str, error: ApiError, *, is_event: bool) -> bytes:
    """Return the event that reports an error at the end of a broken stream. `is_event`: the stream has server-sent
    events, else JSON lines."""
    body = error_body(path, error)
    if not is_event:
        return body + b"\n"
    if _is_anthropic(path):
        return b"event: error\ndata: " + body + b"\n\n"
    if path.rstrip("/").endswith("/responses"):
        details = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
        return b"event: error\ndata: " + _encode(details) + b"\n\n"
    return b"data: " + body + b"\n\n"


def _is_anthropic(path: str) -> bool:
    return path.rstrip("/").endswith("/messages")


def _anthropic_type(error: ApiError) -> str:
    return {429: "rate_limit_error", 503: "overloaded_error"}.get(error.status, "api_error")
