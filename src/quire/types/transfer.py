"""Copies of KV blocks between the cache tiers. A plan carries the copies to make; a report lists those completed.

A slot is the place of one block in host memory; a file holds the bytes of one slot. The engine numbers slots and names
files; the runtime owns the bytes. Copies that touch the same slot or file are made in the order they were given. A KV
transport carries the bytes of slots to other engines, under the same names as files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class SlotMove(NamedTuple):
    """A copy between a block on the device and a slot in host memory, in either direction."""

    block: int
    slot: int


class FileMove(NamedTuple):
    """A copy between a file, named by the key of its content, and a slot in host memory, in either direction."""

    key: bytes
    slot: int


class Lookup(NamedTuple):
    """Asks the KV transport which of these keys it has. The lookup waits for the first `num_awaited` keys for at most
    `seconds`, because another engine may still be sending them."""

    number: int
    keys: tuple[bytes, ...]
    num_awaited: int = 0
    seconds: float = 0.0


class LookupResult(NamedTuple):
    """The keys of a lookup that the KV transport has."""

    number: int
    found: tuple[bytes, ...]
    failure: str = ""  # why the lookup failed: "io", "timeout"


@dataclass(frozen=True, slots=True)
class Transfers:
    """The copies of one plan.

    Saves read what earlier plans computed, before this plan overwrites it. Loads are complete for the next plan, not
    for this one, which neither reads nor writes the loaded blocks. If one plan saves to a slot and loads from it, the
    save comes first.
    """

    saves: tuple[SlotMove, ...] = ()  # device to host
    loads: tuple[SlotMove, ...] = ()  # host to device
    stores: tuple[FileMove, ...] = ()  # host to disk
    fetches: tuple[FileMove, ...] = ()  # disk to host
    drops: tuple[bytes, ...] = ()  # files to delete
    drops_found: bool = False  # first delete all files of earlier processes that no report has named
    puts: tuple[FileMove, ...] = ()  # host to the KV transport
    gets: tuple[FileMove, ...] = ()  # KV transport to host
    lookups: tuple[Lookup, ...] = ()


class FoundFile(NamedTuple):
    """A file of an earlier process. That process may have run another model."""

    key: bytes
    used_at: float  # time of its last use, in seconds since 1970
    num_blocks: int = 1  # its size in blocks of this model, rounded up


class FailedFile(NamedTuple):
    """A file that was not written or cannot be read: it was deleted and its content is lost. Also a block that the KV
    transport failed to carry."""

    key: bytes
    reason: str  # "full", "io", "missing", "corrupt"; from a KV transport also "timeout"


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The copies that were completed or failed since the last report, and how long they took."""

    stored: tuple[bytes, ...] = ()
    fetched: tuple[bytes, ...] = ()
    failed: tuple[FailedFile, ...] = ()
    found: tuple[FoundFile, ...] = ()  # in order of use: none was used more recently than files of earlier reports
    num_saved: int = 0
    num_loaded: int = 0
    save_seconds: float = 0.0
    load_seconds: float = 0.0
    put: tuple[bytes, ...] = ()  # sent to the KV transport
    got: tuple[bytes, ...] = ()  # received from it
    lost: tuple[FailedFile, ...] = ()  # blocks that it failed to carry
    looked_up: tuple[LookupResult, ...] = ()


NO_TRANSFERS = Transfers()
NOTHING_MOVED = TransferReport()
