"""Sockets and certificates of the server, before and after it runs."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest

from quire.config.arguments import EngineArguments
from quire.config.server import ListenConfig, ModelSource, ServerConfig
from quire.serving.process.listeners import bound_connections, open_listeners, raise_limit_of_open_files
from quire.serving.process.tls import make_context, reload_context
from quire.types.errors import ConfigError

PAIRS = Path(__file__).parents[3] / "support/tls"


def config(**listen: object) -> ServerConfig:
    where = ListenConfig(**listen)  # type: ignore[arg-type]
    return ServerConfig(source=ModelSource(model="m"), engine=EngineArguments(), port=0, listen=where, api_workers=2)


def pair(cert: str, key: str | None = None) -> ListenConfig:
    return ListenConfig(tls_cert=str(PAIRS / cert), tls_key=None if key is None else str(PAIRS / key))


def test_a_socket_that_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with open_listeners(config(uds=str(path))) as listeners, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        assert listeners.api[0] is listeners.api[1]
    assert not path.exists()


def test_a_socket_of_a_running_server_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with open_listeners(config(uds=str(path))):
        with pytest.raises(ConfigError, match="uds: .* is in use"), open_listeners(config(uds=str(path))):
            pass
        assert path.exists()


def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="uds: .* exists and is not a socket"), open_listeners(config(uds=str(path))):
        pass
    assert path.read_text() == "data"


def test_a_socket_in_no_folder_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing" / "api.sock")
    with pytest.raises(ConfigError, match="uds: .* cannot be used"), open_listeners(config(uds=missing)):
        pass


def test_an_admin_port_that_is_taken_is_named_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        cause = f"admin_port: {port} is taken .* with --admin-port"
        with pytest.raises(ConfigError, match=cause), open_listeners(config(admin_port=port)):
            pass


def test_addresses_name_the_scheme_and_the_root_path() -> None:
    with open_listeners(config(tls_cert="unread.pem", root_path="/llm", admin_port=0)) as listeners:
        assert listeners.url == f"https://127.0.0.1:{listeners.port}/llm"
        assert listeners.admin_url != listeners.url


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        (pair("first-cert.pem", "second-key.pem"), "ssl_certfile: .* cannot be used"),
        (pair("first-cert.pem"), "ssl_certfile: .* cannot be used"),
        (pair("first-cert.pem", "locked-key.pem"), "ssl_keyfile: the key in .* is protected by a password"),
        (pair("first-cert.pem", "missing.pem"), "ssl_certfile: .* cannot be read"),
    ],
)
def test_files_that_make_no_pair_are_refused(files: ListenConfig, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        make_context(files)


def test_a_bad_pair_does_not_replace_the_one_in_use() -> None:
    context = make_context(pair("first-cert.pem", "first-key.pem"))
    assert context is not None
    with pytest.raises(ConfigError):
        reload_context(context, pair("second-cert.pem", "first-key.pem"))
    reload_context(context, pair("second-cert.pem", "second-key.pem"))


def test_a_server_may_open_as_many_files_as_its_hard_limit_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        raise_limit_of_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
        raise_limit_of_open_files()  # it is never lowered
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_more_connections_are_accepted_than_files_may_be_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4_096, 4_096))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("the limit cannot be raised"))
    assert bound_connections({"n": 3}) == {"n": 3, "connections": 3_840}
    assert bound_connections({}, files_each=2) == {"connections": 1_920}
    assert "16384 connections need 33024 open files, and the system allows 4096" in caplog.text
    assert "LimitNOFILE= of systemd, --ulimit nofile= of Docker) or --limit connections=1920" in caplog.text
    assert bound_connections({"connections": 3_840}) == {"connections": 3_840}
    with pytest.raises(ConfigError, match="limit connections: 3841 connections need 4097 open files"):
        bound_connections({"connections": 3_841})


def test_the_default_number_of_connections_fits_into_what_a_service_may_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65_536, 65_536))
    assert bound_connections({}, files_each=2) == {}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("there is no limit"))
    assert bound_connections({"connections": 2**31 - 1}) == {"connections": 2**31 - 1}
    assert not caplog.records
