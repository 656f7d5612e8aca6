"""The playground's static files. The page uses only the HTTP API. Files are read once and kept in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import PurePosixPath
from types import MappingProxyType

INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@cache
def files() -> Mapping[str, tuple[bytes, str]]:
    """Return every file by its name, as (content, media type). `INDEX` is served at `/`, every file under
    `/playground/`."""
    found = {}
    for entry in resources.files(__name__).joinpath("static").iterdir():
        media_type = MEDIA_TYPES.get(PurePosixPath(entry.name).suffix)
        if media_type is not None:
            found[entry.name] = (entry.read_bytes(), media_type)
    return MappingProxyType(found)


@cache
def etag(name: str) -> str:
    """Return the strong ETag of a file, a hash of its content. Raises KeyError for an unknown name."""
    content, _ = files()[name]
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'
