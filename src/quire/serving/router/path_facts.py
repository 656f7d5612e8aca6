"""What the method, the path and the headers of a request tell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from quire.serving.http.guard import is_for_admins
from quire.serving.http.key_ring import KEY_HEADERS

_STORED = re.compile(r"/(?:responses|files|batches)/([^/?]+)")
_OF_TENANT = re.compile(r"/(?:files|batches)(?:/|$)")  # lists and uploads: one replica for each tenant
_JSON = (b"application/json", b"text/json", b"")
_KEPT_PATH = 200  # characters of a path whose facts are kept


class PathFacts(NamedTuple):
    """What the method and the path of a request tell."""

    may_repeat: bool  # whether it can be sent again if it may have arrived
    stored: str  # the name of a stored response, file or batch
    is_of_tenant: bool  # a list or an upload: all those of a tenant go to one replica
    is_admin: bool
    changes_replica: bool  # the client must say which one
    is_fork: bool


def read_path(method: str, path: str) -> PathFacts:
    """What a path tells. Generating text changes nothing, so it can be repeated."""
    return _read_path(method, path) if len(path) <= _KEPT_PATH else _read_path.__wrapped__(method, path)


@lru_cache(maxsize=256)
def _read_path(method: str, path: str) -> PathFacts:
    stored, is_of_tenant = _STORED.search(path), _OF_TENANT.search(path) is not None
    is_look = method in ("GET", "HEAD", "OPTIONS")
    return PathFacts(
        may_repeat=is_look or (method == "POST" and not is_of_tenant and not is_for_admins(path)),
        stored=stored[1] if stored else "",
        is_of_tenant=is_of_tenant,
        is_admin=path.startswith("/admin"),
        changes_replica=path.startswith("/admin") and not is_look,
        is_fork=path.rstrip("/").endswith("/fork"),
    )


class HeadFacts(NamedTuple):
    """What the head of a request tells."""

    path: PathFacts
    may_be_json: bool  # the body
    tenant: bytes  # what separates the caches of clients: their API key
    asked: str | None  # the replica that the client names


def read_head(method: str, path: str, headers: Mapping[bytes, bytes]) -> HeadFacts:
    kind = headers.get(b"content-type", b"")
    asked = headers.get(b"x-replica")
    return HeadFacts(
        read_path(method, path),
        kind in _JSON or kind.partition(b";")[0].strip().lower() in _JSON,
        next((headers[name] for name in KEY_HEADERS if name in headers), b""),
        None if asked is None else asked.decode("latin-1"),
    )
