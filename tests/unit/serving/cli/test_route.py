"""What the flags of `quire route` make of a router."""

from __future__ import annotations

import pytest

from quire.config.keys import digests
from quire.config.router import MAX_CACHE_TOKENS, read_replica
from quire.serving.cli import _parser
from quire.serving.cli.route import router_config
from quire.types.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_API_KEY", "QUIRE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_a_router_without_replicas_needs_a_way_to_add_them() -> None:
    with pytest.raises(ConfigError, match="replica: is not given, and without an admin key none can be added"):
        router_config(_parser().parse_args(["route"]))
    config, _ = router_config(_parser().parse_args(["route", "--admin-key", "secret"]))
    assert config.access.admin_digests == digests("admin_key", ["secret"])


def test_the_admin_key_may_come_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ADMIN_KEY", "secret")
    config, _ = router_config(_parser().parse_args(["route"]))
    assert (config.replicas, config.access.admin_digests) == ((), digests("admin_key", ["secret"]))


@pytest.mark.parametrize("tokens", [0, -1, MAX_CACHE_TOKENS + 1, 10**400])
def test_a_cache_size_that_no_replica_can_have_is_refused(tokens: int) -> None:
    flags = ["route", "--replica", "http://127.0.0.1:8001", f"--cache-tokens={tokens}"]
    with pytest.raises(ConfigError, match="cache_tokens: must be in"):
        router_config(_parser().parse_args(flags))


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8001", "ftp://a", "http://a:x", "http://user@a", "http://:pw@a", "http://[::1:8001", "http://[a]",
        "http://a:0", "http://a..b", "http://" + "a" * 64, "http://a b", "http://a/b c", "http://a/\u00e4",
        "http://a\u00b2..b", "http://a/%0d%0a b", "http://a:99999",
    ],
)  # fmt: skip
def test_a_replica_that_is_not_a_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of a server"):
        router_config(_parser().parse_args(["route", "--replica", url]))


@pytest.mark.parametrize("url", ["=http://a", "unix:/", "a/b=http://a", "-a=http://a", "a b=http://a"])
def test_a_replica_without_a_valid_name_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"replica: .* (is not a valid name|is not the address of a server)"):
        read_replica(url)


@pytest.mark.parametrize(
    ("url", "authority", "name"),
    [
        ("http://b\u00fccher.example:81", "xn--bcher-kva.example:81", "xn--bcher-kva.example-81"),
        ("http://[::1]:8001", "[::1]:8001", "1-8001"),
        ("http://[fe80::1%eth0]:8001", "[fe80::1]:8001", "fe80--1-eth0-8001"),
        ("https://A.example/llm/v1/", "a.example", "a.example-443"),
    ],
)
def test_the_host_header_of_a_replica_is_ascii_and_has_no_zone(url: str, authority: str, name: str) -> None:
    found = read_replica(url)
    assert (found.authority, found.name) == (authority, name)
