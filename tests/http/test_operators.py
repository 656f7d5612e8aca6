"""`quire serve` as an operator runs it: TLS, sockets, a port for admin, keys that change, and what the log tells."""

from __future__ import annotations

import os
import re
import shutil
import signal
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from real_server import ADMIN_KEY, RealServer
from tiny_served import FLAGS, write_tiny_model

PAIRS = Path(__file__).parents[1] / "support/tls"
SIZES = ("--max-num-seqs", "4", "--num-kv-blocks", "256", "--max-model-len", "512")
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class SecuredServer:
    """A server with TLS and keys from files, whose admin routes have a port of their own."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key, self.keys = folder / "cert.pem", folder / "key.pem", folder / "keys"
        self.use_pair("first")
        self.keys.write_text("old-key\n")
        flags = (
            *("--ssl-certfile", str(self.cert), "--ssl-keyfile", str(self.key), "--api-key-file", str(self.keys)),
            *("--admin-port", "0", "--show-admin-key", "--access-log", "--root-path", "/llm", "--api-workers", "2"),
        )
        self.server = RealServer(write_tiny_model(folder / "model"), [*FLAGS, *SIZES, *flags])
        shown = re.search(r"live block map: (https://127\.0\.0\.1:\d+/llm)/#admin=", self.server.output)
        assert shown is not None, self.server.output
        self.admin_url = shown[1]

    def use_pair(self, name: str) -> None:
        shutil.copy(PAIRS / f"{name}-cert.pem", self.cert)
        shutil.copy(PAIRS / f"{name}-key.pem", self.key)

    def status(self, key: str) -> int:
        with self.server.client(headers=bearer(key)) as client:
            return client.get("/v1/models").status_code

    def certificate(self) -> str:
        return ssl.get_server_certificate(("127.0.0.1", self.server.port))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    one = SecuredServer(tmp_path_factory.mktemp("secured"))
    try:
        yield one
    finally:
        one.server.close()


def test_tls_is_spoken_with_the_given_certificate(secured: SecuredServer) -> None:
    assert secured.server.url.startswith("https://127.0.0.1:")
    trusted = ssl.create_default_context(cafile=str(PAIRS / "first-cert.pem"))
    with httpx.Client(verify=trusted, timeout=120) as client:
        answer = client.get(f"{secured.server.url}/v1/models", headers=bearer("old-key"))
        assert answer.status_code == 200
        body = {"prompt": "x", "max_tokens": 4}
        url = f"{secured.server.url}/v1/completions"
        assert client.post(url, json=body, headers=bearer("old-key")).json()["usage"]["completion_tokens"] == 4


def test_paths_work_with_and_without_the_root_path(secured: SecuredServer) -> None:
    address = f"https://127.0.0.1:{secured.server.port}"
    with secured.server.client(address, headers=bearer("old-key")) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.get("/llm/v1/models").status_code == 200
        assert client.get("/llm/health").status_code == 200
        assert client.get("/llmx/v1/models").status_code == 404
        assert client.get("/%6clm/v1/models").status_code == 404
        assert client.get("/llm").headers["location"] == "/llm/"
        assert 'href="playground/' in client.get("/llm/").text
        assert client.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_admin_routes_are_on_their_own_port_only(secured: SecuredServer) -> None:
    assert secured.admin_url != secured.server.url
    with secured.server.client(headers=ADMIN) as client:
        assert client.get("/admin/stats").status_code == 404
    with secured.server.client(secured.admin_url, headers=ADMIN) as client:
        assert client.get("/admin/stats").status_code == 200
        assert client.get("/admin/stats", headers=bearer("old-key")).status_code == 401
        assert client.get("/ready").status_code == 200


def test_sighup_puts_new_keys_and_a_new_certificate_in_force_at_every_edge(secured: SecuredServer) -> None:
    before = secured.certificate()
    secured.keys.write_text("new-key\n")
    secured.use_pair("second")
    secured.server.signal(signal.SIGHUP)
    secured.server.wait(lambda: {secured.status("new-key") for _ in range(8)} == {200})
    secured.server.wait(lambda: secured.certificate() != before)
    assert {secured.status("old-key") for _ in range(8)} == {401}
    assert secured.certificate() == (PAIRS / "second-cert.pem").read_text()
    with secured.server.client(secured.admin_url, headers=ADMIN) as client:
        assert client.get("/admin/stats").status_code == 200

    secured.keys.write_text("\n")
    secured.server.signal(signal.SIGHUP)
    secured.server.wait(lambda: "SIGHUP: nothing was changed: api_key_file:" in secured.server.output)
    assert secured.status("new-key") == 200

    for edge in secured.server.processes("edge_main"):
        os.kill(edge, signal.SIGKILL)
    secured.server.wait(lambda: _status_or_none(secured, "new-key") == 200)
    assert {secured.status("old-key") for _ in range(4)} == {401}
    secured.keys.write_text("old-key\n")
    secured.server.signal(signal.SIGHUP)
    secured.server.wait(lambda: {secured.status("old-key") for _ in range(8)} == {200})


def _status_or_none(secured: SecuredServer, key: str) -> int | None:
    try:
        return secured.status(key)
    except httpx.HTTPError:
        return None


def test_every_request_has_a_line_in_the_access_log_and_no_key_is_in_it(secured: SecuredServer) -> None:
    headers = {**bearer("old-key"), "X-Request-Id": "seen-by-the-operator"}
    with secured.server.client(headers=headers) as client:
        client.get("/v1/models?secret=1")
    lines = secured.server.lines
    secured.server.wait(lambda: any("request_id=seen-by-the-operator" in line for line in lines))
    (line,) = [line for line in lines if "request_id=seen-by-the-operator" in line]
    assert re.search(
        r"GET status=200 seconds=[\d.]+ bytes=\d+ key=[0-9a-f]{8} path=/v1/models client=127\.0\.0\.1", line
    )
    assert "secret" not in line
    assert "old-key" not in secured.server.output
    assert secured.server.output.count(ADMIN_KEY) == 1  # in the line that --show-admin-key asked for


def test_errors_are_counted_at_all_edges_and_logged_with_their_field(secured: SecuredServer) -> None:
    with secured.server.client(headers=bearer("old-key")) as client:
        body = {"prompt": "x", "temperature": "hot"}
        assert client.post("/v1/completions", json=body).status_code == 400
        assert client.get("/v1/models", headers=bearer("wrong")).status_code == 401
        secured.server.wait(lambda: _counts(client, 'field="temperature",model_name="model",status="400"') == 1)
        assert _counts(client, 'field="",model_name="model",status="401"') >= 1
    text = secured.server.output
    assert (
        "answered 400 invalid_value, field temperature field=temperature path=/v1/completions client=127.0.0.1" in text
    )
    assert "answered 401 invalid_api_key path=/v1/models" in text


def _counts(client: httpx.Client, labels: str) -> float:
    found = re.search(rf"quire:http_errors_total\{{{re.escape(labels)}\}} ([\d.]+)", client.get("/metrics").text)
    return 0.0 if found is None else float(found[1])


def test_unix_sockets_serve_the_api_and_admin_and_are_gone_afterwards(tmp_path: Path) -> None:
    api, admin = tmp_path / "api.sock", tmp_path / "admin.sock"
    model = write_tiny_model(tmp_path / "model")
    flags = ("--uds", str(api), "--admin-uds", str(admin))
    server = RealServer(model, [*FLAGS, *SIZES, *flags])
    try:
        assert server.url == f"unix:{api}"
        assert [stat.S_IMODE(path.stat().st_mode) for path in (api, admin)] == [0o660, 0o600]
        with server.client() as client:
            answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})
            assert answer.json()["usage"]["completion_tokens"] == 4
            assert client.get("/admin/stats", headers=ADMIN).status_code == 404
        with server.client(f"unix:{admin}") as client:
            assert client.get("/admin/stats", headers=ADMIN).status_code == 200
            assert client.get("/admin/stats").status_code == 401
        assert ADMIN_KEY not in server.output
    finally:
        server.close()
    assert not api.exists()
    assert not admin.exists()
