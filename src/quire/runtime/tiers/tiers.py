"""The tiers beyond the device: obeys a plan's transfers, and reports what has become of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from quire.runtime.tiers.disk_store import NOTHING_OVER, DiskReport
from quire.runtime.tiers.host_store import HostStore
from quire.runtime.tiers.link import NOTHING_CARRIED, Link
from quire.types.transfer import NO_TRANSFERS, NOTHING_MOVED, TransferReport, Transfers


class Tiers(Protocol):
    """What a worker asks of the tiers."""

    def obey(self, transfers: Transfers) -> None:
        """Start a plan's orders, when its rows are settled and before its copies. To be called for every plan."""

    def report(self) -> TransferReport:
        """What is over since the last report. Never waits."""

    def prepare(self) -> None:
        """Compile what the first orders would wait for."""

    def check(self) -> None: ...

    def close(self) -> None:
        """Give threads and memory back, within a few seconds."""


class NoTiers:
    """The device is all there is."""

    def obey(self, transfers: Transfers) -> None:
        if transfers is not NO_TRANSFERS and transfers != NO_TRANSFERS:
            raise ValueError("a plan has transfers, and the worker has no tiers")

    def report(self) -> TransferReport:
        return NOTHING_MOVED

    def prepare(self) -> None:
        """Nothing is compiled."""

    def check(self) -> None:
        """Nothing can be wrong."""

    def close(self) -> None:
        """Nothing is held."""


NO_TIERS = NoTiers()


class Disk(Protocol):
    """What the tiers ask of the disk. `ready` returns when the slot may be read or written."""

    def store(self, key: bytes, slot: int, ready: Callable[[], None]) -> None: ...

    def fetch(self, key: bytes, slot: int, ready: Callable[[], None]) -> None: ...

    def drop(self, key: bytes) -> None: ...

    def drop_found(self) -> None: ...

    def take(self) -> DiskReport: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class NoDisk:
    """Host memory is the last tier."""

    def store(self, key: bytes, slot: int, ready: Callable[[], None]) -> None:  # noqa: ARG002
        raise ValueError("a plan stores a block to a file, and the worker has no disk tier")

    def fetch(self, key: bytes, slot: int, ready: Callable[[], None]) -> None:  # noqa: ARG002
        raise ValueError("a plan fetches a block from a file, and the worker has no disk tier")

    def drop(self, key: bytes) -> None:  # noqa: ARG002
        raise ValueError("a plan deletes a file, and the worker has no disk tier")

    def drop_found(self) -> None:
        raise ValueError("a plan deletes files, and the worker has no disk tier")

    def take(self) -> DiskReport:
        return NOTHING_OVER

    def check(self) -> None:
        """Nothing can be wrong."""

    def close(self) -> None:
        """Nothing is open."""


class CacheTiers:
    """Host memory, and the disk behind it."""

    def __init__(self, host: HostStore, link: Link, disk: Disk) -> None:
        self._host, self._link, self._disk = host, link, disk

    def obey(self, transfers: Transfers) -> None:
        link = self._link
        link.begin_plan()
        if transfers is NO_TRANSFERS:
            return
        link.save(transfers.saves)
        link.load(transfers.loads)
        if transfers.drops_found:
            self._disk.drop_found()
        for key, slot in transfers.stores:
            self._disk.store(key, slot, link.settled(slot))
        for key, slot in transfers.fetches:
            self._disk.fetch(key, slot, link.settled(slot))
        for key in transfers.drops:
            self._disk.drop(key)

    def report(self) -> TransferReport:
        moved, disk = self._link.take(), self._disk.take()
        if moved == NOTHING_CARRIED and disk is NOTHING_OVER:
            return NOTHING_MOVED
        return TransferReport(*disk, *moved)

    def prepare(self) -> None:
        self._link.prepare()

    def check(self) -> None:
        self._host.check()
        self._link.check()
        self._disk.check()

    def close(self) -> None:
        with ExitStack() as last_first:  # each of them, even where a device has failed and another raises
            last_first.callback(self._host.close)
            last_first.callback(self._link.close)
            last_first.callback(self._disk.close)
