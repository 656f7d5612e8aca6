"""Forms are read in bounded time, and what is none is refused."""

from __future__ import annotations

import time

import pytest

from quire.serving.http.multipart import MAX_HEAD_BYTES, MAX_PARTS, read_form
from quire.types.errors import InvalidRequest

TYPE = "multipart/form-data; boundary=b"


def form(*parts: tuple[bytes, bytes]) -> bytes:
    return b"".join(b"--b\r\n" + head + b"\r\n\r\n" + data + b"\r\n" for head, data in parts) + b"--b--\r\n"


def test_parts_have_their_names_file_names_and_data() -> None:
    body = form(
        (b'Content-Disposition: form-data; name="purpose"', b"batch"),
        (b'content-disposition: form-data; name="file"; filename="a b.jsonl"\r\nContent-Type: text/plain', b"\r\n--x"),
        (b'Content-Disposition: form-data; name="empty"', b""),
    )
    assert read_form(TYPE, body) == {"purpose": ("", b"batch"), "file": ("a b.jsonl", b"\r\n--x"), "empty": ("", b"")}


@pytest.mark.parametrize(
    ("content_type", "body", "field"),
    [
        (TYPE, form((b'Content-Disposition: form-data; name="file"' + b";a" * 80_000, b"x")), "body"),
        (TYPE, form((b"X: " + b"x" * MAX_HEAD_BYTES, b"x")), "body"),
        (TYPE, form((b"Content-Disposition: form-data; name*" + b"9" * 5_000 + b"*=b", b"x")), "body"),
        (TYPE, form(*[(b"Content-Disposition: form-data; name=a", b"x")] * (MAX_PARTS + 1)), "body"),
        ("multipart/form-data" + ";a" * 30_000 + "; boundary=b", form(), "content-type"),
        ("multipart/form-data; boundary*" + "9" * 5_000 + "*=b", form(), "content-type"),
    ],
)  # fmt: skip
def test_a_hostile_head_is_refused_at_once(content_type: str, body: bytes, field: str) -> None:
    started = time.thread_time()
    with pytest.raises(InvalidRequest) as refusal:
        read_form(content_type, body)
    assert refusal.value.field == field
    assert time.thread_time() - started < 0.5
