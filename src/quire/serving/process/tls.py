"""TLS for the server's TCP sockets, from a certificate and a key file."""

from __future__ import annotations

import ssl

from quire.config.server import ListenConfig
from quire.types.errors import ConfigError


def make_context(listen: ListenConfig) -> ssl.SSLContext | None:
    """Return a context for TLS 1.2 and later, or None without a certificate. Raises ConfigError for invalid files."""
    if listen.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, listen.tls_cert, listen.tls_key)
    return context


def reload_context(context: ssl.SSLContext, listen: ListenConfig) -> None:
    """Read the files again, for new connections. Raises ConfigError and keeps the old certificate if they are
    invalid."""
    make_context(listen)  # check first: an invalid pair must not get into the context in use
    assert listen.tls_cert is not None
    _load(context, listen.tls_cert, listen.tls_key)


def _load(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    files = cert if key is None else f"{cert} or {key}"
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except _Encrypted:
        fix = "write it without one: openssl pkey -in FILE -out NEW"
        raise ConfigError("ssl_keyfile", f"the key in {files} is protected by a password", fix) from None
    except ssl.SSLError as error:
        fix = "give a PEM certificate chain and its private key"
        raise ConfigError("ssl_certfile", f"{files} cannot be used: {error.reason or error}", fix) from None
    except OSError as error:
        fix = "give files that this user can read"
        raise ConfigError("ssl_certfile", f"{files} cannot be read: {error.strerror}", fix) from None


class _Encrypted(Exception):
    """The private key is protected by a password."""


def _no_password() -> str:
    raise _Encrypted
