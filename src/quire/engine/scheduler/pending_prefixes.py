"""Which prompts are being computed, so that nobody computes the same prefix beside them."""

from __future__ import annotations

from quire.engine.decoding.group import Group, Sequence
from quire.engine.kvcache.keys import TOKEN_BYTES, common_bytes
from quire.engine.kvcache.prefix_tree import Match, Node

Place = tuple[Node, bytes]  # the run that a block will follow, and the block's tokens


class PendingPrefixes:
    """The next block of every prompt that is being computed, by the run of the prefix tree that it will follow.

    A waiting group whose own next block is one of them waits until the other group has published all that the two
    prompts share. Finding that out costs one dictionary lookup, whatever is being computed.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size, self._width = block_size, block_size * TOKEN_BYTES
        self._computing: dict[Place, Sequence] = {}
        self._places: dict[Sequence, Place] = {}
        self._waiting: dict[Sequence, dict[Group, int]] = {}  # for each, the blocks that must be published first
        self._awaited: dict[Group, Sequence] = {}

    def place(self, sequence: Sequence) -> list[Group]:
        """A sequence goes on computing its prompt after the blocks it has published. Returns groups that wait no more."""
        node = sequence.table.node
        if node is None or node.is_detached or sequence.table.is_duplicate:
            return self.remove(sequence)
        start = node.end * self._width
        tokens = sequence.group.prompt[start : start + self._width]
        if len(tokens) < self._width:
            return self.remove(sequence)
        place = node, tokens
        if self._places.get(sequence) != place:
            self._forget_place(sequence)
            if place not in self._computing:  # else somebody computes the same block already
                self._places[sequence] = place
                self._computing[place] = sequence
        return self._wake(sequence, node.end)

    def remove(self, sequence: Sequence) -> list[Group]:
        """A sequence has computed its prompt, or computes it no longer. Returns groups that wait no more. Idempotent."""
        self._forget_place(sequence)
        return self._wake(sequence, None)

    def clear(self) -> list[Group]:
        """Nothing that is being computed will be found. Returns the groups that waited."""
        woken = list(self._awaited)
        for held in (self._computing, self._places, self._waiting, self._awaited):
            held.clear()
        return woken

    def find(self, group: Group, match: Match, limit: int) -> Sequence | None:
        """The sequence that computes the block which `group` would compute first; the group waits for it from now on.

        `match` is what is cached of the first `limit` tokens of its prompt, which it may share.
        """
        node, start = match.node, match.num_blocks * self._width
        if node is None or node.end != match.num_blocks or (match.num_blocks + 1) * self._block_size > limit:
            return None
        sequence = self._computing.get((node, group.prompt[start : start + self._width]))
        if sequence is None or sequence.group is group:
            return None
        theirs, whole = sequence.group.prompt, limit // self._block_size * self._width
        shared = common_bytes(group.prompt, theirs, 0, min(whole, len(theirs))) // self._width
        self._waiting.setdefault(sequence, {})[group] = shared
        self._awaited[group] = sequence
        return sequence

    def forget(self, group: Group) -> None:
        """A group waits no longer. Idempotent."""
        sequence = self._awaited.pop(group, None)
        if sequence is not None:
            waiting = self._waiting[sequence]
            del waiting[group]
            if not waiting:
                del self._waiting[sequence]

    def _forget_place(self, sequence: Sequence) -> None:
        place = self._places.pop(sequence, None)
        if place is not None:
            del self._computing[place]

    def _wake(self, sequence: Sequence, num_blocks: int | None) -> list[Group]:
        """The groups that waited for no more than `num_blocks` blocks of a sequence; None: for anything of it."""
        waiting = self._waiting.get(sequence)
        if waiting is None:
            return []
        woken = [group for group, shared in waiting.items() if num_blocks is None or shared <= num_blocks]
        for group in woken:
            self.forget(group)
        return woken

    def check(self) -> None:
        assert self._places == {sequence: place for place, sequence in self._computing.items()}
        assert self._awaited == {group: each for each, groups in self._waiting.items() for group in groups}
        assert all(self._waiting.values())
        for sequence in (*self._places, *self._waiting):
            assert sequence.row is not None
