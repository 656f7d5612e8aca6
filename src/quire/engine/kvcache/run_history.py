"""Who computed the runs of the prefix tree, and which runs were evicted: with it the engine tells a request why its
prompt was not found."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire.engine.kvcache.keys import TOKEN_BYTES
from quire.types.ledger import PrefixMiss
from quire.types.request import Submit

if TYPE_CHECKING:
    from quire.engine.kvcache.prefix_tree import Match, PrefixTree

MAX_GHOSTS = 8  # evicted runs that one node remembers
MAX_SALTS = 256  # salts that lost all their blocks and are remembered


class Owner(NamedTuple):
    """The request that computed a run of blocks, and the tenant it ran for."""

    request_id: str
    tenant: str = ""


class Owners:
    """The requests that computed one run, each from some block on. Blocks are counted from the root of the tree."""

    __slots__ = ("_parts",)

    def __init__(self, start: int, owner: Owner) -> None:
        self._parts = [(start, owner)]

    def of(self, block: int) -> Owner:
        """The request that computed a block of the run."""
        return next((owner for start, owner in reversed(self._parts) if start <= block), self._parts[0][1])

    def extend(self, end: int, owner: Owner) -> None:
        """A request computed what follows the run's first blocks, up to `end`; what others had there was evicted."""
        while self._parts[-1][0] >= end:
            del self._parts[-1]
        if self._parts[-1][1] != owner:
            self._parts.append((end, owner))

    def split(self, block: int) -> Owners:
        """Keep what begins at a block; returns the owners of what comes before it."""
        head = Owners(*self._parts[0])
        head._parts = [part for part in self._parts if part[0] < block]
        self._parts = [(block, self.of(block)), *(part for part in self._parts if part[0] > block)]
        return head


class Eviction(NamedTuple):
    """A run of blocks was evicted."""

    at: float  # seconds, on the engine's clock
    num_blocks: int
    owner: Owner  # of its first block


Ghosts = dict[bytes, Eviction]  # the evicted runs that followed a node, by the tokens of their first block


def remember(ghosts: Ghosts | None, first_block: bytes, eviction: Eviction) -> Ghosts:
    """Add an eviction as the latest; the oldest goes when there are more than MAX_GHOSTS."""
    if ghosts is None:
        return {first_block: eviction}
    ghosts.pop(first_block, None)
    if len(ghosts) >= MAX_GHOSTS:
        del ghosts[next(iter(ghosts))]
    ghosts[first_block] = eviction
    return ghosts


class EvictedSalts:
    """The evictions of salts that have no block left, and so no root in the tree."""

    def __init__(self) -> None:
        self._ghosts: dict[str, Ghosts] = {}  # by salt, the one that lost its last block longest ago first

    def keep(self, salt: str, ghosts: Ghosts | None) -> None:
        """A salt lost its root."""
        if ghosts:
            if len(self._ghosts) >= MAX_SALTS:
                del self._ghosts[next(iter(self._ghosts))]
            self._ghosts[salt] = ghosts

    def take(self, salt: str) -> Ghosts | None:
        """A salt has a root again, which remembers these evictions from now on."""
        return self._ghosts.pop(salt, None)

    def clear(self) -> None:
        self._ghosts.clear()


def why_missed(tree: PrefixTree, match: Match, request: Submit, tokens: bytes, now: float) -> PrefixMiss:
    """Why the prefix tree has no more of a request's tokens than `match`, on which its table begins now.

    Requests of other tenants, which share a cache if the operator says so, are not named, and their evictions are not
    mentioned.
    """
    found, evicted = match.num_tokens, _find_eviction(tree, match, request, tokens)
    if evicted is not None and evicted.owner.tenant == request.tenant:
        end = min((match.num_blocks + evicted.num_blocks) * tree.block_size, len(tokens) // TOKEN_BYTES)
        return PrefixMiss("evicted", found, "", end - found, now - evicted.at, tree.policy_name)
    if match.closest is None:
        return PrefixMiss("not_cached", found)
    owner = match.closest.owner_of(match.num_blocks)
    return PrefixMiss("differs", found, owner.request_id if owner.tenant == request.tenant else "")


def _find_eviction(tree: PrefixTree, match: Match, request: Submit, tokens: bytes) -> Eviction | None:
    """The eviction of the run that began with the block after a match's whole blocks."""
    node = tree.root(request.cache_salt) if match.node is None else match.node
    if not node.ghosts or node.end != match.num_blocks:
        return None
    width = tree.block_size * TOKEN_BYTES
    start = match.num_blocks * width
    return node.ghosts.get(tokens[start : start + width])


def name_for(request: Submit, other: Submit) -> str:
    """What a request's client is told of another request: its id, if both are of the same tenant."""
    return f"request {other.request_id}" if other.tenant == request.tenant else "another request"
