"""Servers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from http_server import TestServer

Serve = Callable[..., TestServer]


def echo_script(prompt: str, index: int) -> str:
    """What the pretend model says unless a test wants otherwise."""
    return f" answer {index} to <{prompt[-24:]}>"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """serve(script, **options) -> TestServer, closed at the end of the test."""
    servers: list[TestServer] = []

    def make(script: Any = echo_script, **options: Any) -> TestServer:
        servers.append(TestServer(script, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    """One server for the tests of a module that leave it as they found it."""
    one = TestServer(echo_script)
    yield one
    one.wait(lambda: not one.call(one.dispatcher.requests))
    one.close()
