"""What the flags of `quire route` make of a router."""

from __future__ import annotations

import pytest

from quire.config.keys import digests
from quire.config.router import MAX_CACHE_TOKENS
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


@pytest.mark.parametrize("url", ["127.0.0.1:8001", "ftp://a", "http://a:x", "http://user@a"])
def test_a_replica_that_is_not_a_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of a server"):
        router_config(_parser().parse_args(["route", "--replica", url]))
