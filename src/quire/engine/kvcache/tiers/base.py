"""The interface between the scheduler and the host, disk and remote tiers, and its implementation for an engine without
tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from quire.engine.kvcache.prefix_tree import Match, Node
from quire.engine.kvcache.tiers.host import Slot
from quire.types.stats import NO_TIERS, TierStats
from quire.types.transfer import NO_TRANSFERS, SlotMove, TransferReport, Transfers


class SideSlot(NamedTuple):
    """A host slot that holds a side block: the one named `name` of a sequence's block number `place`."""

    place: int
    name: bytes
    slot: Slot


class TierHit(NamedTuple):
    """The cached prefix of a sequence, in tokens: whole blocks on the device, then host slots. Only the last slot may
    hold a partial block.

    `sides` are the side blocks that a sequence needs to continue there. If all layers have a window, blocks have no
    other memory, and `slots` is empty.
    """

    num_tokens: int
    slots: tuple[Slot, ...] = ()
    sides: tuple[SideSlot, ...] = ()

    @property
    def has_loads(self) -> bool:
        return bool(self.slots or self.sides)


class SwapBlocks(NamedTuple):
    """The blocks of a preempted sequence that can be swapped to host memory. They contain its first `num_tokens`
    tokens."""

    num_tokens: int
    blocks: dict[bytes, int]  # by key (content hash)


class TierQuery(NamedTuple):
    """The prefix to look up in the tiers: the first `limit` of `tokens`. `swapped`: how many tokens of the sequence
    were swapped out (0: none). The last block that was swapped out may be partial, so a hit may end there, within a
    block."""

    salt: str
    tokens: bytes  # int32
    limit: int
    swapped: int = 0


class RemoteLookup(NamedTuple):
    """A lookup of the blocks that other engines have."""

    number: int
    num_blocks: int  # blocks of the prefix, without side blocks


class Tiers(Protocol):
    """Decides which KV blocks are kept in host memory, on disk and at other engines, and collects the transfers that
    copy them there.

    A key is the content hash of a block. An owner is the sequence whose blocks are swapped out: they are not evicted
    from host memory until `release_swapped(owner)`. No method copies bytes, waits or fails.
    """

    def find(self, match: Match, query: TierQuery) -> TierHit:
        """Find the host slots that continue the device's match. Marks them as used and changes nothing else."""

    def find_files(self, match: Match, query: TierQuery) -> list[bytes]:
        """Return the keys of the files that continue the result of `find`, at most as many as host memory can hold at
        once. Marks the host slots among them as used and changes nothing else."""

    def ask(self, match: Match, query: TierQuery, *, awaits: bool) -> RemoteLookup | None:
        """Ask other engines for the blocks that continue the device's match; None: nothing is asked. With `awaits`, the
        lookup waits for a limited time for blocks that are still being sent. When it is answered, `find_files` finds
        the blocks.

        An engine that only sends blocks asks whether the transport still has those of the match; `on_hit` sends the
        missing ones again.
        """

    def is_asking(self, lookup: RemoteLookup) -> bool:
        """Whether a lookup has not been answered."""

    def put_counts(self) -> tuple[int, int]:
        """Return how many blocks were to be sent to other engines so far, and how many of them were sent or given
        up."""

    def keys(self, salt: str, tokens: bytes, num_tokens: int) -> list[bytes]:
        """Return the keys of the blocks of a sequence's first `num_tokens` tokens, including a partial last block."""

    def on_evict(self, node: Node, index: int) -> None:
        """Save block `index` of a prefix tree node, which the device is about to evict."""

    def on_publish(self, node: Node, first: int) -> None:
        """Save the blocks of a prefix tree node from index `first` on, which the device has just cached, if the tiers
        are written through."""

    def on_hit(self, match: Match) -> None:
        """Send those blocks of the device's match again that other engines should have but no longer have."""

    def to_save(self, blocks: Mapping[bytes, int]) -> dict[bytes, int]:
        """Return the blocks of memory, by key, that a sequence needs to continue after its first blocks `blocks`: these
        blocks and some of their side blocks."""

    def num_to_save(self, blocks: Mapping[bytes, int]) -> int | None:
        """Return how many of these blocks `swap_out` would have to save. None: host memory has no room for them."""

    def swap_out(self, owner: object, blocks: Mapping[bytes, int]) -> None:
        """Save these blocks, by key, and hold their slots until `release_swapped`. Host memory must have room."""

    def release_swapped(self, owner: object) -> None:
        """Release the slots that hold an owner's swapped blocks. Idempotent."""

    def keep_for_plan(self, slot: Slot) -> None:
        """Keep a slot until the plan under construction, which may load it, is complete."""

    def fetch(self, keys: Sequence[bytes]) -> list[bytes]:
        """Start to read files into host slots, and hold these until `release_fetched`. Returns the keys for which no
        slot is available now."""

    def release_fetched(self, keys: Sequence[bytes]) -> None:
        """Release the slots that hold these fetched files, because their requester was admitted or has finished."""

    def is_fetching(self, key: bytes) -> bool:
        """Whether a file is being read into a host slot."""

    def count_late(self, num_files: int) -> None:
        """Count files that were not read in time, so that their tokens are computed instead."""

    @property
    def has_transfers(self) -> bool:
        """Whether the next plan must carry transfers."""

    def take_transfers(self, loads: tuple[SlotMove, ...]) -> Transfers:
        """Return all transfers of the plan under construction and complete it. Later transfers go into the next."""

    @property
    def expects_report(self) -> bool:
        """Whether the executor may have completed transfers that no report has named yet."""

    def apply_report(self, report: TransferReport) -> None:
        """Apply a report of transfers that the executor has completed or that have failed."""

    def transfer_seconds(self, num_saved: int, num_loaded: int) -> float:
        """Estimate the time to save `num_saved` blocks and to load `num_loaded`."""

    def note_recompute(self, blocks: Mapping[bytes, int]) -> None:
        """Note that these blocks were not swapped out because `transfer_seconds` was too long. Occasionally saves a few
        of them, to measure that time again."""

    def reset(self) -> None:
        """Forget all blocks and delete all files."""

    def stats(self) -> TierStats: ...

    def check(self) -> None: ...


