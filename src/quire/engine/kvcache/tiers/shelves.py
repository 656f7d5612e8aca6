"""Host memory and disk behind the device: blocks by name, and the orders that move them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from quire.config.tiers import TierConfig
from quire.engine.kvcache.keys import TOKEN_BYTES, chain, next_key
from quire.engine.kvcache.prefix_tree import Match, Node, PrefixTree
from quire.engine.kvcache.tiers.base import TierHit, Wanted
from quire.engine.kvcache.tiers.disk import DiskShelf
from quire.engine.kvcache.tiers.files import Files
from quire.engine.kvcache.tiers.host import HostShelf, Slot
from quire.engine.kvcache.tiers.link import LinkTime
from quire.types.stats import TierStats
from quire.types.transfer import NO_TRANSFERS, SlotMove, TransferReport, Transfers

_SAMPLE = 2  # blocks that are saved to see how long it takes


class Shelves:
    """Implements Tiers. A block is named by the chain of tokens that leads to its end, so what was saved for one
    request is found by all that begin alike.

    A slot that an order of the plan in work touches is held until that plan is made: two orders of one plan never
    meet in a slot, except that what is saved may be written to a file or loaded again.
    """

    def __init__(self, config: TierConfig, tree: PrefixTree, block_size: int) -> None:
        self._tree, self._block_size, self._config = tree, block_size, config
        self._host = HostShelf(config.host_blocks)
        self._files = Files(self._host, DiskShelf(config.disk_blocks))
        self._link = LinkTime(config.block_bytes)
        self._saves: list[SlotMove] = []
        self._touched: list[Slot] = []  # held until the plan in work is made
        self._parked: dict[object, list[Slot]] = {}
        self._num_awaited = 0  # saves and loads that no report has counted
        self._counts: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------- looking
    def find(self, match: Match, wanted: Wanted) -> TierHit:
        if match.num_tokens >= wanted.limit or not self._host.num_used:
            return TierHit(match.num_tokens)
        whole, slots = match.num_blocks, list[Slot]()
        key = self._key_before(match, wanted.salt)
        for following in self._chain(key, wanted.tokens, whole, wanted.limit // self._block_size):
            if (slot := self._host.find(following)) is None:
                break
            slots.append(slot)
            key = following
        num_tokens = (whole + len(slots)) * self._block_size
        if num_tokens < wanted.swapped <= min(wanted.limit, num_tokens + self._block_size - 1):
            tail = wanted.tokens[num_tokens * TOKEN_BYTES : wanted.swapped * TOKEN_BYTES]
            if (slot := self._host.find(next_key(key, tail))) is not None:
                slots.append(slot)
                num_tokens = wanted.swapped
        if num_tokens <= match.num_tokens:
            return TierHit(match.num_tokens)
        for slot in reversed(slots):  # the head of a chain counts as used last, and is given away last
            self._host.touch(slot)
        return TierHit(num_tokens, tuple(slots))

    def find_files(self, match: Match, wanted: Wanted) -> list[bytes]:
        if match.num_tokens >= wanted.limit or not len(self._files.shelf):
            return []
        found, here = list[bytes](), list[Slot]()
        key = self._key_before(match, wanted.salt)
        for following in self._chain(key, wanted.tokens, match.num_blocks, wanted.limit // self._block_size):
            if (slot := self._host.find(following)) is not None:
                here.append(slot)
            elif self._files.has(following) and self._has_place(len(found), len(here)):
                found.append(following)
            else:
                break
        for slot in reversed(here):  # the files drive out others before these, and of these the last first
            self._host.touch(slot)
        return found

    def _has_place(self, num_files: int, num_here: int) -> bool:
        """Whether host memory has room for one more file beside so many, and beside what it has for the same
        request."""
        return num_files < self._files.most_fetched and num_files + num_here < self._host.num_slots

    def keys(self, salt: str, tokens: bytes, num_tokens: int) -> list[bytes]:
        whole = num_tokens // self._block_size
        keys = list(self._chain(self._tree.root_key(salt), tokens, 0, whole))
        if tail := tokens[whole * self._block_size * TOKEN_BYTES : num_tokens * TOKEN_BYTES]:
            keys.append(next_key(keys[-1] if keys else self._tree.root_key(salt), tail))
        return keys

    def _key_before(self, match: Match, salt: str) -> bytes:
        """The content hash of the last of a match's whole blocks, or where there is none, of the salt."""
        node, count = match.node, match.num_blocks
        if node is None or count == 0:
            return self._tree.root_key(salt)
        while node.start >= count and node.parent is not None:
            node = node.parent
        return self._tree.key_of(node, count - 1 - node.start)

    def _chain(self, key: bytes, tokens: bytes, start: int, stop: int) -> Iterator[bytes]:
        """The content hashes of full blocks `start` .. `stop`; `key` is that of the block before them."""
        width = self._block_size * TOKEN_BYTES
        return chain(key, (tokens[index * width : (index + 1) * width] for index in range(start, stop)))

    # -------------------------------------------------------------------------------------------------- saving
    def evicted(self, node: Node, index: int) -> None:
        key = self._tree.key_of(node, index)
        self._shelve(key, node.blocks[index])
        self._use(key)

    def kept(self, node: Node, first: int) -> None:
        if self._config.write == "through":
            before, keys = len(self._touched), [self._tree.key_of(node, i) for i in range(first, len(node.blocks))]
            for key, block in zip(keys, node.blocks[first:], strict=True):
                self._shelve(key, block)
            self._touched[before:] = reversed(self._touched[before:])
            for key in reversed(keys):  # the head of a chain counts as used last, and is given away last
                self._use(key)

    def _shelve(self, key: bytes, block: int) -> None:
        slot = self._host.find(key) or self._save(key, block)
        if slot is not None:
            self._files.store(key, slot)

    def _use(self, key: bytes) -> None:
        """It was used just now, wherever it is."""
        if (slot := self._host.find(key)) is not None:
            self._host.touch(slot)
        self._files.touch(key)

    def _save(self, name: bytes, block: int) -> Slot | None:
        slot = self._host.take()
        if slot is None:
            self._counts["host_full"] += 1
            return None
        self._host.name(slot, name)
        self._touched.append(slot)
        self._saves.append(SlotMove(block, slot.number))
        return slot

    def num_missing(self, names: Mapping[bytes, int]) -> int | None:
        missing = sum(name not in self._host for name in names)
        idle = sum(self._host.is_idle(name) for name in names)
        return missing if missing <= self._host.num_available - idle else None

    def park(self, owner: object, blocks: Mapping[bytes, int]) -> None:
        present = [self._host.hold(slot) for name in blocks if (slot := self._host.find(name)) is not None]
        parked = self._parked.setdefault(owner, [])
        for name, block in blocks.items():
            slot = self._host.find(name) or self._save(name, block)
            assert slot is not None
            parked.append(self._host.hold(slot))
        for slot in present:
            self._host.release(slot)
        self._link.trust()

    def unpark(self, owner: object) -> None:
        for slot in reversed(self._parked.pop(owner, ())):
            self._host.release(slot)

    # -------------------------------------------------------------------------------------- loading and fetching
    def hold(self, slot: Slot) -> None:
        self._touched.append(self._host.hold(slot))

    def fetch(self, names: Sequence[bytes]) -> list[bytes]:
        return self._files.fetch(names)

    def let_go(self, names: Sequence[bytes]) -> None:
        self._files.let_go(names)

    def is_fetching(self, name: bytes) -> bool:
        return self._files.is_fetching(name)

    def give_up(self, num_files: int) -> None:
        if num_files:
            self._files.failures["slow"] += num_files

    # ------------------------------------------------------------------------------------------------ the runtime
    @property
    def has_orders(self) -> bool:
        return bool(self._saves) or self._files.has_orders

    def take_orders(self, loads: tuple[SlotMove, ...]) -> Transfers:
        orders = NO_TRANSFERS
        if loads or self.has_orders:
            orders = Transfers(tuple(self._saves), loads, *self._files.take_orders())
            self._counts["saved"] += len(self._saves)
            self._counts["loaded"] += len(loads)
            self._num_awaited += len(self._saves) + len(loads)
            self._saves.clear()
        self._release_touched()
        return orders

    def _release_touched(self) -> None:
        for slot in self._touched:
            self._host.release(slot)
        self._touched.clear()

    @property
    def wants_report(self) -> bool:
        return self._num_awaited > 0 or bool(self._config.disk_path)

    def take_report(self, report: TransferReport) -> None:
        self._num_awaited -= report.num_saved + report.num_loaded
        self._link.note(report)
        self._files.take_report(report)

    def move_seconds(self, num_saved: int, num_loaded: int) -> float:
        return self._link.seconds(num_saved, num_loaded)

    def doubt(self, blocks: Mapping[bytes, int]) -> None:
        if self._link.doubt():
            for name, block in list(blocks.items())[:_SAMPLE]:
                if name not in self._host:
                    self._save(name, block)

    # ------------------------------------------------------------------------------------------------- condition
    def reset(self) -> None:
        self._saves.clear()
        self._host.clear()
        self._files.clear()
        self._release_touched()

    def stats(self) -> TierStats:
        host, disk, counts = self._host, self._files.shelf, self._counts
        return TierStats(
            host_blocks=host.num_slots,
            host_used=host.num_used,
            host_held=host.num_held,
            disk_blocks=disk.quota,
            disk_used=disk.num_used,
            saved=counts["saved"],
            loaded=counts["loaded"],
            stored=self._files.num_stored,
            fetched=self._files.num_fetched,
            host_evicted=host.num_evicted,
            disk_evicted=disk.num_evicted,
            failures=dict(self._files.failures) | ({"host_full": counts["host_full"]} if counts["host_full"] else {}),
            block_bytes=self._config.block_bytes,
        )

    def check(self) -> None:
        self._host.check()
        self._files.check()
        for slots in self._parked.values():
            assert all(slot.holds for slot in slots)
        held = sum(map(len, self._parked.values())) + len(self._touched) + self._files.num_held
        assert held == self._host.num_holds
