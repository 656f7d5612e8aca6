"""The playground's files, served from memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from quire.serving.http.errors import Headers
from quire.serving.http.exchange import Exchange

_POLICY: Headers = (
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class StaticFile:
    """One file. Replies with 304 if the client has the current version."""

    def __init__(self, content: bytes, content_type: str) -> None:
        self._content = content
        self._etag = b'"' + hashlib.sha256(content).hexdigest()[:32].encode() + b'"'
        self._headers = (*_POLICY, (b"etag", self._etag), (b"content-type", content_type.encode()))

    async def __call__(self, exchange: Exchange) -> None:
        if exchange.headers.get(b"if-none-match") == self._etag:
            await exchange.reply(304, b"", self._headers)
        else:
            await exchange.reply(200, self._content, self._headers)


def playground_routes(files: Mapping[str, tuple[bytes, str]]) -> dict[str, StaticFile]:
    """Return the files by URL path: each under /playground/, and the page itself also at /."""
    routes = {f"/playground/{name}": StaticFile(*file) for name, file in files.items()}
    if "index.html" in files:
        routes["/"] = routes["/playground/"] = routes["/playground/index.html"]
    return routes
