"""Prompts that stay in the cache until somebody removes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefix_tree import Node, PrefixTree
from quire.engine.kvcache.table import BlockTable
from quire.types.errors import InvalidRequest
from quire.types.output import Finished
from quire.types.prefix import PinnedPrefix
from quire.types.request import Submit, TokenIds

SHARE = 2  # at most one of so many blocks is held for pinned prefixes


@dataclass(frozen=True, slots=True)
class _Pin:
    token_ids: TokenIds  # filled up to whole blocks
    num_tokens: int  # without what fills it up
    table: BlockTable


@dataclass(frozen=True, slots=True)
class _Promise:
    num_tokens: int
    num_blocks: int


def check_share(num_own: int, num_others: int, num_total: int) -> None:
    """Raise InvalidRequest if a prompt of so many blocks cannot be held beside what is."""
    limit = num_total // SHARE
    if num_own + num_others > limit:
        reason = f"needs {num_own} kv blocks beside the {num_others} of others; {limit} of {num_total} are the limit"
        raise InvalidRequest("prompt", reason, "shorten it, remove another, or raise num_kv_blocks")


class PinnedPrefixes:
    """Holds the blocks of named prompts, each in a table of its own, and promises blocks to requests whose prompt is to
    stay.

    What is held or promised is no room for requests: at most half the pool, and never what a live request may need.
    `tree` is None where nothing is cached.
    """

    def __init__(self, pool: BlockPool, tree: PrefixTree | None, block_size: int) -> None:
        self._pool, self._tree, self._block_size = pool, tree, block_size
        self._held: dict[tuple[str, str], _Pin] = {}  # by salt and name
        self._promised: dict[str, _Promise] = {}  # by request id
        self.num_blocks = 0  # different blocks that are held here
        self.num_reserved = 0  # blocks that are held here or promised

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tables(self) -> list[BlockTable]:
        return [pin.table for pin in self._held.values()]

    def num_alone(self) -> int:
        """Blocks that nobody holds but these tables."""
        return sum(len(node.blocks) for node, count in self._nodes().items() if node.locks == count)

    def _nodes(self) -> dict[Node, int]:
        """The runs that are held here, and how many of these tables hold each."""
        found: dict[Node, int] = {}
        for pin in self._held.values():
            node = pin.table.node
            while node is not None and node.parent is not None:
                found[node] = found.get(node, 0) + 1
                node = node.parent
        return found

    def _count(self) -> None:
        self.num_blocks = sum(len(node.blocks) for node in self._nodes())
        self.num_reserved = self.num_blocks + sum(promise.num_blocks for promise in self._promised.values())

    def whole(self, request: Submit) -> Submit:
        """A request whose prompt is to stay, with the last token repeated until it fills its last block: a block is
        found by as many of its first tokens as agree, so the whole prompt will be."""
        tokens = request.prompt_token_ids
        if not request.pin or not tokens:
            return request
        return replace(request, prompt_token_ids=tokens + tokens[-1:] * (-len(tokens) % self._block_size))

    def promise(self, request: Submit, num_needed: int) -> None:
        """Make sure of room for the prompt of a request as it came; `num_needed` is what a live one may need at most.

        Raises InvalidRequest. To be followed by `settle` when the request has ended.
        """
        if self._tree is None:
            reason = "cannot stay resident: nothing is cached here"
            raise InvalidRequest("prompt", reason, "turn enable_prefix_caching on, with a policy that shares memory")
        pin, num_tokens = self._held.get((request.cache_salt, request.pin)), len(request.prompt_token_ids)
        is_held = pin is not None and pin.token_ids[: pin.num_tokens] == request.prompt_token_ids
        own, others = 0 if is_held else -(-num_tokens // self._block_size), self.num_reserved
        total = self._pool.num_blocks
        check_share(own, others, total)
        if own + others + num_needed > total:
            reason = f"leaves {total - own - others} of {total} kv blocks, and a live request may need {num_needed}"
            raise InvalidRequest("prompt", reason, "try again when that has ended, or raise num_kv_blocks")
        self._promised[request.request_id] = _Promise(num_tokens, own)
        self._count()

    def settle(self, request: Submit, end: Finished | None) -> None:
        """A request has ended, or with None, was not accepted after all.

        Hold its prompt under the name it gave if it was computed, if all of it is cached and there is the room that was
        promised. Idempotent.
        """
        promise = self._promised.pop(request.request_id, None)
        is_whole = end is not None and end.error is None and all(s.finish_reason != "abort" for s in end.samples)
        if promise is not None and is_whole:
            self._hold(request, promise)
        self._count()

    def _hold(self, request: Submit, promise: _Promise) -> None:
        tree, tokens, key = self._tree, request.prompt_token_ids, (request.cache_salt, request.pin)
        assert tree is not None
        match = tree.match(request.cache_salt, tokens.tobytes(), len(tokens))
        if match.node is None or match.num_blocks * self._block_size < len(tokens):
            return
        held, num_new, node = self._nodes(), 0, tree.node_at(match.node, match.num_blocks)
        above: Node | None = node
        while above is not None and above.parent is not None:
            num_new += 0 if above in held else len(above.blocks)
            above = above.parent
        if num_new > promise.num_blocks:
            return  # what it was to share with another pinned prompt was let go of meanwhile
        table = BlockTable(self._pool, self._block_size, tree)
        table.hold(node)
        self.remove(*key)
        self._held[key] = _Pin(tokens, promise.num_tokens, table)

    def remove(self, salt: str, name: str) -> bool:
        """Hold a prompt no longer; it stays cached as others do. False if there is none of that name."""
        pin = self._held.pop((salt, name), None)
        if pin is None:
            return False
        pin.table.free()
        self._count()
        return True

    def reset(self) -> int:
        """Let go of everything; returns how many blocks nobody holds now."""
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
