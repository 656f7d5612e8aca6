"""The remote tier: KV blocks that a KV transport puts to and gets from other engines, under the same keys as files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.config.transport import TransportConfig
from quire.engine.kvcache.prefix_tree import Node
from quire.engine.kvcache.tiers.disk import DiskTier
from quire.engine.kvcache.tiers.host import HostTier, Slot
from quire.types.transfer import FileMove, Lookup, TransferReport

MAX_KNOWN = 1 << 16  # remembered keys that the transport has; it may have evicted some of them since
_MAX_LOOKUPS = 256  # lookups at a time; further groups compute what is missing


class RemoteTransfers(NamedTuple):
    """The fields of `Transfers` that concern a KV transport."""

    puts: tuple[FileMove, ...]
    gets: tuple[FileMove, ...]
    lookups: tuple[Lookup, ...]


class RemoteTier(DiskTier):
    """Collects the transfers that put blocks to other engines, get blocks from them and look up which they have, and
    applies the reports about them. A DiskTier with the transport in place of files.

    Unlike the disk tier, it learns from lookups which blocks exist, and deletes none. `index` holds the keys that it
    knows. A block that turns out to be gone, damaged or late is forgotten, and its tokens are computed instead.
    """

    name, queue_full = "remote", "transport_queue"

    def __init__(self, host: HostTier, config: TransportConfig) -> None:
        super().__init__(host, MAX_KNOWN)
        self._config = config
        # Half of the slots, so that all blocks of a prompt may be pending.
        self.max_pending = max(host.num_slots // 2, 1)
        self._lookups: list[Lookup] = []
        self._asked: dict[int, tuple[bytes, ...]] = {}  # the keys of lookups that no report has answered
        self._next_number = self._num_submitted = 0

    def store(self, key: bytes, slot: Slot) -> None:
        if self._config.puts:
            before = len(self._storing)
            super().store(key, slot)
            self._num_submitted += len(self._storing) - before

    @property
    def put_counts(self) -> tuple[int, int]:
        """Return how many blocks were to be put so far, and how many of them were put or given up."""
        return self._num_submitted, self._num_submitted - len(self._storing)

    def ask(self, awaited: Sequence[bytes], others: Sequence[bytes], seconds: float) -> int | None:
        """Look up which of these blocks the transport has. The lookup waits up to `seconds` for the `awaited` ones.
        Returns the number of the lookup; None: too many lookups are pending."""
        if len(self._asked) >= _MAX_LOOKUPS:
            self.failures[self.queue_full] += 1
            return None
        number, self._next_number = self._next_number, self._next_number + 1
        lookup = Lookup(number, (*awaited, *others), len(awaited), seconds)
        self._asked[number] = lookup.keys
        self._lookups.append(lookup)
        return number

    def is_asking(self, number: int) -> bool:
        """Whether a lookup has not been answered."""
        return number in self._asked

    @property
    def gets(self) -> bool:
        return self._config.gets

    @property
    def puts(self) -> bool:
        return self._config.puts

    def has_all(self, keys: Sequence[bytes]) -> bool:
        """Whether the transport is known to have all of these blocks."""
        return all(map(self.index.__contains__, keys))

    @property
    def has_transfers(self) -> bool:
        return bool(self._stores or self._fetches or self._lookups)

    def take_remote(self) -> RemoteTransfers:
        transfers = RemoteTransfers(tuple(self._stores), tuple(self._fetches), tuple(self._lookups))
        self._lookups.clear()
        super().take_transfers()  # dropped keys are forgotten here, and the transport keeps the blocks
        return transfers

    def apply_report(self, report: TransferReport) -> None:
        for number, found, failure in report.looked_up:
            present = set(found)
            if failure:
                self.failures[f"transport_{failure}"] += 1
            for key in self._asked.pop(number, ()):
                if key not in present:
                    self._forget_absent(key)
                elif key not in self.index:
                    self.index.add(key)
        lost = tuple(failed._replace(reason=f"transport_{failed.reason}") for failed in report.lost)
        super().apply_report(TransferReport(stored=report.put, fetched=report.got, failed=lost))

    def _forget_absent(self, key: bytes) -> None:
        """Forget a block that the transport does not have, unless it is being sent or received."""
        if key not in self._storing and key not in self._fetching:
            self.index.forget(key)

    def clear(self) -> None:
        """Forget all blocks. The transport keeps them: they belong to other engines too."""
        super().clear()
        self._drops.clear()
        self._drops_found = False

    def check(self) -> None:
        super().check()
        assert {lookup.number for lookup in self._lookups} <= self._asked.keys()


def nodes_to(node: Node | None) -> list[Node]:
    """Return the nodes of the prefix tree from below the root to `node`."""
    nodes: list[Node] = []
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]
