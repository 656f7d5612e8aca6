"""Which errors operators are told of, in which words."""

from __future__ import annotations

import logging

import pytest

from quire.config.server import AccessConfig
from quire.serving.http.endpoints.chat import CHAT
from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import Exchange
from quire.serving.http.key_ring import KeyRing
from quire.serving.http.request_watch import CLIENT_GONE, Answered, RequestWatch
from tests.unit.serving.cli.test_serve import digest


class Counter:
    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def http_error(self, status: int, field: str) -> None:
        self.seen.append((status, field))


async def nothing(*_: object) -> None: ...


def exchange() -> Exchange:
    scope = {"raw_path": b"/v1/\x1b", "client": ("10.0.0.9", 1), "quire.request_id": "r1", "method": "POST"}
    return Exchange(scope, nothing, nothing)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("param", "label"),
    [
        ("temperature", "temperature"),
        ("messages[3].content[0]", "messages"),
        ("stream_options.include_usage", "stream_options"),
        ("made_up_by_a_client", "other"),
        ("X-Request-Id", "X-Request-Id"),
        (None, ""),
    ],
)
def test_a_field_is_counted_by_its_top_level_name_if_it_is_known(param: str | None, label: str) -> None:
    counter = Counter()
    watch = RequestWatch(counter, frozenset(CHAT.fields_by_name), logs_all=False)
    watch.answered(exchange(), Answered(400, 0.1, 10, ApiError(400, "no", code="invalid_value", param=param)))
    assert counter.seen == [(400, label)]


def test_successes_and_lost_clients_are_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    counter = Counter()
    watch = RequestWatch(counter, logs_all=False)
    with caplog.at_level(logging.DEBUG):
        for status in (200, 304, CLIENT_GONE):
            watch.answered(exchange(), Answered(status, 0.1, 10))
    assert (counter.seen, caplog.records) == ([], [])


def test_a_connection_that_is_refused_before_its_request_is_read_counts_too() -> None:
    counter = Counter()
    RequestWatch(counter, logs_all=False).refused(431, "head_too_large")
    assert counter.seen == [(431, "")]


def test_a_log_line_names_the_field_but_never_the_message(caplog: pytest.LogCaptureFixture) -> None:
    error = ApiError(400, "stop: got 'a secret prompt'", code="invalid_value", param="stop")
    with caplog.at_level(logging.INFO, "quire.refusals"):
        RequestWatch(Counter(), frozenset({"stop"}), logs_all=False).answered(exchange(), Answered(400, 0.1, 9, error))
    (record,) = caplog.records
    assert record.getMessage() == "answered 400 invalid_value, field stop"
    assert (vars(record)["client"], vars(record)["request_id"]) == ("10.0.0.9", "r1")
    assert "secret" not in str(vars(record))


KEYS = KeyRing(AccessConfig(key_digests=(digest("sk-user"),), admin_digests=(digest("sk-admin"),)))


@pytest.mark.parametrize(
    "headers",
    [
        {b"authorization": b"Bearer sk-user"},
        {b"authorization": b"bearer  sk-user "},
        {b"x-api-key": b"sk-user"},
        {b"api-key": b"sk-user"},
    ],
)
def test_a_key_is_found_where_clients_put_it(headers: dict[bytes, bytes]) -> None:
    assert KEYS.owner(headers, is_admin=False) == digest("sk-user")
    assert KEYS.owner(headers, is_admin=True) is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"authorization": b"Basic sk-user"},
        {b"authorization": b"sk-user"},
        {b"x-api-key": b""},
        {b"authorization": b"Bearer wrong", b"x-api-key": b"sk-user"},
    ],
)
def test_anything_else_is_no_key(headers: dict[bytes, bytes]) -> None:
    assert KEYS.owner(headers, is_admin=False) is None


def test_replaced_keys_hold_at_once() -> None:
    keys = KeyRing(AccessConfig())
    assert keys.owner({}, is_admin=False) == ""
    keys.replace(AccessConfig(key_digests=(digest("later"),)))
    assert keys.owner({}, is_admin=False) is None
    assert keys.owner({b"authorization": b"Bearer later"}, is_admin=False) == digest("later")
