"""Pinned prefixes: prompts whose blocks are not evicted until a client unpins them. EngineCore calls this."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.engine.kvcache.grouped_pool import GroupedPool
from quire.engine.kvcache.grouped_table import table_type
from quire.engine.kvcache.keys import TOKEN_BYTES
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefix_tree import Node, PrefixTree
from quire.engine.kvcache.table import BlockTable
from quire.types.errors import InvalidRequest
from quire.types.output import Finished
from quire.types.prefix import PinnedPrefix
from quire.types.request import Submit

SHARE = 2  # at most 1 / SHARE of the blocks are pinned or reserved for pins


@dataclass(frozen=True, slots=True)
class _Pin:
    """A pinned prompt."""

    root: str  # cache_root of the blocks
    prompt: bytes  # its tokens as cache keys, without the padding to whole blocks
    num_tokens: int
    table: BlockTable


@dataclass(frozen=True, slots=True)
class _Reservation:
    """The blocks reserved for the prompt of a running request that will be pinned."""

    num_tokens: int
    num_blocks: int


def check_share(num_own: int, num_others: int, num_total: int) -> None:
    """Raise InvalidRequest if pinning `num_own` blocks, in addition to the `num_others` that are pinned or reserved,
    would exceed the share of the pool that may be pinned."""
    limit = num_total // SHARE
    if num_own + num_others > limit:
        reason = f"needs {num_own} kv blocks beside the {num_others} of others; {limit} of {num_total} are the limit"
        raise InvalidRequest("prompt", reason, "shorten it, remove another, or raise num_kv_blocks")


class PinnedPrefixes:
    """Holds the blocks of named prompts, each in its own block table, and reserves blocks for requests whose prompt
    will be pinned when they end.

    Pinned and reserved blocks are not available for other requests' tokens, but a request whose prompt begins with a
    pinned one reads its blocks. Pinned and reserved blocks together are at most half of the pool, and a pin is refused
    if it would leave too few blocks for a live request. `tree` is None if the prefix cache is off.
    """

    def __init__(self, pool: BlockPool, tree: PrefixTree | None, block_size: int) -> None:
        self._pool, self._tree, self._block_size = pool, tree, block_size
        self._held: dict[tuple[str, str], _Pin] = {}  # by salt and name
        self._reservations: dict[str, _Reservation] = {}  # by request id
        self.num_blocks = 0  # blocks that are pinned, each counted once
        self.num_reserved = 0  # blocks that are pinned or reserved

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tables(self) -> list[BlockTable]:
        return [pin.table for pin in self._held.values()]

    def _nodes(self) -> set[Node]:
        """Return the pinned runs."""
        found: set[Node] = set()
        for pin in self._held.values():
            node = pin.table.node
            while node is not None and node.parent is not None and node not in found:
                found.add(node)
                node = node.parent
        return found

    def _count(self) -> None:
        self.num_blocks = len({block for table in self.tables for block in table.blocks[table.num_behind_window :]})
        windows = sum(pin.table.num_window_blocks for pin in self._held.values())
        reserved = sum(reservation.num_blocks for reservation in self._reservations.values())
        self.num_reserved = self.num_blocks + windows + reserved

    def pad_prompt(self, request: Submit) -> Submit:
        """Return a request that pins its prompt with the prompt's last token repeated until the last block is full.

        Only full blocks are cached, and a lookup matches the first tokens of a block too, so it finds the whole prompt.
        """
        tokens = request.prompt_token_ids
        if not tokens or isinstance(self._pool, GroupedPool):  # such pools match whole blocks only
            return request
        return replace(request, prompt_token_ids=tokens + tokens[-1:] * (-len(tokens) % self._block_size))

    def reserve(self, request: Submit, num_needed: int) -> None:
        """Reserve blocks for the unpadded prompt of a request that pins it. `num_needed` is the largest number of
        blocks that a live request may need. Raises InvalidRequest. The caller calls `pin_or_release` when the request
        ends."""
        if self._tree is None:
            reason = "cannot stay resident: nothing is cached here"
            raise InvalidRequest("prompt", reason, "turn enable_prefix_caching on, with a policy that shares memory")
        pin, num_tokens = self._held.get((request.cache_salt, request.pin)), len(request.prompt_token_ids)
        is_held = pin is not None and (pin.root, pin.prompt) == (request.cache_root, request.key_tokens)
        own = 0 if is_held else self._pool.at_rest(-(-num_tokens // self._block_size))
        others = self.num_reserved
        total = self._pool.num_blocks
        check_share(own, others, total)
        if own + others + num_needed > total:
            reason = f"leaves {total - own - others} of {total} kv blocks, and a live request may need {num_needed}"
            raise InvalidRequest("prompt", reason, "try again when that has ended, or raise num_kv_blocks")
        self._reservations[request.request_id] = _Reservation(num_tokens, own)
        self._count()

    def pin_or_release(self, request: Submit, end: Finished | None) -> None:
        """Release the blocks reserved for a request that has ended or, with `end` None, was refused. Pin its prompt
        under the name it gave if the request succeeded, the whole prompt is cached, and the reserved blocks suffice.
        Idempotent."""
        reservation = self._reservations.pop(request.request_id, None)
        if reservation is None:
            return  # the usual case; skips counting, which reads all pinned blocks
        if end is not None and end.error is None and all(s.finish_reason != "abort" for s in end.samples):
            self._hold(request, reservation)
        self._count()

    def _hold(self, request: Submit, reservation: _Reservation) -> None:
        tree, tokens, key = self._tree, request.prompt_token_ids, (request.cache_salt, request.pin)
        assert tree is not None
        match, size = tree.match(request.cache_root, request.key_tokens, len(tokens)), self._block_size
        is_grouped = isinstance(self._pool, GroupedPool)
        wanted = (len(tokens) - 1) // size if is_grouped else -(-len(tokens) // size)
        if match.node is None or match.num_blocks < wanted or not wanted:
            return
        held, num_new, node = self._nodes(), 0, tree.node_at(match.node, wanted)
        above: Node | None = node
        while above is not None and above.parent is not None:
            num_new += 0 if above in held else len(above.blocks)
            above = above.parent
        if self._pool.at_rest(num_new) > reservation.num_blocks:
            return  # another pin that shared some of its blocks was removed in the meantime
        table = table_type(self._pool)(self._pool, self._block_size, tree)
        table.start_with(node)
        table.become_pinned()
        self.remove(*key)
        prompt = request.key_tokens[: reservation.num_tokens * TOKEN_BYTES]
        self._held[key] = _Pin(request.cache_root, prompt, reservation.num_tokens, table)

    def remove(self, salt: str, name: str) -> bool:
        """Unpin a prompt. Its blocks stay cached until they are evicted. Returns False if no pin has that name."""
        pin = self._held.pop((salt, name), None)
        if pin is None:
            return False
        pin.table.free()
        self._count()
        return True

    def reset(self) -> int:
        """Unpin all prompts. Returns how many blocks became free."""
        before = self._pool.num_free
        for key in list(self._held):
            self.remove(*key)
        return self._pool.num_free - before

    def listing(self) -> tuple[PinnedPrefix, ...]:
        return tuple(
            PinnedPrefix(name, salt, pin.num_tokens, len(pin.table.blocks)) for (salt, name), pin in self._held.items()
        )

    def check(self) -> None:
        num_blocks, num_reserved = self.num_blocks, self.num_reserved
        self._count()
        assert (self.num_blocks, self.num_reserved) == (num_blocks, num_reserved)
        for pin in self._held.values():
            pin.table.check()
