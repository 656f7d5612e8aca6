"""The process of one replica: `quire serve --replicas N` runs `python -m quire.serving.router.replica_main FD` for
each."""

from __future__ import annotations

import sys

from quire.serving.process.announcing import Announcer
from quire.serving.process.child import EXIT_FAILED, EXIT_ORPHANED, enter_child
from quire.serving.process.control import ControlChannel, Fatal, LoadProgress, ReplicaReady, ReplicaStart
from quire.serving.process.supervisor import Supervisor
from quire.types.errors import QuireError


class ChannelAnnouncer(Announcer):
    """Sends loading progress and readiness to the parent process instead of printing them on the terminal."""

    def __init__(self, channel: ControlChannel) -> None:
        super().__init__()
        self._channel = channel

    def progress(self, what: str, done: int, total: int) -> None:
        if what != self._phase or done >= total:
            self._channel.send(LoadProgress(what, min(1.0, done / total) if total else 1.0))
        self._phase = what

    def end_progress(self) -> None:
        self._phase = ""

    def ready(self, name: str, url: str, seconds: float, playground: str | None, key_file: str | None = None) -> None:  # noqa: ARG002 - an announcer's signature
        self._channel.send(ReplicaReady())


def main(arguments: list[str]) -> int:
    channel = enter_child(arguments)
    start = channel.receive()
    if not isinstance(start, ReplicaStart):
        return EXIT_ORPHANED
    try:
        return Supervisor(start.config, keys=start.keys, announcer=ChannelAnnouncer(channel)).run()
    except QuireError as error:
        channel.send(Fatal(str(error), retry=False))
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
