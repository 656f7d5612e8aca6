"""Publishing: computed full blocks of sequences are put into the prefix tree, where other requests find them. Publisher
does this. Two indexes find the running sequence that has more blocks than a lookup found: PromptsInProgress for
prompts, LiveSuffixIndex for generated tokens. PrefixReuse uses all three."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

from quire.engine.decoding.group import Group, Sequence
from quire.engine.kvcache.keys import TOKEN_BYTES, common_bytes
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefix_tree import Match, Node, PrefixTree
from quire.engine.kvcache.run_history import Owner
from quire.engine.kvcache.table import num_same
from quire.engine.kvcache.tiers.base import Tiers
from quire.engine.scheduler.row_table import RowTable

Place = tuple[Node, bytes]  # a run, and the tokens that follow it: those of a block, or the rest of a prompt


class LiveSuffixIndex:
    """Index of the running sequences that generate tokens, by what they have published: the last run of the prefix tree
    that belongs to their tokens, and the tokens of the prompt after that run (less than a block).

    When a lookup ends at that run and its next tokens are the same, the sequence publishes the full blocks that it has
    computed since, and the lookup is repeated. So steady decoding never touches the prefix tree: generated blocks are
    published only when a lookup could use them.
    """

    def __init__(self, block_size: int) -> None:
        self._width = block_size * TOKEN_BYTES
        self._places: dict[Sequence, Place] = {}
        # By the last published run, then by the rest of the prompt after it, which is less than a block.
        self._sequences: dict[Node, dict[bytes, dict[Sequence, None]]] = {}
        self._first_tokens: dict[Place, int] = {}  # how many rests after a run begin with a token, or are empty

    def enter(self, sequence: Sequence) -> None:
        """Add a generating sequence, or update its entry after it published blocks. Idempotent."""
        node, prompt = sequence.table.node, sequence.group.prompt
        if sequence in self._places:
            self.discard(sequence)
        if node is None or node.is_detached or len(prompt) - node.end * self._width >= self._width:
            return  # its prompt is not published yet
        rest = prompt[node.end * self._width :]
        self._places[sequence] = node, rest
        by_rest = self._sequences.setdefault(node, {})
        if rest in by_rest:
            by_rest[rest][sequence] = None
            return
        by_rest[rest] = {sequence: None}
        first = node, rest[:TOKEN_BYTES]
        self._first_tokens[first] = self._first_tokens.get(first, 0) + 1

    def refresh(self, sequence: Sequence) -> None:
        """Update the entry of a sequence that has published blocks, if it is in the index."""
        if sequence in self._places:
            self.enter(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence. Idempotent."""
        place = self._places.pop(sequence, None)
        if place is None:
            return
        node, rest = place
        by_rest = self._sequences[node]
        del by_rest[rest][sequence]
        if by_rest[rest]:
            return
        del by_rest[rest]
        if not by_rest:
            del self._sequences[node]
        first = node, rest[:TOKEN_BYTES]
        self._first_tokens[first] -= 1
        if not self._first_tokens[first]:
            del self._first_tokens[first]

    def find(self, match: Match, tokens: bytes) -> list[Sequence]:
        """Return the sequences that could extend a match of these tokens: their published blocks end where the match
        does, and the rest of their prompt is the same."""
        node, num_blocks, _, _, _ = match
        if node is None or node.end != num_blocks or (by_rest := self._sequences.get(node)) is None:
            return []
        start = num_blocks * self._width
        if b"" not in by_rest and (node, tokens[start : start + TOKEN_BYTES]) not in self._first_tokens:
            return []
        wanted = tokens[start : start + self._width]
        if len(by_rest) < len(wanted) // TOKEN_BYTES:
            rests = [rest for rest in by_rest if wanted.startswith(rest)]
        else:
            rests = [wanted[:end] for end in range(0, len(wanted), TOKEN_BYTES) if wanted[:end] in by_rest]
        return [sequence for rest in rests for sequence in by_rest[rest]]

    def check(self) -> None:
        entered = {s: (node, rest) for node, by in self._sequences.items() for rest, found in by.items() for s in found}
        assert self._places == entered
        assert all(found for by_rest in self._sequences.values() for found in by_rest.values())
        assert all(self._sequences.values())
        rests = [(node, rest) for node, by_rest in self._sequences.items() for rest in by_rest]
        assert self._first_tokens == Counter((node, rest[:TOKEN_BYTES]) for node, rest in rests)
        for sequence, (node, _) in self._places.items():
            assert sequence.row is not None
            assert sequence.table.node is node


