"""When another replica is started."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from quire.config.keys import KeySources
from quire.serving.process.backoff import Backoff
from quire.serving.router import replica_keeper
from quire.serving.router.replica_keeper import KeptReplica, ReplicaKeeper


class Child:
    """A replica that says nothing and does not end."""

    has_ended = False

    def send(self, message: object) -> None: ...

    def receive(self) -> list[object]:
        return []


def test_a_replica_for_which_there_is_no_room_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(replica_keeper, "ChildProcess", refuse)
    one = KeptReplica(cast("Any", SimpleNamespace(name="a")), cast("Any", None), {}, Backoff(1.0))
    keeper = ReplicaKeeper([one], KeySources())
    before = time.monotonic()
    asyncio.run(keeper.poll(before))
    assert one.child is None
    assert keeper.failure is None
    assert one.start_at >= before
    monkeypatch.setattr(replica_keeper, "ChildProcess", lambda *_, **__: Child())
    asyncio.run(keeper.poll(one.start_at))
    assert isinstance(one.child, Child)
