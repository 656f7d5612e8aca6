"""Routing facts derived from the method, path and headers of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from quire.serving.http.guard import is_for_admins
from quire.serving.http.key_ring import raw_key

_STORED = re.compile(r"/(?:responses|files|batches)/([^/?]+)")
_TENANT_PATH = re.compile(r"/(?:files|batches)(?:/|$)")  # lists and uploads: all those of one tenant go to one replica
_JSON = (b"application/json", b"text/json", b"")
_MAX_CACHED_PATH = 200  # longest path, in characters, whose facts are cached


class PathFacts(NamedTuple):
    """Routing facts of a method and a path."""

    may_repeat: bool  # the request may be sent again even if a replica has received it
    stored: str  # name of the stored response, file or batch in the path; "": none
    is_of_tenant: bool  # about files or batches: lists and uploads of a tenant go to one replica
    is_admin: bool
    changes_replica: bool  # changes one replica, which the client must name
    is_fork: bool


def read_path(method: str, path: str) -> PathFacts:
    """Return the facts of a method and a path. Generating text changes no state, so such a request may be repeated."""
    return _read_path(method, path) if len(path) <= _MAX_CACHED_PATH else _read_path.__wrapped__(method, path)


@lru_cache(maxsize=256)
def _read_path(method: str, path: str) -> PathFacts:
    stored, is_of_tenant = _STORED.search(path), _TENANT_PATH.search(path) is not None
    is_read_only = method in ("GET", "HEAD", "OPTIONS")
    return PathFacts(
        may_repeat=is_read_only or (method == "POST" and not is_of_tenant and not is_for_admins(path)),
        stored=stored[1] if stored else "",
        is_of_tenant=is_of_tenant,
        is_admin=path.startswith("/admin"),
        changes_replica=path.startswith("/admin") and not is_read_only,
        is_fork=path.rstrip("/").endswith("/fork"),
    )


class HeadFacts(NamedTuple):
    """Routing facts of a request's head."""

    path: PathFacts
    may_be_json: bool  # by the content type, the body may be JSON
    tenant: bytes  # the API key; clients with different keys share no cache
    asked: str | None  # the replica that the client names in X-Replica


def read_head(method: str, path: str, headers: Mapping[bytes, bytes]) -> HeadFacts:
    kind = headers.get(b"content-type", b"")
    asked = headers.get(b"x-replica")
    return HeadFacts(
        read_path(method, path),
        kind in _JSON or kind.partition(b";")[0].strip().lower() in _JSON,
        raw_key(headers),
        None if asked is None else asked.decode("latin-1"),
    )
