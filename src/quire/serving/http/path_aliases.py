"""Resolves alternative spellings of paths, and writes the error for paths that do not exist."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import Receive, Scope, Send

_AZURE = re.compile(r"^/openai(/deployments/[^/]+|/v1)(?=/)")
_DOUBLED = re.compile(r"^(/v1)+/")
_KNOWN_APIS = {  # APIs that clients may expect, by the beginning of the path after /v1
    "/responses": "the responses API",
    "/messages": "Anthropic's messages API",
    "/images": "images",
    "/audio": "audio",
    "/moderations": "moderations",
    "/assistants": "assistants",
    "/threads": "assistants",
    "/conversations": "conversations (send previous_response_id to /v1/responses)",
    "/vector_stores": "vector stores",
    "/fine_tuning": "fine-tuning",
    "/realtime": "the realtime API",
    "/load_lora_adapter": "LoRA adapters (start it with --enable-lora, --lora-dir and --admin)",
    "/api/": "Ollama's API",
}


class PathAliases:
    """An ASGI middleware that rewrites a path to the spelling of a route.

    It drops a trailing slash, adds a missing `/v1`, drops repeated ones, and treats Azure's `/openai/deployments/NAME`
    as `/v1`. A path that is a route is left unchanged. Keys are checked before this middleware, so it must never turn
    another path into one below `/admin`.
    """

    def __init__(self, app: Any, paths: Iterable[str]) -> None:
        known = list(paths)
        self._app = app
        self._paths = frozenset(path for path in known if "{" not in path)
        self._prefixes = tuple(path.partition("{")[0] for path in known if "{" in path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = self.resolve(scope["path"])
            if path != scope["path"]:
                scope["path"], scope["raw_path"] = path, path.encode()
        await self._app(scope, receive, send)

    def resolve(self, path: str) -> str:
        """Return the route that `path` is a spelling of, or `path` itself if there is none."""
        bare = path.rstrip("/") or "/"
        short = _DOUBLED.sub("/v1/", bare)
        candidates = (path, bare, short, _AZURE.sub("/v1", bare), f"/v1{bare}")
        return next(filter(self._is_route, candidates), path)

    def _is_route(self, path: str) -> bool:
        return path in self._paths or any(path.startswith(prefix) and path != prefix for prefix in self._prefixes)


def path_not_found(path: str, served: Iterable[str]) -> ApiError:
    """Return the error for a path that is not a route. Its message names the API that the path belongs to, if known,
    and lists the paths of this server."""
    shown = ascii(path[:80])[1:-1]
    bare, served = path.removeprefix("/v1"), tuple(served)
    missing = {begin: name for begin, name in _KNOWN_APIS.items() if not _is_served(begin, served)}
    api = next((name for begin, name in missing.items() if bare.startswith(begin)), None)
    what = f"there is nothing at {shown}" if api is None else f"this server does not have {api} ({shown})"
    near = get_close_matches(shown.rstrip("/"), [one for one in served if "{" not in one], 1, 0.8)
    if near:
        return ApiError(404, f"{what}; did you mean {near[0]}? See /openapi.json", code="not_found")
    root = "/api/" if is_ollama(path) and _is_served("/api/", served) else "/v1/"
    has = ", ".join(sorted({one for one in served if one.startswith(root) and "{" not in one}))
    return ApiError(404, f"{what}; it has {has}; see /openapi.json", code="not_found")


def is_ollama(path: str) -> bool:
    """Whether a path belongs to Ollama's API, which has its own error format."""
    return path.startswith("/api/")


def _is_served(begin: str, served: Iterable[str]) -> bool:
    """Whether any route begins with `begin` after /v1."""
    return any(path.removeprefix("/v1").startswith(begin) for path in served)
