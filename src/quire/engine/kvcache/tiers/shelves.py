"""Host memory and disk behind the device: blocks by name, and the orders that move them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from quire.config.tiers import TierConfig
from quire.engine.kvcache.keys import chain, next_key, pack
from quire.engine.kvcache.prefixes import Match
from quire.engine.kvcache.radix import Node, PrefixTree, TokensOf
from quire.engine.kvcache.tiers.base import Found, Wanted
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
    def find(self, match: Match, wanted: Wanted) -> Found:
        if match.num_tokens >= wanted.limit or not self._host.num_used:
            return Found(match, match.num_tokens)
        whole, slots = match.num_tokens // self._block_size, list[Slot]()
        name = self._name_of(match, wanted.salt)
        for following in self._names(name, wanted.tokens_of, whole, wanted.limit // self._block_size):
            if (slot := self._host.find(following)) is None:
                break
            slots.append(slot)
            name = following
        num_tokens = (whole + len(slots)) * self._block_size
        if num_tokens < wanted.parked <= min(wanted.limit, num_tokens + self._block_size - 1):
            tail = next_key(name, pack(wanted.tokens_of(num_tokens, wanted.parked)))
            if (slot := self._host.find(tail)) is not None:
                slots.append(slot)
                num_tokens = wanted.parked
        if num_tokens <= match.num_tokens:
            return Found(match, match.num_tokens)
        for slot in reversed(slots):  # who leads to others is used after them, and goes after them
            self._host.touch(slot)
        return Found(Match(match.nodes[:whole], whole * self._block_size), num_tokens, tuple(slots))

    def find_files(self, match: Match, wanted: Wanted) -> list[bytes]:
        if match.num_tokens >= wanted.limit or not len(self._files.shelf):
            return []
        whole, found, here = match.num_tokens // self._block_size, list[bytes](), list[Slot]()
        name = self._name_of(match, wanted.salt)
        for following in self._names(name, wanted.tokens_of, whole, wanted.limit // self._block_size):
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
        """Whether one more file can be read for somebody beside so many, and what is in host memory for him."""
        return num_files < self._files.most_fetched and num_files + num_here < self._host.num_slots

    def names(self, salt: str, tokens_of: TokensOf, num_tokens: int) -> list[bytes]:
        whole = num_tokens // self._block_size
        names = list(self._names(self._tree.root_key(salt), tokens_of, 0, whole))
        if tail := tokens_of(whole * self._block_size, num_tokens):
            names.append(next_key(names[-1] if names else self._tree.root_key(salt), pack(tail)))
        return names

    def _name_of(self, match: Match, salt: str) -> bytes:
        """The last of a match's full blocks, or where there is none, what all begin with."""
        whole = match.num_tokens // self._block_size
        return self._tree.key_of(match.nodes[whole - 1]) if whole else self._tree.root_key(salt)

    def _names(self, name: bytes, tokens_of: TokensOf, start: int, stop: int) -> Iterator[bytes]:
        """Of full blocks `start` .. `stop`; `name` is the one before them."""
        size = self._block_size
        return chain(name, (pack(tokens_of(index * size, (index + 1) * size)) for index in range(start, stop)))

    # -------------------------------------------------------------------------------------------------- saving
    def evicted(self, node: Node) -> None:
        self._shelve(node)
        self._use(node)

    def kept(self, nodes: Sequence[Node]) -> None:
        if self._config.write == "through":
            first = len(self._touched)
            for node in nodes:
                self._shelve(node)
            self._touched[first:] = reversed(self._touched[first:])
            for node in reversed(nodes):  # who leads to others is used after them, and goes after them
                self._use(node)

    def _shelve(self, node: Node) -> None:
        name = self._tree.key_of(node)
        slot = self._host.find(name) or self._save(name, node.block)
        if slot is not None:
            self._files.store(name, slot)

    def _use(self, node: Node) -> None:
        """It was used just now, wherever it is."""
        name = self._tree.key_of(node)
        if (slot := self._host.find(name)) is not None:
            self._host.touch(slot)
        self._files.touch(name)

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
