"""Images come from data: URLs and from one folder, and from nowhere else."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from quire.serving.vision.sources import MediaSources, read_media_folder
from quire.types.errors import ConfigError, InvalidRequest

DATA = b"\x89PNG and so on"
ENCODED = base64.b64encode(DATA).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "media"
    (inside / "deep").mkdir(parents=True)
    (inside / "one.png").write_bytes(DATA)
    (inside / "deep" / "a b.png").write_bytes(DATA)
    (inside / "large.png").write_bytes(b"0" * 101)
    (inside / "inner").symlink_to(inside / "one.png")
    (tmp_path / "secret").write_bytes(b"secret")
    (inside / "outer").symlink_to(tmp_path / "secret")
    (inside / "up").symlink_to(tmp_path)
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "one.png").write_bytes(b"another")
    os.mkfifo(inside / "pipe")
    return inside


def sources(folder: Path | None) -> MediaSources:
    return MediaSources(read_media_folder(folder), max_bytes=100)


@pytest.mark.parametrize("head", ["data:image/png;base64,", "DATA:image/JPEG;base64,", "data:image/webp;a=x;base64,"])
def test_data_urls_are_decoded(head: str) -> None:
    assert sources(None).read("url", head + ENCODED) == DATA


@pytest.mark.parametrize("name", ["one.png", "deep/a%20b.png", "inner", "deep/../one.png"])
def test_files_of_the_folder_are_read(folder: Path, name: str) -> None:
    assert sources(folder).read("url", f"file://{folder}/{name}") == DATA
    assert sources(folder).read("url", f"file://localhost{folder}/{name}") == DATA


@pytest.mark.parametrize(
    "name",
    ["../secret", "deep/../../secret", "%2e%2e/secret", "outer", "up/secret", "up/media2/one.png", "../media2/one.png"],
)
def test_nothing_outside_of_the_folder_is_read(folder: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="outside of the folder"):
        sources(folder).read("url", f"file://{folder}/{name}")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "outside of the folder"),
        ("file://{folder}/none.png", "cannot be read"),
        ("file://{folder}/pipe", "not a plain file"),
        ("file://{folder}/deep", "cannot be read|not a plain file"),
        ("file://{folder}/large.png", "more than 100 bytes"),
        ("file://host{folder}/one.png", "not the path of a local file"),
        ("file://{folder}/one.png%00", "not the path of a local file"),
        ("file:one.png", "not the path of a local file"),
        ("file://[x/a", "not the path of a local file"),
        ("file://\u2100/x", "not the path of a local file"),
        ("http://127.0.0.1/one.png", "nothing is fetched"),
        ("https://example.com/one.png", "nothing is fetched"),
        ("HTTPS://example.com/one.png", "nothing is fetched"),
        ("ftp://example.com/one.png", "nothing is fetched"),
        ("one.png", "is not taken"),
        ("", "is not taken"),
        ("javascript:alert(1)", "is not taken"),
        ("data:image/png,plain", "not a base64 data: URL"),
        ("data:image/png;base64", "not a base64 data: URL"),
        ("data:image/svg+xml;base64,AAAA", "is of type 'image/svg"),
        ("data:text/html;base64,AAAA", "is of type 'text/html'"),
        ("data:;base64,AAAA", "is of type ''"),
        ("data:image/png;base64,A", "not valid base64"),
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64," + "A" * 1_000, "more than 100 bytes"),
    ],
)
def test_other_urls_are_refused_by_name(folder: Path, url: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as error:
        sources(folder).read("messages[0]", url.replace("{folder}", str(folder)))
    assert error.value.field == "messages[0]"


def test_without_a_folder_no_file_is_read(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="allowed_local_media_path"):
        sources(None).read("url", f"file://{folder}/one.png")


def test_a_folder_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        read_media_folder(folder / "one.png")
    assert read_media_folder("") is None