class PromptsInProgress:
    """Index of the running sequences whose prompt has a full block that is not in the prefix tree yet, by the run of
    the tree that the block will follow and the tokens of the block. If several sequences compute the same block, only
    the first is listed.

    When a lookup ends at that run and continues with these tokens, as it does for an identical prompt or a common
    prefix, the sequence publishes the blocks that it has computed. So prompts enter the tree only when another request
    looks for them. If the block is still being computed, the group that looks for it waits until the sequence has
    computed all blocks that the two prompts share. A lookup takes constant time.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size, self._width = block_size, block_size * TOKEN_BYTES
        self._sequences: dict[Place, Sequence] = {}
        self._places: dict[Sequence, Place] = {}
        self.waiting: dict[Sequence, dict[Group, int]] = {}  # waiting group -> blocks it needs, by sequence; read-only
        self._awaited: dict[Group, Sequence] = {}  # the sequence that each waiting group waits for

    def __bool__(self) -> bool:
        """Whether any running sequence has a prompt block that is not published."""
        return bool(self._sequences)

    def enter(self, sequence: Sequence) -> None:
        """Add a sequence, or update its entry after it published blocks."""
        table, width, places = sequence.table, self._width, self._places
        node = table.node
        if sequence in places:
            del self._sequences[places.pop(sequence)]
        if node is None or node.is_detached or table.is_duplicate:
            return
        start = node.end * width
        place = node, sequence.group.prompt[start : start + width]
        # False if another sequence computes it.
        if len(place[1]) == width and self._sequences.setdefault(place, sequence) is sequence:
            places[sequence] = place

    def has(self, node: Node, tokens: bytes) -> bool:
        """Whether a running sequence computes the block with these tokens after a run."""
        return (node, tokens) in self._sequences

    def find(self, match: Match, tokens: bytes, limit: int) -> Sequence | None:
        """Return the sequence that computes the block after a match, if that block is within the first `limit`
        tokens."""
        node, count, _, _, _ = match
        if node is None or node.end != count or (count + 1) * self._block_size > limit:
            return None
        start = count * self._width
        return self._sequences.get((node, tokens[start : start + self._width]))

    def remove(self, sequence: Sequence) -> list[Group]:
        """Remove a sequence that loses its row. Returns the groups that waited for it. Idempotent."""
        place = self._places.pop(sequence, None)
        if place is not None:
            del self._sequences[place]
        return self.wake(sequence, None) if sequence in self.waiting else []

    def clear(self) -> list[Group]:
        """Remove everything, because the prefix tree is cleared. Returns the groups that waited."""
        woken = list(self._awaited)
        for held in (self._sequences, self._places, self.waiting, self._awaited):
            held.clear()
        return woken

    # --------------------------------------------------------------------------------------------------- waiting
    def wait(self, group: Group, sequence: Sequence, limit: int) -> None:
        """Let a group wait for the blocks that its first `limit` tokens share with a sequence's prompt."""
        theirs, whole = sequence.group.prompt, limit // self._block_size * self._width
        shared = common_bytes(group.prompt, theirs, 0, min(whole, len(theirs))) // self._width
        self.waiting.setdefault(sequence, {})[group] = shared
        self._awaited[group] = sequence

    def wake(self, sequence: Sequence, num_blocks: int | None) -> list[Group]:
        """Note that a sequence has computed `num_blocks` blocks (None: its whole prompt). Returns the groups that no
        longer need to wait for it."""
        waiting = self.waiting.get(sequence)
        if waiting is None:
            return []
        woken = [group for group, shared in waiting.items() if num_blocks is None or shared <= num_blocks]
        for group in woken:
            self.forget(group)
        return woken

    def forget(self, group: Group) -> None:
        """Remove a waiting group. Idempotent."""
        sequence = self._awaited.pop(group, None)
        if sequence is not None:
            waiting = self.waiting[sequence]
            del waiting[group]
            if not waiting:
                del self.waiting[sequence]

    def check(self) -> None:
        assert self._places == {sequence: place for place, sequence in self._sequences.items()}
        assert self._awaited == {group: each for each, groups in self.waiting.items() for group in groups}
        assert all(self.waiting.values())
        for sequence in (*self._places, *self.waiting):
            assert sequence.row is not None


