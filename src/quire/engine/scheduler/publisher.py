"""Puts the blocks that sequences have computed into the prefix tree, where others find them."""

from __future__ import annotations

from quire.engine.decoding.group import Sequence
from quire.engine.kvcache.keys import TOKEN_BYTES
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefix_tree import Match, PrefixTree
from quire.engine.kvcache.run_history import Owner
from quire.engine.kvcache.table import num_same
from quire.engine.kvcache.tiers.base import Tiers
from quire.engine.scheduler.live_suffixes import LiveSuffixIndex
from quire.engine.scheduler.row_table import RowTable


class Publisher:
    """Publishes full blocks: a prompt's when they are planned, a generating sequence's when somebody looks for them,
    all when a sequence leaves. `tree` is None where nothing is cached."""

    def __init__(self, pool: BlockPool, tree: PrefixTree | None, tiers: Tiers, rows: RowTable, block_size: int) -> None:
        self._pool, self._tree, self._tiers, self._rows = pool, tree, tiers, rows
        self._block_size, self._width = block_size, block_size * TOKEN_BYTES
        self.live = LiveSuffixIndex(block_size)

    def publish(self, sequence: Sequence, *, leaving: bool = False, with_group: bool = False) -> None:
        """See PrefixReuse.publish and publish_group."""
        if self._tree is not None:
            num_tokens = min(sequence.num_computed, sequence.num_tokens)
            if num_tokens // self._block_size > sequence.table.num_cached:
                tokens = sequence.tokens()
                self._publish(self._tree, sequence, tokens, num_tokens, leaving=leaving, with_group=with_group)
                self.live.refresh(sequence)

    def publish_live(self, match: Match, tokens: bytes) -> bool:
        """Publish the blocks of every generating sequence that could extend a match; returns whether there were any."""
        sequences = self.live.find(match, tokens)
        return bool(sequences) and sum([self.publish_running(sequence) for sequence in sequences]) > 0

    def publish_running(self, sequence: Sequence) -> bool:
        """Publish what a running sequence has computed; returns whether there was anything. A step whose result came
        was carried out, so all tokens that have come but the last are computed."""
        table, row, tree = sequence.table, sequence.row, self._tree
        assert row is not None
        assert tree is not None
        num_computed, num_outputs = sequence.num_readable, int(self._rows.counts[row])
        if num_outputs > len(sequence.outputs):  # results of what it computed since
            num_computed = max(num_computed, sequence.group.num_prompt + num_outputs - 1)
        if num_computed // self._block_size <= table.num_cached:
            return False
        table.num_tokens = max(table.num_tokens, num_computed)  # while it runs ahead, that is a block behind
        tokens = sequence.group.prompt + self._rows.output_bytes(row)
        is_published = self._publish(tree, sequence, tokens, num_computed, leaving=False, with_group=False)
        self.live.place(sequence)
        return is_published

    def _publish(
        self,
        tree: PrefixTree,
        sequence: Sequence,
        tokens: bytes,
        num_tokens: int,
        *,
        leaving: bool,
        with_group: bool,
    ) -> bool:
        """Cache the full blocks of the first `num_tokens` tokens; returns whether any are new."""
        table, last = sequence.table, num_tokens // self._block_size
        node, first = table.node, table.num_cached
        if node is None or node.is_detached or last <= first or (table.is_duplicate and not leaving):
            return False
        deepest, count = tree.descend(node, tokens, last)
        if count > first:
            if not leaving:
                same = num_same(tree.path(deepest)[first:count], table.blocks[first:count])
                table.is_duplicate = first + same < count  # another sequence computed the same tokens, and was first
                count = first + same
            if count > first:
                table.advance(tree.node_at(deepest, count))
                first = count
            if table.is_duplicate and not leaving:
                return False
        fresh, width = self._pool.num_unshared(table.blocks[first:last]), self._width
        if with_group and fresh < last - first:
            fresh = self._num_own(sequence, first, last, leaving=leaving)
        if not fresh:
            return False
        assert table.node is not None
        published = tokens[first * width : (first + fresh) * width]
        request = sequence.group.request
        added = table.cache(table.node, published, fresh, Owner(request.request_id, request.tenant))
        self._tiers.on_publish(added, len(added.blocks) - fresh)
        return True

    def _num_own(self, sequence: Sequence, first: int, last: int, *, leaving: bool) -> int:
        """How many blocks from `first` on only a sequence holds, and others of its group that publish them now too: any
        other holder would not hold the way to a block."""
        blocks, size = sequence.table.blocks, self._block_size
        others = [each for each in sequence.group.live if each is not sequence]
        for index in range(first, last):
            holders = 1 + sum(
                blocks[index] in each.table.blocks[index : index + 1]
                for each in others
                if (leaving or not each.table.is_duplicate)
                and min(each.num_computed, each.num_tokens) >= (index + 1) * size
            )
            if self._pool.holders(blocks[index]) != holders:
                return index - first
        return last - first
