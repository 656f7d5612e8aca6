"""Sequences that generate, by where their blocks in the prefix tree end: what they say is found while they speak."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial

from quire.engine.decoding.group import Sequence
from quire.engine.kvcache.prefixes import Match, Prefixes
from quire.engine.kvcache.radix import Node
from quire.engine.scheduler.rows import RowBook

End = Node | tuple[str, int]  # the deepest of a sequence's blocks that the tree knows; if none, salt and first token
Place = tuple[End, tuple[int, ...]]  # and what the prompt goes on with: who looks for other tokens finds nothing there


class Speakers:
    """Has a sequence leave its full blocks when a search ends where it could go on with them. So every block enters
    the tree once, and while nobody looks, nothing is done.

    A step whose result came was carried out, so all but the last of a sequence's known tokens are computed.
    """

    def __init__(self, prefixes: Prefixes, rows: RowBook, block_size: int) -> None:
        self._prefixes, self._rows, self._block_size = prefixes, rows, block_size
        self._places: dict[Sequence, Place] = {}
        self._speakers: defaultdict[Place, dict[Sequence, None]] = defaultdict(dict)
        self._lengths: defaultdict[End, Counter[int]] = defaultdict(Counter)  # of prompts' rests, by how many have it

    def place(self, sequence: Sequence) -> None:
        """A seated sequence generates, or has left more of what it said. Idempotent."""
        node = sequence.table.trail
        if node is None:
            return
        end = node if node.depth else self._beginning(sequence)
        rest = sequence.group.request.prompt_token_ids[node.depth * self._block_size :]
        if self._places.get(sequence) != (end, rest):
            self.discard(sequence)
            self._places[sequence] = end, rest
            self._speakers[end, rest][sequence] = None
            self._lengths[end][len(rest)] += 1

    def discard(self, sequence: Sequence) -> None:
        """It is not asked any longer. Idempotent."""
        place = self._places.pop(sequence, None)
        if place is None:
            return
        end, rest = place
        speakers, lengths = self._speakers[place], self._lengths[end]
        del speakers[sequence]
        lengths[len(rest)] -= 1
        if not speakers:
            del self._speakers[place]
        if not lengths[len(rest)]:
            del lengths[len(rest)]
        if not lengths:
            del self._lengths[end]

    def leave_at(self, match: Match, sequence: Sequence) -> bool:
        """Those whose blocks end where the search for a sequence's tokens did leave what they have said since; whether
        that was anything."""
        whole = match.num_tokens // self._block_size
        end = match.nodes[whole - 1] if whole else self._beginning(sequence)
        if (lengths := self._lengths.get(end)) is None:
            return False
        begin = whole * self._block_size
        wanted = sequence.known(begin, begin + self._block_size)
        places = [(end, wanted[:length]) for length in lengths if length <= len(wanted)]
        asked = [speaker for place in places for speaker in self._speakers.get(place, ())]
        return sum([self._leave(speaker) for speaker in asked]) > 0

    def _beginning(self, sequence: Sequence) -> tuple[str, int]:
        request = sequence.group.request
        return request.cache_salt, request.prompt_token_ids[0]

    def _leave(self, sequence: Sequence) -> bool:
        """Who cannot leave a full block, because another one left the same, is not asked again."""
        table, trail, row = sequence.table, sequence.table.trail, sequence.row
        assert trail is not None
        assert row is not None
        num_computed = sequence.group.num_prompt + int(self._rows.counts[row]) - 1
        if num_computed // self._block_size <= trail.depth:
            return False
        table.num_tokens = max(table.num_tokens, num_computed)  # who runs ahead counts to its last block's first token
        salt = sequence.group.request.cache_salt
        self._prefixes.keep(table, salt, partial(self._known, sequence, row), num_computed)
        if table.trail is trail:
            self.discard(sequence)
            return False
        self.place(sequence)
        return True

    def _known(self, sequence: Sequence, row: int, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens `start` .. `stop`, of which those that were generated are in the book."""
        prompt = sequence.group.request.prompt_token_ids
        first, last = max(start - len(prompt), 0), max(stop - len(prompt), 0)
        return (*prompt[start:stop], *self._rows.outputs(row, first, last))

    def check(self) -> None:
        assert self._places == {each: place for place, found in self._speakers.items() for each in found}
        assert all(self._speakers.values())
        lengths: defaultdict[End, Counter[int]] = defaultdict(Counter)
        for end, rest in self._places.values():
            lengths[end][len(rest)] += 1
        assert self._lengths == lengths
        for sequence, (end, _) in self._places.items():
            assert sequence.row is not None
            assert sequence.begun
            trail = sequence.table.trail
            assert trail is end or (trail is not None and not trail.depth)
