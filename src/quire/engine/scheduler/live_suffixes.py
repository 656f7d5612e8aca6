"""Which generating sequence could extend a cached prefix, so that a conversation's next turn finds the answer to the
turn before while that is still being generated."""

from __future__ import annotations

from collections import Counter, defaultdict

from quire.engine.decoding.group import Sequence
from quire.engine.kvcache.keys import TOKEN_BYTES
from quire.engine.kvcache.prefix_tree import Match, Node

Place = tuple[Node, bytes]  # the last of a sequence's runs in the prefix tree, and the prompt's tokens after it


class LiveSuffixIndex:
    """Generating sequences, by the last of their blocks that the prefix tree knows.

    When a lookup stops at that block, the sequence publishes the full blocks it has produced since. Steady decoding
    pays nothing: blocks are published only when somebody looks for them.
    """

    def __init__(self, block_size: int) -> None:
        self._width = block_size * TOKEN_BYTES
        self._places: dict[Sequence, Place] = {}
        self._sequences: defaultdict[Place, dict[Sequence, None]] = defaultdict(dict)
        self._lengths: defaultdict[Node, Counter[int]] = defaultdict(Counter)  # of the prompts' ends, by node

    def place(self, sequence: Sequence) -> None:
        """Enter a generating sequence, or enter it anew after it published blocks. Idempotent."""
        node = sequence.table.node
        if node is None or node.is_detached:
            self.discard(sequence)
            return
        rest = sequence.group.prompt[node.end * self._width :]
        place = self._places.get(sequence)
        if place is not None:
            if place[0] is node and place[1] == rest:
                return
            self.discard(sequence)
        if len(rest) < self._width:  # else another table has cached the same prompt, and this one caches no more
            place = node, rest
            self._places[sequence] = place
            self._sequences[place][sequence] = None
            self._lengths[node][len(rest)] += 1

    def refresh(self, sequence: Sequence) -> None:
        """A sequence has published blocks: if it is in the index, it moves behind them."""
        if sequence in self._places:
            self.place(sequence)

    def discard(self, sequence: Sequence) -> None:
        """The sequence generates no more. Idempotent."""
        place = self._places.pop(sequence, None)
        if place is None:
            return
        node, rest = place
        sequences, lengths = self._sequences[place], self._lengths[node]
        del sequences[sequence]
        lengths[len(rest)] -= 1
        if not sequences:
            del self._sequences[place]
        if not lengths[len(rest)]:
            del lengths[len(rest)]
            if not lengths:
                del self._lengths[node]

    def find(self, match: Match, tokens: bytes) -> list[Sequence]:
        """The sequences that could extend a match of these tokens: those whose blocks in the tree end where it does, and
        whose prompt goes on as the tokens do."""
        node = match.node
        if node is None or node.end != match.num_blocks or (lengths := self._lengths.get(node)) is None:
            return []
        start = match.num_blocks * self._width
        wanted = tokens[start : start + self._width]
        places = [(node, wanted[:length]) for length in lengths if length <= len(wanted)]
        return [sequence for place in places for sequence in self._sequences.get(place, ())]

    def check(self) -> None:
        assert self._places == {each: place for place, found in self._sequences.items() for each in found}
        assert all(self._sequences.values())
        lengths: defaultdict[Node, Counter[int]] = defaultdict(Counter)
        for node, rest in self._places.values():
            lengths[node][len(rest)] += 1
        assert self._lengths == lengths
        for sequence, (node, _) in self._places.items():
            assert sequence.row is not None
            assert sequence.table.node is node