class NoTiers:
    """Implements Tiers without any memory: a block that the device evicts is lost."""

    has_transfers = expects_report = False

    def find(self, match: Match, query: TierQuery) -> TierHit:  # noqa: ARG002 - Tiers' signature
        return TierHit(match.num_tokens)

    def find_files(self, match: Match, query: TierQuery) -> list[bytes]:  # noqa: ARG002 - Tiers' signature
        return []

    def ask(self, match: Match, query: TierQuery, *, awaits: bool) -> RemoteLookup | None: ...

    def is_asking(self, lookup: RemoteLookup) -> bool:  # noqa: ARG002 - Tiers' signature
        return False

    def put_counts(self) -> tuple[int, int]:
        return 0, 0

    def keys(self, salt: str, tokens: bytes, num_tokens: int) -> list[bytes]:  # noqa: ARG002 - Tiers' signature
        return []

    def on_evict(self, node: Node, index: int) -> None: ...

    def on_publish(self, node: Node, first: int) -> None: ...

    def on_hit(self, match: Match) -> None: ...

    def to_save(self, blocks: Mapping[bytes, int]) -> dict[bytes, int]:  # noqa: ARG002 - Tiers' signature
        return {}

    def num_to_save(self, blocks: Mapping[bytes, int]) -> int | None:  # noqa: ARG002 - Tiers' signature
        return None

    def swap_out(self, owner: object, blocks: Mapping[bytes, int]) -> None: ...

    def release_swapped(self, owner: object) -> None: ...

    def keep_for_plan(self, slot: Slot) -> None: ...

    def fetch(self, keys: Sequence[bytes]) -> list[bytes]:  # noqa: ARG002 - Tiers' signature
        return []

    def release_fetched(self, keys: Sequence[bytes]) -> None: ...

    def is_fetching(self, key: bytes) -> bool:  # noqa: ARG002 - Tiers' signature
        return False

    def count_late(self, num_files: int) -> None: ...

    def take_transfers(self, loads: tuple[SlotMove, ...]) -> Transfers:  # noqa: ARG002 - Tiers' signature
        return NO_TRANSFERS

    def apply_report(self, report: TransferReport) -> None: ...

    def transfer_seconds(self, num_saved: int, num_loaded: int) -> float:  # noqa: ARG002 - Tiers' signature
        return float("inf")

    def note_recompute(self, blocks: Mapping[bytes, int]) -> None: ...

    def reset(self) -> None: ...

    def stats(self) -> TierStats:
        return NO_TIERS

    def check(self) -> None: ...