class Publisher:
    """Puts full blocks of sequences into the prefix tree, when a lookup could use them and when a sequence ends or is
    preempted. `tree` is None if the prefix cache is off."""

    def __init__(self, pool: BlockPool, tree: PrefixTree | None, tiers: Tiers, rows: RowTable, block_size: int) -> None:
        self._pool, self._tree, self._tiers, self._rows = pool, tree, tiers, rows
        self._block_size, self._width = block_size, block_size * TOKEN_BYTES
        self.live, self.in_progress = LiveSuffixIndex(block_size), PromptsInProgress(block_size)
        self.next_owner: Sequence | None = None  # the sequence that computes the block after the last match

    def has_more(self, sequence: Sequence) -> bool:
        """Whether a sequence has computed full blocks that it has not published."""
        return sequence.num_readable // self._block_size > sequence.table.num_cached

    def publish(self, sequence: Sequence, *, leaving: bool = False, with_group: bool = False) -> None:
        """See PrefixReuse.publish_group."""
        if self._tree is not None:
            num_tokens = min(sequence.num_computed, sequence.num_tokens)
            if num_tokens // self._block_size > sequence.table.num_cached:
                tokens = sequence.tokens()
                self.publish_tokens(self._tree, sequence, tokens, num_tokens, leaving=leaving, with_group=with_group)
                self.live.refresh(sequence)

    def publish_last(self, sequence: Sequence, row: int) -> None:
        """Publish the computed full blocks of a sequence that has ended and released `row`; its table is freed next.
        Its copies of blocks that are already cached are released."""
        tree, num_tokens = self._tree, sequence.group.num_prompt + len(sequence.outputs)
        if num_tokens > sequence.num_computed:
            num_tokens = sequence.num_computed
        node = sequence.table.node
        if tree is not None and node is not None and num_tokens // self._block_size > node.end:
            tokens = sequence.group.prompt + self._rows.output_bytes(row)
            self.publish_tokens(tree, sequence, tokens, num_tokens, leaving=True, with_group=False)

    def publish_at(self, match: Match, tokens: bytes, limit: int) -> bool:
        """Publish the blocks of running sequences that could extend a match, within the first `limit` tokens. Returns
        whether any was published."""
        sequence = self.next_owner = self.in_progress.find(match, tokens, limit)
        if sequence is None or not self.has_more(sequence):
            sequences = self.live.find(match, tokens)
            return bool(sequences) and sum([self.publish_running(each) for each in sequences]) > 0
        is_published = self.publish_running(sequence)
        self.in_progress.enter(sequence)
        return is_published

    def publish_running(self, sequence: Sequence) -> bool:
        """Publish the full blocks that a running sequence has computed. Returns whether any block was published. All
        its tokens that have come back, except the last one, were computed by steps that have run."""
        table, row, tree = sequence.table, sequence.row, self._tree
        assert row is not None
        assert tree is not None
        num_computed, num_outputs = sequence.num_readable, self._rows.count_of[row]
        if num_outputs > len(sequence.outputs):  # results have come since
            num_computed = max(num_computed, sequence.group.num_prompt + num_outputs - 1)
        if num_computed // self._block_size <= table.num_cached:
            return False
        table.num_tokens = max(table.num_tokens, num_computed)  # while a sequence runs ahead, this count lags behind
        tokens = sequence.group.prompt + self._rows.output_bytes(row)
        is_published = self.publish_tokens(tree, sequence, tokens, num_computed, leaving=False, with_group=False)
        self.live.enter(sequence)
        return is_published

    def publish_tokens(
        self,
        tree: PrefixTree,
        sequence: Sequence,
        tokens: bytes,
        num_tokens: int,
        *,
        leaving: bool,
        with_group: bool,
    ) -> bool:
        """Publish the full blocks of the first `num_tokens` tokens of a sequence, whose tokens are `tokens`. Returns
        whether any of these blocks is new in the tree. For `leaving` and `with_group`, see
        PrefixReuse.publish_group."""
        table, last, request = sequence.table, num_tokens // self._block_size, sequence.group.request
        node = table.node
        if node is None or node.is_detached or last <= node.end or (table.is_duplicate and not leaving):
            return False
        if sequence.group.held_chunks is not None:
            return False
        first = node.end
        deepest, count = tree.descend(node, tokens, last)
        if count > first:
            if not leaving:
                same = num_same(tree.path(deepest)[first:count], table.blocks[first:count])
                table.is_duplicate = first + same < count  # another sequence published the same tokens first
                count = first + same
            if count > first:
                table.use_cached(tree.node_at(deepest, count))
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
        owner = tuple.__new__(Owner, (request.request_id, request.tenant))
        added = table.cache(table.node, published, fresh, owner)
        self._tiers.on_publish(added, len(added.blocks) - fresh)
        return True

    def _num_own(self, sequence: Sequence, first: int, last: int, *, leaving: bool) -> int:
        """Return how many blocks from `first` on are held only by this sequence and by others of its group that publish
        them now too. A block with any other holder cannot be published, because that holder would not lock the runs
        above it."""
        # For each other sequence: up to where it holds the same blocks.
        blocks, ends = sequence.table.blocks, list[int]()
        for each in sequence.group.live:
            if each is not sequence and (leaving or not each.table.is_duplicate):
                end = min(min(each.num_computed, each.num_tokens) // self._block_size, last)
                ends.append(first + num_same(blocks[first:end], each.table.blocks[first:end]))
        ends.sort()
        for index in range(first, last):
            if self._pool.holders(blocks[index]) != 1 + len(ends) - bisect_right(ends, index):
                return index - first
        return last - first
