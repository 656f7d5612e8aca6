"""For models with groups of layers: cuts a match back to the last block after which a request can continue, because the
window blocks and the state that it needs there exist. Also updates a hit that a group kept from an earlier lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.decoding.group import Hit, Sequence
from quire.engine.kvcache.grouped_pool import GroupedPool
from quire.engine.kvcache.prefix_tree import Match, Node, PrefixTree


class _Path:
    """The blocks from the root to the end of a node. Fast for descending indices, because it walks up from run to
    run."""

    def __init__(self, node: Node) -> None:
        self._last = self._node = node

    def __getitem__(self, index: int) -> int:
        node = self._node if index < self._node.end else self._last
        while node.start > index:
            assert node.parent is not None
            node = node.parent
        self._node = node
        return node.blocks[index - node.start]


def outside_images(sequence: Sequence, match: Match, again: Callable[..., Match], *given: Any) -> Match:
    """Return a match, or if it may not end where it does in an image of the sequence, the longest before that image.
    `again` returns the match of at most so many tokens, which it takes after `given`."""
    if sequence.group.request.images:
        while (inside := sequence.image_begun_at(match.num_tokens)) is not None:
            match = again(*given, inside)
    return match


def tokens_outside_images(sequence: Sequence, count: int, again: Callable[[int], int]) -> int:
    """`outside_images` for a number of tokens."""
    if sequence.group.request.images:
        while (inside := sequence.image_begun_at(count)) is not None:
            count = again(inside)
    return count


def cut_for(tree: PrefixTree, match: Match, sequence: Sequence) -> Match:
    """Like `cut_back`, to a position where a hit of the sequence may end."""

    def again(most: int) -> Match:
        count = most // tree.block_size
        return cut_back(tree, Match(match.node, count, count * tree.block_size))

    return outside_images(sequence, cut_back(tree, match), again)


def cut_back(tree: PrefixTree, match: Match) -> Match:
    """Cut a match back to the last whole block after which a request can continue: one that has the side blocks needed
    there."""
    pool, node = tree.pool, match.node
    if node is None:
        return match
    assert isinstance(pool, GroupedPool)
    count = pool.longest_resumable(_Path(node), match.num_blocks)
    return Match(node, count, count * tree.block_size)


def cut_again_for(tree: PrefixTree, hit: Hit, sequence: Sequence) -> Match:
    """Like `cut_again`, to a position where a hit of the sequence may end."""
    found = cut_again(tree, hit)
    return cut_for(tree, found, sequence) if sequence.group.request.images else found


def num_read(pool: GroupedPool, match: Match) -> int:
    """Return how many of the blocks in the window at the end of a match are held in the window of a table already.
    Attaching the match takes no free memory for their window blocks."""
    assert match.node is not None
    path, first = _Path(match.node), pool.first_seen(match.num_tokens)
    return sum(pool.is_read(path[index]) for index in range(match.num_blocks - 1, first - 1, -1))


def cut_again(tree: PrefixTree, hit: Hit) -> Match:
    """Update a hit that a group kept from an earlier lookup: return what `cut_back` returns for `hit.whole` now. The
    tree must still hold the match; only side blocks were evicted or added since.

    Checks the window before the old end, and the positions around blocks that gained side blocks. More of the prompt is
    searched only if the old end is lost, or if the pool no longer remembers all gains.
    """
    pool, node, most = tree.pool, hit.whole.node, hit.whole.num_blocks
    if node is None:
        return hit.match
    assert isinstance(pool, GroupedPool)
    gains = pool.gains_since(hit.version[1])
    if gains is None:
        return cut_back(tree, hit.whole)
    path = _Path(node)
    best = pool.longest_resumable(path, hit.match.num_blocks)
    for count, block in gains:
        last = min(count + pool.blocks_in_window, most)  # up to here, tokens see its window blocks
        if count <= most and best < last and path[count - 1] == block:
            best = max(best, pool.longest_resumable(path, last, max(best, count - 1)))
    return Match(node, best, best * tree.block_size)
