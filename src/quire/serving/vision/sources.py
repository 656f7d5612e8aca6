"""Reads the bytes of an image from a data: URL, or from a file below the folder that the operator allows. Nothing is
ever downloaded."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from quire.types.errors import ConfigError, InvalidRequest

MEDIA_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp")
_DATA = "send a data: URL, such as data:image/png;base64,..."
_ON_NETWORK = ("http", "https", "ftp", "s3", "gs")


@dataclass(frozen=True, slots=True)
class MediaSources:
    """Reads images by URL. `folder` is the real path of the only folder that file:// URLs may name; None: no file://
    URLs."""

    folder: str | None
    max_bytes: int

    def read(self, field: str, url: object) -> bytes:
        """Return the bytes of an image file. Raises InvalidRequest."""
        if not isinstance(url, str):
            raise InvalidRequest(field, f"must be a URL, got {type(url).__name__}", _DATA)
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "data":
            return self._read_data(field, url)
        if scheme == "file":
            return self._read_file(field, url)
        if scheme in _ON_NETWORK:
            raise InvalidRequest(field, "is an address on the network, and nothing is fetched from there", _DATA)
        raise InvalidRequest(field, f"has the scheme {scheme!r:.40}, which is not taken", _DATA)

    def _read_data(self, field: str, url: str) -> bytes:
        head, comma, body = url[5:].partition(",")
        kind, *options = head.lower().split(";")
        if not comma or "base64" not in options:
            raise InvalidRequest(field, "is not a base64 data: URL", _DATA)
        if kind not in MEDIA_TYPES:
            raise InvalidRequest(field, f"is of type {kind!r:.60}", f"send one of {', '.join(MEDIA_TYPES)}")
        return decode_base64(field, body, self.max_bytes)

    def _read_file(self, field: str, url: str) -> bytes:
        if self.folder is None:
            reason = "is a file, and no folder of media is allowed here"
            raise InvalidRequest(field, reason, "send a data: URL, or have the operator set allowed_local_media_path")
        try:
            host, path = urlsplit(url)[1:3]
        except ValueError:  # for example an unclosed bracket
            host, path = "unknown", ""
        path = unquote(path)
        if host not in ("", "localhost") or "\0" in path or not path.startswith("/"):
            raise InvalidRequest(field, "is not the path of a local file", "send file:///folder/name.png")
        real = os.path.realpath(path)
        if os.path.commonpath((self.folder, real)) != self.folder:
            reason = "is outside of the folder of media that is allowed here"
            raise InvalidRequest(field, reason, "name a file inside it")
        try:
            return self._read_regular(field, real)
        except OSError as error:
            raise InvalidRequest(field, f"cannot be read: {error.strerror}", "name a file that is there") from None

    def _read_regular(self, field: str, real: str) -> bytes:
        """Read a plain file by its real path. Refuses it if a link has replaced a folder of the path since it was
        resolved."""
        fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            link = Path(f"/proc/self/fd/{fd}")
            if not stat.S_ISREG(os.fstat(fd).st_mode) or (link.exists() and str(link.readlink()) != real):
                raise InvalidRequest(field, "is not a plain file", "name a file that is there")
            data = file.read(self.max_bytes + 1)
        if len(data) > self.max_bytes:
            raise InvalidRequest(field, f"has more than {self.max_bytes:,} bytes", "send a smaller image")
        return data


def decode_base64(field: str, text: str, max_bytes: int) -> bytes:
    """Decode base64 text. Raises InvalidRequest."""
    if len(text) // 4 * 3 > max_bytes + 3:
        raise InvalidRequest(field, f"has more than {max_bytes:,} bytes", "send a smaller image")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(field, "is not valid base64", "encode the whole file") from None


def read_media_folder(path: str | os.PathLike[str] | None) -> str | None:
    """Return the real path of the setting `allowed_local_media_path`. Raises ConfigError unless it is a folder."""
    if path is None or path == "":
        return None
    if not isinstance(path, str | os.PathLike):
        raise ConfigError("allowed_local_media_path", f"cannot be a {type(path).__name__}", "give a folder")
    if not Path(path).is_dir():
        raise ConfigError("allowed_local_media_path", f"{os.fspath(path)!r} is not a folder", "give an existing one")
    return os.path.realpath(path)
