"""Parses the URL of a server that Quire connects to."""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PATH = re.compile(r"[!-~]*")  # the characters that the first line of a request may have


def split_server_url(text: str) -> SplitResult:
    """Split http://HOST, https://HOST:PORT or https://HOST/PATH. A host name gets its ASCII form. Raises ValueError for
    anything else, a query, a fragment or a user name too."""
    parts = urlsplit(text)
    host, port = parts.hostname or "", parts.port
    if parts.scheme not in ("http", "https") or port == 0 or not _PATH.fullmatch(parts.path):
        raise ValueError(text)
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(text)
    if ":" in host:
        ip_address(host)
        host = f"[{host}]"
    else:
        host = host.encode("idna").decode("ascii")
        if not _HOST.fullmatch(host):
            raise ValueError(text)
    return parts._replace(netloc=host if port is None else f"{host}:{port}")
