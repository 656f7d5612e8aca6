"""Prompts that stay resident until somebody removes them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefixes import Prefixes
from quire.engine.kvcache.table import BlockTable
from quire.types.errors import InvalidRequest
from quire.types.output import Finished
from quire.types.prefix import PinnedPrefix
from quire.types.request import Submit

SHARE = 2  # at most one of so many blocks is held here


@dataclass(frozen=True, slots=True)
class _Pin:
    token_ids: tuple[int, ...]  # filled up to whole blocks
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


class Pins:
    """Holds the blocks of named prompts, each in a table of its own, and what requests in work are to leave here.

    What is held or promised is no room for requests: at most half the pool, and never what a live request may need.
    """

    def __init__(self, prefixes: Prefixes, pool: BlockPool, block_size: int, *, has_cache: bool) -> None:
        self._prefixes, self._pool, self._block_size, self._has_cache = prefixes, pool, block_size, has_cache
        self._held: dict[tuple[str, str], _Pin] = {}  # by salt and name
        self._promised: dict[str, _Promise] = {}  # by request id
        self._holds: Counter[int] = Counter()  # pins that hold a block

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_blocks(self) -> int:
        """Blocks that are held here."""
        return len(self._holds)

    @property
    def num_reserved(self) -> int:
        """Blocks that are held here or will be."""
        return len(self._holds) + sum(promise.num_blocks for promise in self._promised.values())

    @property
    def num_alone(self) -> int:
        """Blocks that nobody holds but pins."""
        return sum(self._pool.holders(block) == count for block, count in self._holds.items())

    @property
    def blocks(self) -> list[int]:
        """Every block that is held here, once for each pin that holds it."""
        return list(self._holds.elements())

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
        if not self._has_cache:
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

    def settle(self, request: Submit, end: Finished) -> None:
        """A request has ended. If it was computed, all its prompt is cached and there is the room that was promised,
        hold that under the name it gave; else it is not listed."""
        promise = self._promised.pop(request.request_id)
        if end.error is not None or any(sample.finish_reason == "abort" for sample in end.samples):
            return
        tokens, key = request.prompt_token_ids, (request.cache_salt, request.pin)
        match = self._prefixes.find(request.cache_salt, lambda start, stop: tokens[start:stop], len(tokens))
        if match.num_tokens < len(tokens):
            return
        if sum(node.block not in self._holds for node in match.nodes) > promise.num_blocks:
            return  # what it was promised to share was let go of meanwhile
        table = BlockTable(self._pool, self._block_size)
        self._prefixes.adopt(table, match)
        self._holds.update(table.blocks)
        self.remove(*key)
        self._held[key] = _Pin(tokens, promise.num_tokens, table)

    def remove(self, salt: str, name: str) -> bool:
        """Hold a prompt no longer; it stays cached as others do. False if there is none of that name."""
        pin = self._held.pop((salt, name), None)
        if pin is None:
            return False
        self._holds -= Counter(pin.table.blocks)
        pin.table.free()
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
        assert self._holds == Counter(block for pin in self._held.values() for block in pin.table.blocks)
        for pin in self._held.values():
            pin.table.check()
