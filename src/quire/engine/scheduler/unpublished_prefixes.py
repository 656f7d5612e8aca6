"""Which prompts are computed, or being computed, and not in the prefix tree yet."""

from __future__ import annotations

from quire.engine.decoding.group import Group, Sequence
from quire.engine.kvcache.keys import TOKEN_BYTES, common_bytes
from quire.engine.kvcache.prefix_tree import Match, Node

Place = tuple[Node, bytes]  # the run that a block will follow, and the block's tokens


class UnpublishedPrefixes:
    """The first unpublished block of every running sequence's prompt, by the run of the prefix tree that it will
    follow.

    A lookup that ends there has the sequence publish what it has computed, so a prompt enters the tree only when
    somebody looks for it. A group whose own next block is still being computed waits until the sequence has computed
    all that the two prompts share. Finding that out costs one dictionary lookup, whatever else is being computed.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size, self._width = block_size, block_size * TOKEN_BYTES
        self._sequences: dict[Place, Sequence] = {}
        self._places: dict[Sequence, Place] = {}
        self._waiting: dict[Sequence, dict[Group, int]] = {}  # for each, the blocks that must be computed first
        self._awaited: dict[Group, Sequence] = {}

    def __bool__(self) -> bool:
        """Whether any running sequence has a prompt block that is not published."""
        return bool(self._sequences)

    def place(self, sequence: Sequence) -> None:
        """Enter a sequence, or enter it anew behind the blocks that it has published."""
        node = sequence.table.node
        self._forget_place(sequence)
        if node is None or node.is_detached or sequence.table.is_duplicate:
            return
        start = node.end * self._width
        tokens = sequence.group.prompt[start : start + self._width]
        place = node, tokens
        if len(tokens) == self._width and place not in self._sequences:  # else another computes the same block already
            self._places[sequence] = place
            self._sequences[place] = sequence

    def has(self, node: Node, tokens: bytes) -> bool:
        """Whether a sequence has, or will have, the block of these tokens that follows a node's run."""
        return (node, tokens) in self._sequences

    def find(self, match: Match, tokens: bytes, limit: int) -> Sequence | None:
        """The sequence that has, or will have, the block which follows a match of the first `limit` of these tokens."""
        node, count = match.node, match.num_blocks
        if node is None or node.end != count or (count + 1) * self._block_size > limit:
            return None
        return self._sequences.get((node, tokens[count * self._width : (count + 1) * self._width]))

    def remove(self, sequence: Sequence) -> list[Group]:
        """A sequence computes and publishes no more. Returns the groups that waited for it. Idempotent."""
        self._forget_place(sequence)
        return self.wake(sequence, None)

    def clear(self) -> list[Group]:
        """Nothing that is computed will be found. Returns the groups that waited."""
        woken = list(self._awaited)
        for held in (self._sequences, self._places, self._waiting, self._awaited):
            held.clear()
        return woken

    # --------------------------------------------------------------------------------------------------- waiting
    def wait(self, group: Group, sequence: Sequence, limit: int) -> None:
        """A group waits for the blocks that its first `limit` tokens share with a sequence's prompt."""
        theirs, whole = sequence.group.prompt, limit // self._block_size * self._width
        shared = common_bytes(group.prompt, theirs, 0, min(whole, len(theirs))) // self._width
        self._waiting.setdefault(sequence, {})[group] = shared
        self._awaited[group] = sequence

    def is_awaited(self, sequence: Sequence) -> bool:
        """Whether a group waits for a sequence."""
        return sequence in self._waiting

    def wake(self, sequence: Sequence, num_blocks: int | None) -> list[Group]:
        """A sequence has computed so many blocks, or None: all of its prompt. Returns the groups that wait no more."""
        waiting = self._waiting.get(sequence)
        if waiting is None:
            return []
        woken = [group for group, shared in waiting.items() if num_blocks is None or shared <= num_blocks]
        for group in woken:
            self.forget(group)
        return woken

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
            del self._sequences[place]

    def check(self) -> None:
        assert self._places == {sequence: place for place, sequence in self._sequences.items()}
        assert self._awaited == {group: each for each, groups in self._waiting.items() for group in groups}
        assert all(self._waiting.values())
        for sequence in (*self._places, *self._waiting):
            assert sequence.row is not None
