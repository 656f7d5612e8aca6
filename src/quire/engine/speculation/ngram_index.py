"""Finds the earlier occurrences of a sequence's last n-gram with hash chains, for one sequence or a whole batch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.engine.speculation.storage import SlotTable, TokenArena
from quire.types.step import Ints

Longs = npt.NDArray[np.int64]

NOWHERE = -1
LINKS = 16  # most earlier places compared, latest first; bounds the cost of frequent n-grams
CATCH_UP_TOKENS = 4096  # most prompt tokens and stored tokens indexed per step
_MULTIPLIER = 0x9E3779B1  # of a multiplicative hash
_MASK = 2**32 - 1
_LEAST_HEADS = 1 << 10


class NgramIndexes:
    """The tokens of many sequences, each in a slot, and for each slot an index of its n-grams of `shortest` tokens.

    A place is the position of a token; its n-gram is the tokens right before it. The index of a slot is a hash table:
    the head of each hash is the latest place whose n-gram has that hash, and a chain links each place to the previous
    one with the same hash. An extent of the arena holds the tokens, chains and heads of a slot, in three parts of the
    same size. The last word of the tokens part is not a token: it holds NOWHERE, so that a batch that follows the chain
    of NOWHERE stays there. A full extent is replaced by one of twice the size.

    A slot that is behind has tokens that are not indexed yet. Nothing is found in it until `catch_up` has indexed them.
    All slots together index at most CATCH_UP_TOKENS per step in this way, so that long prompts make no step slow.
    """

    def __init__(self, slots: SlotTable, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._arena = TokenArena()
        self._prompts: dict[int, Sequence[int]] = {}
        self._budget = CATCH_UP_TOKENS
        self._base = slots.column(np.int64, 0)  # start of the extent
        self._size = slots.column(np.int64, 0)  # number of heads, a power of two
        self._length = slots.column(np.int64, 0)
        self._indexed = slots.column(np.int64, 0)  # places before this one are in their chains
        self._head = slots.column(np.int64, NOWHERE)  # index of the head of the last n-gram; NOWHERE: behind

    def open(self, slot: int, prompt: Sequence[int], outputs: Sequence[int] = ()) -> None:
        """Open a slot with these tokens. The prompt is read when it is indexed, and again when its index grows."""
        self._prompts[slot] = prompt
        count = self._length.cells[slot] = len(prompt) + len(outputs)
        size = _LEAST_HEADS
        while size < 2 * count:
            size *= 2
        self._make_extent(slot, size)
        base = self._base.cells[slot]
        self._arena.words[base + len(prompt) : base + count] = outputs

    def close(self, slot: int) -> None:
        self._arena.free(self._base.cells[slot], 3 * self._size.cells[slot])
        del self._prompts[slot]

    def outputs(self, slot: int) -> list[int]:
        """Return the tokens after the prompt."""
        base = self._base.cells[slot]
        found: list[int] = self._arena.words[base + len(self._prompts[slot]) : base + self._length.cells[slot]].tolist()
        return found

    def renew_budget(self) -> None:
        """Reset the budget of `catch_up` after a step."""
        self._budget = CATCH_UP_TOKENS

    # ---------------------------------------------------------------------------------------------- a whole batch
    def store_all(self, slots: Longs, tokens: Ints) -> None:
        """Append one token to each slot without indexing it."""
        lengths = self._make_room(slots)
        self._arena.words[self._base.values[slots] + lengths] = tokens
        self._length.values[slots] = lengths + 1
        self._head.values[slots] = NOWHERE

    def append_all(self, slots: Longs, tokens: Ints) -> None:
        """Append one token to each slot, and index it unless the slot is behind."""
        lengths = self._make_room(slots)
        words, base = self._arena.words, self._base.values[slots]
        words[base + lengths] = tokens
        self._length.values[slots] = lengths + 1
        heads = self._head.values[slots]
        if heads.min(initial=0) < 0:
            current = heads >= 0
            slots, base, lengths, heads = slots[current], base[current], lengths[current], heads[current]
        words[base + self._size.values[slots] + lengths] = words[heads]
        words[heads] = lengths
        self._indexed.values[slots] = lengths + 1

    def find_all(self, slots: Longs) -> Longs:
        """Return the result of `find` for each slot. Slots that are behind catch up as far as the budget allows."""
        behind = slots[self._indexed.values[slots] < self._length.values[slots]]
        if len(behind):
            self.catch_up(behind.tolist())
        words, base, lengths = self._arena.words, self._base.values[slots], self._length.values[slots]
        sizes, ends = self._size.values[slots], base + lengths
        keys = words[ends - self._shortest].view(np.uint32)
        for offset in range(self._shortest - 1, 0, -1):
            keys *= np.uint32(_MULTIPLIER)
            keys += words[ends - offset].view(np.uint32)
        heads = base + 2 * sizes + ((keys ^ (keys >> np.uint32(15))) & (sizes - 1))
        first = words[heads]
        is_known = (self._indexed.values[slots] == lengths) & (lengths >= self._shortest)
        if not is_known.all():
            heads[~is_known] = first[~is_known] = NOWHERE
        self._head.values[slots] = heads
        found = np.full(len(slots), NOWHERE)
        (rows,) = np.nonzero(first >= 0)
        if len(rows):
            found[rows] = self._best_of(base[rows], sizes[rows], ends[rows], first[rows])
        return found

    def catch_up(self, slots: Sequence[int]) -> None:
        """Index the tokens of these slots that are not indexed yet, in order, as far as the budget allows."""
        starts, counts, taken = [], [], []
        for slot in slots:
            start = self._indexed.cells[slot]
            count = min(self._length.cells[slot] - start, self._budget)
            if count <= 0:
                break
            self._budget -= count
            self._load_prompt(slot, start, start + count)
            self._indexed.cells[slot] = start + count
            starts.append(start)
            counts.append(count)
            taken.append(slot)
        if taken:
            self._enter(np.array(taken), np.array(starts), np.array(counts))

    def tokens_at(self, slots: Longs, places: Longs) -> Ints:
        """Return the token at one place of each slot."""
        return self._arena.words[self._base.values[slots] + places]

    # ------------------------------------------------------------------------------------------------- one sequence
    def is_behind(self, slot: int) -> bool:
        return bool(self._indexed.cells[slot] < self._length.cells[slot])

    def store(self, slot: int, token: int) -> None:
        """Append one token to a slot without indexing it."""
        length = self._length.cells[slot]
        if length == self._size.cells[slot] - 1:
            self._grow(slot)
        self._arena.cells[self._base.cells[slot] + length] = token
        self._length.cells[slot] = length + 1
        self._head.cells[slot] = NOWHERE

    def append(self, slot: int, token: int) -> None:
        """Append one token to a slot, and index it unless the slot is behind."""
        length = self._length.cells[slot]
        if length == self._size.cells[slot] - 1:
            self._grow(slot)
        cells, base, head = self._arena.cells, self._base.cells[slot], self._head.cells[slot]
        cells[base + length] = token
        self._length.cells[slot] = length + 1
        if head >= 0:
            cells[base + self._size.cells[slot] + length] = cells[head]
            cells[head] = length
            self._indexed.cells[slot] = length + 1

    def find(self, slot: int) -> int:
        """Return the place after the longest earlier match of the slot's last tokens, the latest of equal ones; NOWHERE
        if fewer than `shortest` tokens match. Compares at most LINKS places and `longest` tokens of each."""
        if self.is_behind(slot):
            self.catch_up((slot,))
        length = self._length.cells[slot]
        if length < self._shortest or self._indexed.cells[slot] < length:
            self._head.cells[slot] = NOWHERE
            return NOWHERE
        cells, base, size = self._arena.cells, self._base.cells[slot], self._size.cells[slot]
        key, end = 0, base + length
        for address in range(end - self._shortest, end):
            key = (key * _MULTIPLIER + cells[address]) & _MASK
        head = self._head.cells[slot] = base + 2 * size + ((key ^ (key >> 15)) & (size - 1))
        place, best, longest = cells[head], NOWHERE, self._shortest - 1
        for _ in range(LINKS):
            if place < 0:
                break
            matched, most, start = 0, min(self._longest, place), base + place
            while matched < most and cells[start - 1 - matched] == cells[end - 1 - matched]:
                matched += 1
            if matched > longest:
                best, longest = place, matched
                if matched == self._longest:
                    break
            place = cells[base + size + place]
        return best

    def token_at(self, slot: int, place: int) -> int:
        token: int = self._arena.cells[self._base.cells[slot] + place]
        return token

    def followed(self, slot: int, place: int, limit: int) -> tuple[int, ...]:
        """Return `limit` tokens from `place` on. At the end of the sequence, the copy continues with its own first
        tokens."""
        base, length = self._base.cells[slot], self._length.cells[slot]
        found = self._arena.words[base + place : base + min(place + limit, length)].tolist()
        while len(found) < limit:
            found.append(found[len(found) - (length - place)])
        return tuple(found)

    def check(self, slot: int) -> None:
        """Assert that every indexed place is in the chain of its head, and that chains link backwards."""
        cells, base, size = self._arena.cells, self._base.cells[slot], self._size.cells[slot]
        assert 0 <= self._indexed.cells[slot] <= self._length.cells[slot] < size
        assert self._head.cells[slot] < 0 or not self.is_behind(slot)
        for place in range(self._shortest, self._indexed.cells[slot]):
            key = 0
            for address in range(base + place - self._shortest, base + place):
                key = (key * _MULTIPLIER + cells[address]) & _MASK
            reached = cells[base + 2 * size + ((key ^ (key >> 15)) & (size - 1))]
            while reached > place:
                assert cells[base + size + reached] < reached
                reached = cells[base + size + reached]
            assert reached == place

    # ------------------------------------------------------------------------------------------------ the chains
    def _best_of(self, base: Longs, sizes: Longs, ends: Longs, first: Ints) -> Longs:
        """Return the best place of each chain that begins at `first`. Most chains need no second link."""
        matched = self._matched(base, ends, first[:, None])[:, 0]
        found = np.where(matched >= self._shortest, first, NOWHERE)
        (rows,) = np.nonzero(matched < self._longest)
        words, links, chains = self._arena.words, [first[rows]], base[rows] + sizes[rows]
        for _ in range(LINKS - 1):
            following = words[chains + links[-1]]
            if following.max(initial=NOWHERE) < 0:
                break
            links.append(following)
        if len(links) > 1:
            places = np.stack(links, axis=1)  # [rows, links]
            matched = self._matched(base[rows], ends[rows], places)
            best = matched.argmax(axis=1)[:, None]  # the latest among equals
            is_long = np.take_along_axis(matched, best, axis=1) >= self._shortest
            found[rows] = np.where(is_long, np.take_along_axis(places, best, axis=1), NOWHERE)[:, 0]
        return found

    def _matched(self, base: Longs, ends: Longs, places: Ints) -> Longs:  # places: [rows, links]
        """Return how many tokens before each place equal the last tokens of its sequence, at most `longest`."""
        words, starts = self._arena.words, base[:, None] + places
        is_same, matched = np.ones(places.shape, dtype=np.bool_), np.zeros(places.shape, dtype=np.int64)
        for offset in range(1, self._longest + 1):
            is_same &= words[starts - offset] == words[ends - offset][:, None]
            if not is_same.any():
                break
            matched += is_same
        return np.minimum(matched, places)  # memory before the first token belongs to another sequence

    def _enter(self, slots: Longs, starts: Longs, counts: Longs) -> None:
        """Add `counts` places of each slot, from `starts` on, to their chains. All earlier places must be in them."""
        words = self._arena.words
        firsts = np.cumsum(counts) - counts
        places = np.arange(counts.sum()) + np.repeat(starts - firsts, counts)
        base, sizes = np.repeat(self._base.values[slots], counts), np.repeat(self._size.values[slots], counts)
        if starts.min() < self._shortest:
            has_ngram = places >= self._shortest
            places, base, sizes = places[has_ngram], base[has_ngram], sizes[has_ngram]
        keys = np.zeros(len(places), dtype=np.uint32)
        for offset in range(self._shortest, 0, -1):
            keys *= np.uint32(_MULTIPLIER)
            keys += words[base + places - offset].view(np.uint32)
        heads = base + 2 * sizes + ((keys ^ (keys >> np.uint32(15))) & (sizes - 1))
        chains = base + sizes + places
        words[chains] = words[heads]
        count = max(1, len(places))
        ordered = np.sort(heads * count + np.arange(len(places)))  # by head, then by place
        order = ordered % count
        (same,) = np.nonzero(np.diff(ordered // count) == 0)
        words[chains[order[same + 1]]] = places[order[same]]
        words[heads] = places  # the last of equal heads stays

    def _load_prompt(self, slot: int, start: int, stop: int) -> None:
        """Copy the part of the prompt in [start, stop) into the extent."""
        prompt = self._prompts[slot]
        if start < len(prompt):
            part = array("i", prompt[start : min(stop, len(prompt))])
            base = self._base.cells[slot] + start
            self._arena.words[base : base + len(part)] = part

    def _make_extent(self, slot: int, size: int) -> None:
        """Give a slot an empty index of `size` heads."""
        base = self._base.cells[slot] = self._arena.allocate(3 * size)
        self._size.cells[slot], self._indexed.cells[slot], self._head.cells[slot] = size, 0, NOWHERE
        self._arena.words[base + 2 * size : base + 3 * size] = NOWHERE
        self._arena.cells[base + size - 1] = NOWHERE  # read as the chain of NOWHERE

    def _make_room(self, slots: Longs) -> Longs:
        """Make room for one more token in each of these slots. Returns their lengths."""
        lengths = self._length.values[slots]
        is_full = lengths == self._size.values[slots] - 1
        if is_full.any():
            for slot in slots[is_full].tolist():
                self._grow(slot)
        return lengths

    def _grow(self, slot: int) -> None:
        """Double the number of heads of a slot. The slot is behind afterwards, because all its tokens must be indexed
        again."""
        base, size, prompt = self._base.cells[slot], self._size.cells[slot], len(self._prompts[slot])
        self._make_extent(slot, 2 * size)
        words, grown = self._arena.words, self._base.cells[slot]
        words[grown + prompt : grown + size - 1] = words[base + prompt : base + size - 1]
        self._arena.free(base, 3 * size)
