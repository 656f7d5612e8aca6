"""Why a prompt was not found in the prefix cache, in terms that the request's tenant may know."""

from __future__ import annotations

from quire.engine.decoding.group import Group
from quire.engine.kvcache.keys import TOKEN_BYTES
from quire.engine.kvcache.prefix_tree import Match, PrefixTree
from quire.engine.kvcache.run_history import Eviction
from quire.types.ledger import PrefixMiss
from quire.types.request import Submit


def why_missed(tree: PrefixTree, group: Group, match: Match, num_found: int, now: float) -> PrefixMiss:
    """Why there are no more of a group's tokens than `num_found`: those of `match`, on which its leader's table begins
    now, and those that follow in a tier.

    Requests of other tenants, which share a cache if the operator says so, are not named, and their evictions are not
    mentioned.
    """
    tenant, evicted = group.request.tenant, _find_eviction(tree, group, match)
    if evicted is not None and evicted.owner.tenant == tenant:
        end = min((match.num_blocks + evicted.num_blocks) * tree.block_size, group.leader.num_tokens)
        if end > num_found:
            return PrefixMiss("evicted", num_found, "", end - num_found, now - evicted.at, tree.policy_name)
    if match.closest is None or num_found > match.num_tokens:
        return PrefixMiss("not_cached", num_found)
    owner = match.closest.owner_of(match.num_blocks)
    return PrefixMiss("differs", num_found, owner.request_id if owner.tenant == tenant else "")


def _find_eviction(tree: PrefixTree, group: Group, match: Match) -> Eviction | None:
    """The eviction of the run that began with the block after a match's whole blocks."""
    node = tree.root(group.request.cache_salt) if match.node is None else match.node
    if not node.ghosts or node.end != match.num_blocks:
        return None
    width = tree.block_size * TOKEN_BYTES
    start = match.num_blocks * width
    return node.ghosts.get(group.leader.tokens()[start : start + width])


def name_for(group: Group, other: Submit) -> str:
    """What a group's client is told of another request: its id, if both are of the same tenant."""
    return f"request {other.request_id}" if other.tenant == group.request.tenant else "another request"
