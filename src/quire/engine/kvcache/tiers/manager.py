"""Manages the host, disk and remote tiers behind the device's KV cache. Blocks are saved from the device to host memory
and loaded back, stored from host memory to files and fetched back, put to other engines and got from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile

from quire.config.tiers import TierConfig
from quire.engine.kvcache.grouped_pool import GroupedPool
from quire.engine.kvcache.keys import TOKEN_BYTES, chain_keys, next_key
from quire.engine.kvcache.prefix_tree import Match, Node, PrefixTree
from quire.engine.kvcache.tiers.base import RemoteLookup, SideSlot, TierHit, TierQuery
from quire.engine.kvcache.tiers.disk import DiskTier
from quire.engine.kvcache.tiers.host import HostTier, Slot
from quire.engine.kvcache.tiers.remote import RemoteTier, nodes_to
from quire.engine.kvcache.tiers.side_keys import Continuation, SideKeys
from quire.engine.kvcache.tiers.transfer_time import TransferTime
from quire.types.stats import TierStats
from quire.types.transfer import NO_TRANSFERS, SlotMove, TransferReport, Transfers

_AWAITED_SECONDS = 2.0  # longest wait for the blocks of a prompt that another engine has just computed
_SAMPLE = 2  # blocks saved to measure how long a save takes


class TierManager:
    """Implements Tiers. A block's key depends on all tokens up to its end, so a block that was saved for one request is
    found by every request with the same prefix.

    A host slot that the plan under construction saves to or loads from is held until that plan is complete, so no plan
    uses a slot for two blocks. A plan may store or load a slot that it also saves to.
    """

    def __init__(self, config: TierConfig, tree: PrefixTree, block_size: int) -> None:
        self._tree, self._block_size, self._config = tree, block_size, config
        self._sides = SideKeys(tree.pool, block_size) if isinstance(tree.pool, GroupedPool) else None
        self._only_sides = tree.pool.names_memory  # blocks have no memory except their side blocks
        self._host = HostTier(config.host_blocks)
        self._disk = DiskTier(self._host, config.disk_blocks)
        self._remote = None if config.transport is None else RemoteTier(self._host, config.transport)
        self._gets = self._remote if self._remote is not None and self._remote.gets else None
        self._time = TransferTime(config.block_bytes)
        self._saves: list[SlotMove] = []
        self._plan_slots: list[Slot] = []  # held until the plan under construction is complete
        self._swapped: dict[object, list[Slot]] = {}  # by owner
        self._num_in_flight = 0  # saves and loads that no report has counted
        self._counts: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------- lookup
    def find(self, match: Match, query: TierQuery) -> TierHit:
        if match.num_tokens >= query.limit or not self._host.num_used:
            return TierHit(match.num_tokens)
        if self._sides is not None:
            return self._find_with_sides(match, query)
        num_matched, slots = match.num_blocks, list[Slot]()
        key = self._key_before(match, query.salt)
        for following in self._chain(key, query.tokens, num_matched, query.limit // self._block_size):
            if (slot := self._host.find(following)) is None:
                break
            slots.append(slot)
            key = following
        num_tokens = (num_matched + len(slots)) * self._block_size
        if num_tokens < query.swapped <= min(query.limit, num_tokens + self._block_size - 1):
            tail = query.tokens[num_tokens * TOKEN_BYTES : query.swapped * TOKEN_BYTES]
            if (slot := self._host.find(next_key(key, tail))) is not None:
                slots.append(slot)
                num_tokens = query.swapped
        if num_tokens <= match.num_tokens:
            return TierHit(match.num_tokens)
        for slot in reversed(slots):  # the first block of a prefix is used last, so it is evicted last
            self._host.touch(slot)
        return TierHit(num_tokens, tuple(slots))

    def _find_with_sides(self, match: Match, query: TierQuery) -> TierHit:
        """`find` for a model with groups of layers: up to a block whose side blocks are in host memory too."""
        keys, needed = self._needed(match, query, self._host.__contains__)
        if needed is None:
            return TierHit(match.num_tokens)
        sides = [SideSlot(place, name, self._host.use(key)) for place, name, key in needed.sides]
        slots = [self._host.use(key) for key in reversed(keys)]
        return TierHit((match.num_blocks + needed.num_blocks) * self._block_size, tuple(slots[::-1]), tuple(sides))

    def _needed(
        self, match: Match, query: TierQuery, has: Callable[[bytes], bool]
    ) -> tuple[list[bytes], Continuation | None]:
        """Return the keys of the blocks that continue the device's match, up to where a sequence can continue with the
        blocks for which `has` is true, and the side blocks it needs there."""
        assert self._sides is not None
        following = self._behind(match, query)
        keys = list(following if self._only_sides else takewhile(has, following))
        needed = self._sides.needed(match.num_blocks, keys, has)
        return [] if needed is None or self._only_sides else keys[: needed.num_blocks], needed

    def _files_with_sides(self, match: Match, query: TierQuery) -> list[bytes]:
        """`find_files` for a model with groups of layers."""
        keys, needed = self._needed(match, query, self._has)
        if needed is None:
            return []
        wanted = [*keys, *(side.key for side in needed.sides)]
        present = [slot for key in wanted if (slot := self._host.find(key)) is not None]
        files = [key for key in wanted if key not in self._host]
        for slot in reversed(present):
            self._host.touch(slot)
        return files if len(wanted) <= self._host.num_slots and len(files) <= self._max_pending else []

    def find_files(self, match: Match, query: TierQuery) -> list[bytes]:
        if match.num_tokens >= query.limit or not self._num_files:
            return []
        if self._sides is not None:
            return self._files_with_sides(match, query)
        files, slots = list[bytes](), list[Slot]()
        for following in self._behind(match, query):
            if (slot := self._host.find(following)) is not None:
                slots.append(slot)
            elif self._has(following) and self._can_fetch_another(len(files), len(slots)):
                files.append(following)
            else:
                break
        # So that the files evict other blocks before these, and of these the last one first.
        for slot in reversed(slots):
            self._host.touch(slot)
        return files

    def _can_fetch_another(self, num_files: int, num_slots: int) -> bool:
        """Whether host memory can hold one more file of a prefix that has `num_files` files and `num_slots` slots."""
        return num_files < self._max_pending and num_files + num_slots < self._host.num_slots

    def _has(self, key: bytes) -> bool:
        """Whether a tier has a block."""
        return key in self._host or key in self._disk or (self._gets is not None and key in self._gets)

    @property
    def _num_files(self) -> int:
        """Known blocks in the tiers behind host memory."""
        return len(self._disk.index) + (0 if self._gets is None else len(self._gets.index))

    @property
    def _max_pending(self) -> int:
        """How many blocks may be fetched for a prefix at once."""
        return self._disk.max_pending if self._remote is None else self._remote.max_pending

    def ask(self, match: Match, query: TierQuery, *, awaits: bool) -> RemoteLookup | None:
        remote = self._remote
        if remote is None:
            return None
        sent = [key for key in self._sent_keys(match, query) if key in remote] if remote.puts else []
        awaited, others = self._to_get(match, query) if remote.gets else ([], [])
        if not sent and not awaited:
            return None
        number = remote.ask(awaited, others + sent, _AWAITED_SECONDS if awaits else 0.0)
        num_blocks = query.limit // self._block_size - match.num_blocks if awaited else 1
        return None if number is None else RemoteLookup(number, num_blocks)

    def _to_get(self, match: Match, query: TierQuery) -> tuple[list[bytes], list[bytes]]:
        """Return the keys to look up in other engines: those that continue the device's match and that no tier of this
        engine has, and the side blocks that may be useful with them. Empty if there are none of the former."""
        keys = list(self._behind(match, query))
        needed, others = list(keys), list[bytes]()
        if self._sides is not None:
            ends = self._sides.to_ask(match.num_blocks, keys)
            needed, others = ends.needed if self._only_sides else needed + ends.needed, ends.others
        awaited = [key for key in needed if key not in self._host and key not in self._disk]
        return awaited, [key for key in others if key not in self._host] if awaited else []

    def _sent_keys(self, match: Match, query: TierQuery) -> Iterator[bytes]:
        """Yield the keys of the device's match with its side blocks, and of the blocks that continue it in host
        memory."""
        for node in nodes_to(match.node):
            for index, block in enumerate(node.blocks):
                key = self._tree.key_of(node, index)
                yield key
                if self._sides is not None:
                    yield from (side for side, _ in self._sides.of(key, block))
        yield from takewhile(self._host.__contains__, self._behind(match, query))

    def put_counts(self) -> tuple[int, int]:
        return (0, 0) if self._remote is None else self._remote.put_counts

    def is_asking(self, lookup: RemoteLookup) -> bool:
        return self._remote is not None and self._remote.is_asking(lookup.number)

    def keys(self, salt: str, tokens: bytes, num_tokens: int) -> list[bytes]:
        num_full = num_tokens // self._block_size
        keys = list(self._chain(self._tree.root_key(salt), tokens, 0, num_full))
        if tail := tokens[num_full * self._block_size * TOKEN_BYTES : num_tokens * TOKEN_BYTES]:
            keys.append(next_key(keys[-1] if keys else self._tree.root_key(salt), tail))
        return keys

    def _key_before(self, match: Match, salt: str) -> bytes:
        """Return the key of a match's last full block, or the root key of the salt if the match has none."""
        node, count = match.node, match.num_blocks
        if node is None or count == 0:
            return self._tree.root_key(salt)
        while node.start >= count and node.parent is not None:
            node = node.parent
        return self._tree.key_of(node, count - 1 - node.start)

    def _behind(self, match: Match, query: TierQuery) -> Iterator[bytes]:
        """Return the keys of the full blocks that continue the device's match."""
        key, stop = self._key_before(match, query.salt), query.limit // self._block_size
        return self._chain(key, query.tokens, match.num_blocks, stop)

    def _chain(self, key: bytes, tokens: bytes, start: int, stop: int) -> Iterator[bytes]:
        """Return the keys of the full blocks `start` to `stop` (exclusive). `key` is the key of the block before
        them."""
        width = self._block_size * TOKEN_BYTES
        return chain_keys(key, (tokens[index * width : (index + 1) * width] for index in range(start, stop)))

    # -------------------------------------------------------------------------------------------------- saving
    def on_evict(self, node: Node, index: int) -> None:
        key = self._tree.key_of(node, index)
        if self._sides is not None:
            for side, block in self._sides.of(key, node.blocks[index]):
                self._offload(side, block)
        if not self._only_sides:
            self._offload(key, node.blocks[index])
            self._touch(key)

    def on_publish(self, node: Node, first: int) -> None:
        if self._config.write == "through":
            before, keys = len(self._plan_slots), [self._tree.key_of(node, i) for i in range(first, len(node.blocks))]
            for key, block in zip(keys, () if self._only_sides else node.blocks[first:], strict=False):
                self._offload(key, block)
            if self._sides is not None:
                self._save_sides(node, first, keys)
            self._plan_slots[before:] = reversed(self._plan_slots[before:])
            for key in reversed(keys):  # the first block of a prefix is used last, so it is evicted last
                self._touch(key)

    def on_hit(self, match: Match) -> None:
        if self._remote is None or not self._remote.puts:
            return
        for node in nodes_to(match.node):
            if len(node.keys) < len(node.blocks) or not self._remote.has_all(node.keys) or self._sides is not None:
                self.on_publish(node, 0)

    def _save_sides(self, node: Node, first: int, keys: list[bytes]) -> None:
        """Save the side blocks with which a sequence can continue after a run, and the states kept within the run."""
        assert self._sides is not None
        end = node.end if self._remote is None else node.end - 1  # other engines compute a prompt's last token again
        for place, key in enumerate(keys, first):
            is_seen = self._sides.is_seen(node.start + place, end)
            for side, block in self._sides.of(key, node.blocks[place], windows=is_seen):
                self._offload(side, block)

    def to_save(self, blocks: Mapping[bytes, int]) -> dict[bytes, int]:
        sides = {} if self._sides is None else self._sides.to_save(blocks)
        return sides if self._only_sides else dict(blocks) | sides

    def _offload(self, key: bytes, block: int) -> None:
        """Save a block to host memory, and from there to a file, unless the tiers have it."""
        slot = self._host.find(key) or self._save(key, block)
        if slot is not None:
            self._disk.store(key, slot)
            if self._remote is not None:
                self._remote.store(key, slot)

    def _touch(self, key: bytes) -> None:
        """Mark a block as used in both tiers."""
        if (slot := self._host.find(key)) is not None:
            self._host.touch(slot)
        self._disk.index.touch(key)

    def _save(self, key: bytes, block: int) -> Slot | None:
        """Save a block to a host slot. None: all slots are held."""
        slot = self._host.take()
        if slot is None:
            self._counts["host_full"] += 1
            return None
        self._host.assign(slot, key)
        self._plan_slots.append(slot)
        self._saves.append(SlotMove(block, slot.number))
        return slot

    def num_to_save(self, blocks: Mapping[bytes, int]) -> int | None:
        missing = sum(key not in self._host for key in blocks)
        idle = sum(self._host.is_idle(key) for key in blocks)
        return missing if missing <= self._host.num_available - idle else None

    def swap_out(self, owner: object, blocks: Mapping[bytes, int]) -> None:
        present = [self._host.hold(slot) for key in blocks if (slot := self._host.find(key)) is not None]
        swapped = self._swapped.setdefault(owner, [])
        for key, block in blocks.items():
            slot = self._host.find(key) or self._save(key, block)
            assert slot is not None
            swapped.append(self._host.hold(slot))
        for slot in present:
            self._host.release(slot)
        self._time.note_swap()

    def release_swapped(self, owner: object) -> None:
        for slot in reversed(self._swapped.pop(owner, ())):
            self._host.release(slot)

    # -------------------------------------------------------------------------------------- loading and fetching
    def keep_for_plan(self, slot: Slot) -> None:
        self._plan_slots.append(self._host.hold(slot))

    def fetch(self, keys: Sequence[bytes]) -> list[bytes]:
        left = self._disk.fetch(keys)
        return (
            left if self._remote is None else left + self._remote.fetch([key for key in keys if key not in self._disk])
        )

    def release_fetched(self, keys: Sequence[bytes]) -> None:
        self._disk.release_fetched(keys)
        if self._remote is not None:
            self._remote.release_fetched(keys)

    def is_fetching(self, key: bytes) -> bool:
        return self._disk.is_fetching(key) or (self._remote is not None and self._remote.is_fetching(key))

    def count_late(self, num_files: int) -> None:
        if num_files:
            self._disk.failures["slow"] += num_files

    # -------------------------------------------------------------------------------------- plans and reports
    @property
    def has_transfers(self) -> bool:
        has_remote = self._remote is not None and self._remote.has_transfers
        return bool(self._saves) or self._disk.has_transfers or has_remote

    def take_transfers(self, loads: tuple[SlotMove, ...]) -> Transfers:
        transfers = NO_TRANSFERS
        if loads or self.has_transfers:
            remote = () if self._remote is None else self._remote.take_remote()
            transfers = Transfers(tuple(self._saves), loads, *self._disk.take_transfers(), *remote)
            self._counts["saved"] += len(self._saves)
            self._counts["loaded"] += len(loads)
            self._num_in_flight += len(self._saves) + len(loads)
            self._saves.clear()
        self._release_plan_slots()
        return transfers

    def _release_plan_slots(self) -> None:
        for slot in self._plan_slots:
            self._host.release(slot)
        self._plan_slots.clear()

    @property
    def expects_report(self) -> bool:
        return self._num_in_flight > 0 or self._config.outlives_process

    def apply_report(self, report: TransferReport) -> None:
        self._num_in_flight -= report.num_saved + report.num_loaded
        self._time.apply_report(report)
        self._disk.apply_report(report)
        if self._remote is not None:
            self._remote.apply_report(report)

    def transfer_seconds(self, num_saved: int, num_loaded: int) -> float:
        return self._time.seconds(num_saved, num_loaded)

    def note_recompute(self, blocks: Mapping[bytes, int]) -> None:
        if self._time.note_recompute():
            for key, block in list(blocks.items())[:_SAMPLE]:
                if key not in self._host:
                    self._save(key, block)

    # ------------------------------------------------------------------------------------- reset, stats, check
    def reset(self) -> None:
        self._saves.clear()
        self._host.clear()
        self._disk.clear()
        if self._remote is not None:
            self._remote.clear()
        self._release_plan_slots()

    def stats(self) -> TierStats:
        host, index, counts, remote = self._host, self._disk.index, self._counts, self._remote
        failures = self._disk.failures if remote is None else self._disk.failures + remote.failures
        return TierStats(
            host_blocks=host.num_slots,
            host_used=host.num_used,
            host_held=host.num_held,
            disk_blocks=index.quota,
            disk_used=index.num_used,
            saved=counts["saved"],
            loaded=counts["loaded"],
            stored=self._disk.num_stored,
            fetched=self._disk.num_fetched,
            host_evicted=host.num_evicted,
            disk_evicted=index.num_evicted,
            failures=dict(failures) | ({"host_full": counts["host_full"]} if counts["host_full"] else {}),
            block_bytes=self._config.block_bytes,
            put=0 if remote is None else remote.num_stored,
            got=0 if remote is None else remote.num_fetched,
        )

    def check(self) -> None:
        self._host.check()
        self._disk.check()
        for slots in self._swapped.values():
            assert all(slot.holds for slot in slots)
        holds = sum(map(len, self._swapped.values())) + len(self._plan_slots) + self._disk.num_holds
        if self._remote is not None:
            self._remote.check()
            holds += self._remote.num_holds
        assert holds == self._host.num_holds
