"""How an engine process tells its end."""

from __future__ import annotations

import socket
from typing import NoReturn, cast

from quire.engine.process import EngineLoop
from quire.serving.process.child import EXIT_ENGINE_DEAD
from quire.serving.process.control import ControlChannel, Fatal
from quire.serving.process.engine_process import _serve
from quire.types.errors import EngineDead


class FailedLoop:
    """A loop whose executor is dead, and whose device fails once more when it is closed."""

    def run(self) -> NoReturn:
        raise EngineDead("the engine stopped: rank 1 is gone")

    def close(self) -> NoReturn:
        raise RuntimeError("an illegal memory access was encountered")


def test_the_cause_of_an_engines_death_is_told_though_closing_it_fails() -> None:
    ours, theirs = socket.socketpair()
    channel, supervisor = ControlChannel(ours), ControlChannel(theirs)
    assert _serve(cast("EngineLoop", FailedLoop()), channel) == EXIT_ENGINE_DEAD
    channel.close()
    assert supervisor.receive() == Fatal("the engine stopped: rank 1 is gone", retry=True)
    assert supervisor.receive() is None
    supervisor.close()
