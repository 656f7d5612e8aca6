"""Files: forms that are read, downloads that wait for their reader, and the bounds of both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from http_server import TestServer
from quire.serving.http.batches.file_store import FileStore
from tests.http.conftest import Serve
from tests.http.test_batches import upload


def test_files_are_bounded(serve: Serve) -> None:
    server = serve(limits={"file_bytes": 100, "files": 2})
    with server.client() as client:
        form = {"data": {"purpose": "batch"}}
        large = client.post("/v1/files", files={"file": ("a", b"x" * 101)}, **form)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "file_too_large")
        for _ in range(2):
            assert client.post("/v1/files", files={"file": ("a", b"x")}, **form).status_code == 200
        third = client.post("/v1/files", files={"file": ("a", b"x")}, **form)
        assert (third.status_code, third.json()["error"]["code"]) == (400, "too_many_files")


@pytest.mark.parametrize(
    ("content_type", "body", "field"),
    [
        ("multipart/form-data", b"x", "content-type"),
        ("multipart/form-data; boundary=b", b"x", "body"),
        ("multipart/form-data; boundary=b", b"--b\r\n", "body"),
        ("multipart/form-data; boundary=b", b"--b--", "purpose"),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\n\r\n--b", "body"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--',
            "file",
        ),
    ],
)
def test_a_form_that_is_none_is_refused_by_its_part(
    server: TestServer, content_type: str, body: bytes, field: str
) -> None:
    with server.client() as client:
        answer = client.post("/v1/files", content=body, headers={"content-type": content_type})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_a_download_waits_for_its_reader(serve: Serve) -> None:
    server = serve(limits={"file_bytes": 40 << 20, "stall_seconds": 60})
    data = bytes(range(256)) * (32 << 12)
    file = upload(server, data)
    store, read = server.service.batches.files, [0]

    def counted(*args: Any) -> Iterator[bytes]:
        for piece in FileStore.pieces(store, *args):
            read[0] += len(piece)
            yield piece

    store.pieces = counted  # type: ignore[method-assign]
    with server.client() as client, client.stream("GET", f"/v1/files/{file['id']}/content") as answer:
        parts = answer.iter_raw(65_536)
        found = [next(parts)]
        time.sleep(0.3)
        assert 0 < read[0] < len(data) // 2  # the rest is still on the disk
        found += parts
    assert b"".join(found) == data
    assert answer.headers["content-length"] == str(len(data))
    assert server.get(f"/v1/files/{upload(server, b'')['id']}/content").content == b""
    with server.client() as client, client.stream("GET", f"/v1/files/{file['id']}/content") as answer:
        next(answer.iter_raw(65_536))
    assert server.get("/health").status_code == 200


def test_lists_come_in_pages(serve: Serve) -> None:
    server = serve()
    names = [upload(server, b"x")["id"] for _ in range(3)]
    first = server.get("/v1/files", params={"limit": "2"}).json()
    assert (len(first["data"]), first["has_more"]) == (2, True)
    rest = server.get("/v1/files", params={"after": first["last_id"]}).json()
    assert {row["id"] for row in (*first["data"], *rest["data"])} == set(names)
    for limit in ("none", "0", "10001", "1" + "0" * 5_000, "000000001" + "0" * 5_000):
        assert server.get("/v1/files", params={"limit": limit}).status_code == 400
        assert server.get("/v1/batches", params={"limit": limit}).status_code == 400
