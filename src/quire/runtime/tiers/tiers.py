"""The tiers behind the device's cache (host memory, disk, other engines): submits a plan's transfers, and reports their
completion."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from quire.runtime.tiers.disk_store import NOTHING_COMPLETED, DiskReport
from quire.runtime.tiers.host_store import HostStore
from quire.runtime.tiers.link import NOTHING_COPIED, Link
from quire.runtime.tiers.remote_store import NOTHING_CARRIED, RemoteReport
from quire.types.transfer import NO_TRANSFERS, NOTHING_MOVED, Lookup, TransferReport, Transfers


class Tiers(Protocol):
    """The interface of the tiers to a worker."""

    def submit(self, transfers: Transfers) -> None:
        """Submit a plan's transfers. Must be called for every plan, after its rows are updated and before its block
        copies."""

    def report(self) -> TransferReport:
        """Return what has completed since the last report. Never waits."""

    def prepare(self) -> None:
        """Compile kernels, so that the first transfers need not wait for that."""

    def check(self) -> None: ...

    def close(self) -> None:
        """Stop the threads and free the memory, within a few seconds."""


class NoTiers:
    """Implements Tiers if no tier is configured."""

    def submit(self, transfers: Transfers) -> None:
        if transfers is not NO_TRANSFERS and transfers != NO_TRANSFERS:
            raise ValueError("a plan has transfers, and the worker has no tiers")

    def report(self) -> TransferReport:
        return NOTHING_MOVED

    def prepare(self) -> None:
        """Do nothing: there is no kernel to compile."""

    def check(self) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


NO_TIERS = NoTiers()


class Disk(Protocol):
    """The interface of the tiers to the disk store. `ready` blocks until the slot may be read or written."""

    def store(self, key: bytes, slot: int, ready: Callable[[], None]) -> None: ...

    def fetch(self, key: bytes, slot: int, ready: Callable[[], None]) -> None: ...

    def drop(self, key: bytes) -> None: ...

    def drop_found(self) -> None: ...

    def take_report(self) -> DiskReport: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class NoDisk:
    """Implements Disk if no disk tier is configured."""

    def store(self, key: bytes, slot: int, ready: Callable[[], None]) -> None:  # noqa: ARG002
        raise ValueError("a plan stores a block to a file, and the worker has no disk tier")

    def fetch(self, key: bytes, slot: int, ready: Callable[[], None]) -> None:  # noqa: ARG002
        raise ValueError("a plan fetches a block from a file, and the worker has no disk tier")

    def drop(self, key: bytes) -> None:  # noqa: ARG002
        raise ValueError("a plan deletes a file, and the worker has no disk tier")

    def drop_found(self) -> None:
        raise ValueError("a plan deletes files, and the worker has no disk tier")

    def take_report(self) -> DiskReport:
        return NOTHING_COMPLETED

    def check(self) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class Remote(Protocol):
    """The interface of the tiers to the blocks of other engines. `ready` blocks until the slot may be read or
    written."""

    def put(self, key: bytes, slot: int, ready: Callable[[], None]) -> None: ...

    def get(self, key: bytes, slot: int, ready: Callable[[], None]) -> None: ...

    def look_up(self, lookup: Lookup) -> None: ...

    def take_report(self) -> RemoteReport: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class NoRemote:
    """Implements Remote if no KV transport is configured."""

    def put(self, key: bytes, slot: int, ready: Callable[[], None]) -> None:  # noqa: ARG002
        raise ValueError("a plan puts a block, and the worker has no KV transport")

    def get(self, key: bytes, slot: int, ready: Callable[[], None]) -> None:  # noqa: ARG002
        raise ValueError("a plan gets a block, and the worker has no KV transport")

    def look_up(self, lookup: Lookup) -> None:  # noqa: ARG002
        raise ValueError("a plan looks blocks up, and the worker has no KV transport")

    def take_report(self) -> RemoteReport:
        return NOTHING_CARRIED

    def check(self) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


NO_REMOTE = NoRemote()


class CacheTiers:
    """Implements Tiers with host memory and, behind it, a disk and other engines."""

    def __init__(self, host: HostStore, link: Link, disk: Disk, remote: Remote = NO_REMOTE) -> None:
        self._host, self._link, self._disk, self._remote = host, link, disk, remote

    def submit(self, transfers: Transfers) -> None:
        link = self._link
        link.begin_plan()
        if transfers is NO_TRANSFERS:
            return
        link.save(transfers.saves)
        link.load(transfers.loads)
        if transfers.drops_found:
            self._disk.drop_found()
        for key, slot in transfers.stores:
            self._disk.store(key, slot, link.completion_of(slot))
        for key, slot in transfers.fetches:
            self._disk.fetch(key, slot, link.completion_of(slot))
        for key in transfers.drops:
            self._disk.drop(key)
        for key, slot in transfers.puts:
            self._remote.put(key, slot, link.completion_of(slot))
        for key, slot in transfers.gets:
            self._remote.get(key, slot, link.completion_of(slot))
        for lookup in transfers.lookups:
            self._remote.look_up(lookup)

    def report(self) -> TransferReport:
        copied, disk, remote = self._link.take_copied(), self._disk.take_report(), self._remote.take_report()
        if copied == NOTHING_COPIED and disk is NOTHING_COMPLETED and remote is NOTHING_CARRIED:
            return NOTHING_MOVED
        return TransferReport(*disk, *copied, *remote)

    def prepare(self) -> None:
        self._link.prepare()

    def check(self) -> None:
        self._host.check()
        self._link.check()
        self._disk.check()
        self._remote.check()

    def close(self) -> None:
        with ExitStack() as last_first:  # closes each of them, even if another raises because its device has failed
            last_first.callback(self._host.close)
            last_first.callback(self._link.close)
            last_first.callback(self._disk.close)
            last_first.callback(self._remote.close)
