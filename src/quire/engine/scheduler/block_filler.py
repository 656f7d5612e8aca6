"""Fills new blocks of a sequence with content that exists elsewhere: the first tokens of a cached block, or a slot of a
tier. PrefixReuse calls it on admission."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import islice

from quire.engine.decoding.group import Sequence
from quire.engine.kvcache.grouped_pool import GroupedPool
from quire.engine.kvcache.grouped_table import GroupedTable
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefix_tree import Match, PrefixTree
from quire.engine.kvcache.tiers.base import TierHit
from quire.engine.kvcache.tiers.host import Slot
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.types.step import BlockCopy
from quire.types.transfer import SlotMove

_OWN = b""  # the name of a block itself among its side blocks


class BlockFiller:
    """Takes blocks for a sequence that is being admitted, and adds the copies and loads that fill them to the current
    plan.

    `tree` is None if the prefix cache is off.
    """

    def __init__(self, pool: BlockPool, tree: PrefixTree | None, block_size: int) -> None:
        self._pool, self._tree, self._block_size = pool, tree, block_size

    def copy_partials(self, matches: Mapping[Sequence, Match], builder: PlanBuilder) -> None:
        """Extend the tables by copies of partially matching blocks, while blocks are free."""
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
                builder.load(slot.key, block, SlotMove(block, slot.number))
                loaded[slot.take_source()] += length
            else:
                break
            blocks.append(block)
            sequence.num_computed += length
        sequence.table.extend(blocks, sequence.num_computed)
        return loaded

    def _fresh_block(self, builder: PlanBuilder) -> int | None:
        """Take a block from which the current plan does not copy, because a load could overwrite it before the copy is
        made."""
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


class GroupedFiller(BlockFiller):
    """A BlockFiller for models with groups of layers. It loads blocks together with their side blocks or not at all,
    because a sequence can continue only where it has them."""

    _pool: GroupedPool

    def load(self, sequence: Sequence, hit: TierHit, builder: PlanBuilder) -> Counter[str]:
        pool, table, loaded = self._pool, sequence.table, Counter[str]()
        assert isinstance(table, GroupedTable)
        first, wanted = len(table.blocks), defaultdict[int, dict[bytes, Slot]](dict)
        for index, slot in enumerate(hit.slots, first):
            wanted[index][_OWN] = slot
        for side in hit.sides:
            wanted[side.place][side.name] = side.slot
        if not self._can_load(first, hit, wanted, builder):
            return loaded
        blocks, first_seen, num_new = list[int](), pool.first_seen(hit.num_tokens), 0
        for index in range(first, hit.num_tokens // self._block_size):
            block = _load_target(wanted[index], builder)
            if block is None:
                block = self._fresh(builder, in_window=index >= first_seen)
                # A block without memory counts for the tier of the next block that has memory.
                num_new += self._block_size
                for slot in islice(wanted[index].values(), 1):
                    loaded[slot.take_source()] += num_new
                    num_new = 0
                self._load(block, (table.blocks, blocks), wanted[index], builder)
            else:
                pool.share([block])
                if index >= first_seen:
                    pool.enter_window([block])
            blocks.append(block)
        table.add_loaded(blocks, hit.num_tokens)
        sequence.num_computed = hit.num_tokens
        return loaded

    def _can_load(
        self, first: int, hit: TierHit, wanted: Mapping[int, Mapping[bytes, Slot]], builder: PlanBuilder
    ) -> bool:
        """Whether there are blocks and slots for a whole hit after `first` blocks. Blocks that the plan loads for
        another sequence must have the side blocks that this one needs."""
        pool, states, first_seen = self._pool, self._pool.states, self._pool.first_seen(hit.num_tokens)
        num_blocks, end = 0, hit.num_tokens // self._block_size
        for index in range(first, end):
            block, is_last = _load_target(wanted[index], builder), index == end - 1
            if block is None:
                num_blocks += pool.num_taken(in_window=index >= first_seen)
                if is_last and states is not None and not states.num_free:
                    return False
            else:
                has_all = index < first_seen or pool.has_windows(block)
                if not has_all or (is_last and states is not None and block not in states):
                    return False
        passed_over = builder.num_copied * pool.num_taken(in_window=True)
        return num_blocks + passed_over <= pool.num_free

    def _fresh(self, builder: PlanBuilder, *, in_window: bool) -> int:
        """Take a block from whose memory the current plan does not copy."""
        pool, passed = self._pool, list[int]()
        while True:
            block = pool.take(1)[0] if in_window else pool.take_bare()
            if not any(builder.copies_from(each) for each in pool.memory_blocks(block)):
                pool.release(passed)
                return block
            passed.append(block)

    def _load(
        self, block: int, above: tuple[list[int], list[int]], wanted: Mapping[bytes, Slot], builder: PlanBuilder
    ) -> None:
        """Load a block that was just taken and its side blocks from slots, by their names. `above`: the blocks of the
        sequence before it."""
        pool, states = self._pool, self._pool.states
        targets = {_OWN: block} | dict(pool.sides(block))
        if states is not None and wanted.keys() - targets.keys():
            number = states.take()
            targets |= dict(pool.state_blocks(number))
            path = [*above[0], *above[1], block]
            states.keep(path, len(path), number)
            states.release(number)
        for name, slot in wanted.items():
            assert slot.key is not None
            builder.load(slot.key, block, SlotMove(targets[name], slot.number))


def _load_target(wanted: Mapping[bytes, Slot], builder: PlanBuilder) -> int | None:
    """Return the block for which the current plan loads these slots already, or None."""
    key = next((slot.key for slot in wanted.values()), None)
    return None if key is None else builder.load_target(key)


def make_filler(pool: BlockPool, tree: PrefixTree | None, block_size: int) -> BlockFiller:
    """Return the BlockFiller for a pool."""
    return (GroupedFiller if isinstance(pool, GroupedPool) else BlockFiller)(pool, tree, block_size)
