"""What moves between the cache's tiers: orders go down with a plan, and a report comes up when they are over.

A slot is a block's place in host memory; a file holds one slot's bytes. The engine numbers slots and names files; the
runtime owns the bytes. Orders that touch one slot or one file are carried out in the order they were given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class SlotMove(NamedTuple):
    """A device block and a host slot, one of which is copied to the other."""

    block: int
    slot: int


class FileMove(NamedTuple):
    """A file, by its content's key, and a host slot, one of which is copied to the other."""

    key: bytes
    slot: int


@dataclass(frozen=True, slots=True)
class Transfers:
    """The orders of one plan. Saves read what earlier plans computed, before this one overwrites it. Loads are in
    place for the next plan, not for this one: the device computes meanwhile, and nothing in this plan reads or writes
    what is loaded. A slot that is saved to and loaded from in one plan is saved to first."""

    saves: tuple[SlotMove, ...] = ()
    loads: tuple[SlotMove, ...] = ()
    stores: tuple[FileMove, ...] = ()  # slot to file
    fetches: tuple[FileMove, ...] = ()  # file to slot
    drops: tuple[bytes, ...] = ()  # files to delete
    drops_found: bool = False  # and, before anything is stored, all that earlier processes left and no report has named


class FoundFile(NamedTuple):
    """A file that an earlier process left, perhaps with another model."""

    key: bytes
    used_at: float  # seconds since the epoch
    num_blocks: int = 1  # whose room it takes, rounded up: another model's blocks may be larger


class FailedFile(NamedTuple):
    """A file that was not written or cannot be read; it is gone, and so is what it held."""

    key: bytes
    reason: str  # "full", "io", "missing", "corrupt"


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What has become of orders since the last report, and how long the link took for what it carried."""

    stored: tuple[bytes, ...] = ()
    fetched: tuple[bytes, ...] = ()
    failed: tuple[FailedFile, ...] = ()
    found: tuple[FoundFile, ...] = ()  # those of one report are no newer than those of the report before
    num_saved: int = 0
    num_loaded: int = 0
    save_seconds: float = 0.0
    load_seconds: float = 0.0


NO_TRANSFERS = Transfers()
NOTHING_MOVED = TransferReport()
