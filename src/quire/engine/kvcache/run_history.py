"""Records which request computed each run of the prefix tree and which runs were evicted, so that the engine can tell a
client why no more of a prompt was found in the prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from quire.engine.kvcache.keys import TOKEN_BYTES
from quire.types.ledger import PrefixMiss
from quire.types.request import Submit

if TYPE_CHECKING:
    from quire.engine.kvcache.prefix_tree import Match, Node, PrefixTree

MAX_GHOSTS = 8  # evicted runs ("ghosts") that one node remembers
_make = tuple.__new__  # with all fields; faster than PrefixMiss()
MAX_SALTS = 256  # salts without cached blocks whose evictions are remembered


class Owner(NamedTuple):
    """The request that computed a run of blocks, and the tenant it ran for."""

    request_id: str
    tenant: str = ""


class Owners:
    """Which request computed each block of one run. Blocks are counted from the root of the tree, not from the start of
    the run."""

    __slots__ = ("_first", "_later")

    def __init__(self, first: Owner) -> None:
        self._first = first
        # (first block, owner), by block; None: one request computed the whole run.
        self._later: list[tuple[int, Owner]] | None = None

    def of(self, block: int) -> Owner:
        """Return the request that computed a block of the run."""
        if self._later is None:
            return self._first
        return next((owner for start, owner in reversed(self._later) if start <= block), self._first)

    def extend(self, end: int, owner: Owner) -> None:
        """Note that `owner` computed the blocks from `end` on. Entries for blocks after `end` belong to evicted blocks
        and are dropped."""
        if self._later is not None:
            self._later = [part for part in self._later if part[0] < end] or None
        if self.of(end) != owner:
            self._later = [*(self._later or ()), (end, owner)]

    def split(self, block: int) -> Owners:
        """Keep the entries of the blocks from `block` on. Returns the Owners of the blocks before it."""
        head, later = Owners(self._first), self._later
        self._first = self.of(block)
        if later is not None:
            head._later = [part for part in later if part[0] < block] or None
            self._later = [part for part in later if part[0] > block] or None
        return head


class Eviction(NamedTuple):
    """The eviction of consecutive blocks at the end of a run."""

    at: float  # seconds, on the engine's clock
    num_blocks: int
    owner: Owner  # the request that computed its first block


Ghosts = dict[bytes, Eviction]  # the evicted runs that followed a node, by the tokens of their first block


def remember(ghosts: Ghosts | None, first_block: bytes, eviction: Eviction) -> Ghosts:
    """Add an eviction as the latest, and drop the oldest if there are more than MAX_GHOSTS."""
    if ghosts is None:
        return {first_block: eviction}
    ghosts.pop(first_block, None)
    if len(ghosts) >= MAX_GHOSTS:
        del ghosts[next(iter(ghosts))]
    ghosts[first_block] = eviction
    return ghosts


class EvictedSalts:
    """The evictions of salts that have no cached block left and therefore no root in the tree."""

    def __init__(self) -> None:
        self._ghosts: dict[str, Ghosts] = {}  # by salt, the one that lost its last block longest ago first

    def keep(self, salt: str, ghosts: Ghosts | None) -> None:
        """Keep the ghosts of a salt whose root is removed."""
        if ghosts:
            if len(self._ghosts) >= MAX_SALTS:
                del self._ghosts[next(iter(self._ghosts))]
            self._ghosts[salt] = ghosts

    def take(self, salt: str) -> Ghosts | None:
        """Return the ghosts of a salt that gets a root again, and forget them here."""
        return self._ghosts.pop(salt, None)

    def clear(self) -> None:
        self._ghosts.clear()


def why_missed(
    tree: PrefixTree, match: Match, request: Submit, tokens: Callable[[], bytes], num_found: int, now: float
) -> PrefixMiss:
    """Return why only `num_found` of a request's tokens were found: those of `match` in the prefix tree, and those that
    follow in a tier. `tokens` returns all tokens that were looked up.

    The result names no request of another tenant, and mentions no eviction of another tenant's blocks, even if the
    tenants share a cache.
    """
    node, num_blocks, num_tokens, _, closest = match
    if node is None:
        node = tree.root(request.cache_root)
    if node.ghosts:
        known = tokens()
        evicted = _find_eviction(tree, node, num_blocks, known)
        if evicted is not None and evicted.owner.tenant == request.tenant:
            end = min((num_blocks + evicted.num_blocks) * tree.block_size, len(known) // TOKEN_BYTES)
            if end > num_found:
                return PrefixMiss("evicted", num_found, "", end - num_found, now - evicted.at, tree.policy_name)
    if closest is None or num_found > num_tokens:
        return _make(PrefixMiss, ("not_cached", num_found, "", 0, 0.0, ""))
    owner_id, tenant = closest.owner_of(num_blocks)
    name = owner_id if tenant == request.tenant else ""
    return _make(PrefixMiss, ("differs", num_found, name, 0, 0.0, ""))


def _find_eviction(tree: PrefixTree, node: Node, num_blocks: int, tokens: bytes) -> Eviction | None:
    """Return the eviction of the run that began right after a match of `num_blocks` whole blocks, the last of them in
    the run of `node`."""
    if not node.ghosts or node.end != num_blocks:
        return None
    width = tree.block_size * TOKEN_BYTES
    start = num_blocks * width
    return node.ghosts.get(tokens[start : start + width])


def name_for(request: Submit, other: Submit) -> str:
    """Return how to name another request to a request's client: by its id only if both have the same tenant."""
    return f"request {other.request_id}" if other.tenant == request.tenant else "another request"


def sources_of(num_found: int, loaded: Counter[str]) -> str:
    """Return how many of the found tokens came from each tier, as text."""
    parts = {"device": max(num_found - loaded.total(), 0), **loaded}
    return ", ".join(f"{tier} {count}" for tier, count in parts.items() if count)
