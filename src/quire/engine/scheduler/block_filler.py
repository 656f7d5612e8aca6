"""Fills new blocks of a sequence with content that exists elsewhere: the first tokens of a cached block, or a slot of a
tier. PrefixReuse calls it on admission."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from quire.engine.decoding.group import Sequence
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefix_tree import Match, PrefixTree
from quire.engine.kvcache.tiers.base import TierHit
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.types.step import BlockCopy
from quire.types.transfer import SlotMove


class BlockFiller:
    """Takes blocks for a sequence that is admitted, and adds the copies and loads that fill them to the current plan.

    `tree` is None if the prefix cache is off.
    """

    def __init__(self, pool: BlockPool, tree: PrefixTree | None, block_size: int) -> None:
        self._pool, self._tree, self._block_size = pool, tree, block_size

    def copy_partials(self, matches: Mapping[Sequence, Match], builder: PlanBuilder) -> None:
        """Extend the tables by copies of the partially matching blocks, while blocks are free."""
        copied = [
            (sequence, match.partial, match.num_tokens, match.closest)
            for sequence, match in matches.items()
            if match.partial is not None and match.closest is not None and sequence.num_computed < match.num_tokens
        ]
        tree = self._tree
        if not copied or tree is None:
            return
        for *_, node in copied:  # taking a block must not evict one that is still to be copied
            tree.lock(node)
        for sequence, partial, num_tokens, _ in copied:
            if self._pool.num_free:
                blocks = self._pool.take(1)
                assert sequence.row is not None
                builder.copy(sequence.row, BlockCopy(partial, blocks[0]))
                sequence.table.extend(blocks, num_tokens)
                sequence.num_computed = num_tokens
        for *_, node in copied:
            tree.unlock(node)

    def load(self, sequence: Sequence, hit: TierHit, builder: PlanBuilder) -> Counter[str]:
        """Take a block for each slot of a tier hit, while blocks are free, and load the slot into it. Returns how many
        tokens came from each tier."""
        blocks: list[int] = []
        loaded: Counter[str] = Counter()
        for slot in hit.slots:
            assert slot.key is not None
            length = min(self._block_size, hit.num_tokens - sequence.num_computed)
            if (block := builder.load_target(slot.key)) is not None:
                self._pool.share([block])
            elif (block := self._fresh_block(builder)) is not None:
                builder.load(slot.key, SlotMove(block, slot.number))
                loaded[slot.take_source()] += length
            else:
                break
            blocks.append(block)
            sequence.num_computed += length
        sequence.table.extend(blocks, sequence.num_computed)
        return loaded

    def _fresh_block(self, builder: PlanBuilder) -> int | None:
        """Take a block that the current plan does not copy from: a load may overwrite it before the copy is made."""
        passed: list[int] = []
        fresh: int | None = None
        while fresh is None and self._pool.num_free:
            (block,) = self._pool.take(1)
            if builder.copies_from(block):
                passed.append(block)
            else:
                fresh = block
        self._pool.release(passed)
        return fresh
