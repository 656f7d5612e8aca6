"""Which generating sequence could extend a cached prefix, so that a conversation's next turn finds the answer to the
turn before while that is still being generated."""

from __future__ import annotations

from quire.engine.decoding.group import Sequence
from quire.engine.kvcache.keys import TOKEN_BYTES
from quire.engine.kvcache.prefix_tree import Match, Node


class LiveSuffixIndex:
    """Generating sequences, by the last of their blocks that the prefix tree knows.

    When a lookup stops at that block, the sequence publishes the full blocks it has produced since. Steady decoding
    pays nothing: blocks are published only when somebody looks for them.
    """

    def __init__(self, block_size: int) -> None:
        self._width = block_size * TOKEN_BYTES
        self._places: dict[Sequence, tuple[Node, bytes]] = {}
        # By the last run in the tree, then by what the prompt goes on with, which is less than a block.
        self._sequences: dict[Node, dict[bytes, dict[Sequence, None]]] = {}

    def place(self, sequence: Sequence) -> None:
        """Enter a generating sequence, or enter it anew after it published blocks. Idempotent."""
        node = sequence.table.node
        self.discard(sequence)
        if node is None or node.is_detached:
            return
        rest = sequence.group.prompt[node.end * self._width :]
        if len(rest) < self._width:  # else its prompt is not published yet
            self._places[sequence] = node, rest
            self._sequences.setdefault(node, {}).setdefault(rest, {})[sequence] = None

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
        by_rest = self._sequences[node]
        del by_rest[rest][sequence]
        if not by_rest[rest]:
            del by_rest[rest]
            if not by_rest:
                del self._sequences[node]

    def find(self, match: Match, tokens: bytes) -> list[Sequence]:
        """The sequences that could extend a match of these tokens: their blocks in the tree end where it does, and
        their prompt goes on as the tokens do."""
        node = match.node
        if node is None or node.end != match.num_blocks or (by_rest := self._sequences.get(node)) is None:
            return []
        start = match.num_blocks * self._width
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
        for sequence, (node, _) in self._places.items():
            assert sequence.row is not None
            assert sequence.table.node is node
