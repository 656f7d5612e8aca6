"""Where a sequence said the same before: prompt lookup, as LZ77 compressors find their matches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_LINKS = 16  # earlier places looked at, latest first: bounds the cost of a token that comes again and again
_MULTIPLIER = 0x9E3779B1  # of a multiplicative hash
_MASK = 2**32 - 1
_LEAST_SLOTS = 1 << 10


class Found(NamedTuple):
    """What followed the last tokens when they came before; `matched` of them are the same, up to the longest told."""

    tokens: tuple[int, ...]
    matched: int


class NgramIndex:
    """The tokens of one sequence, found again by their last `shortest` ones. A token costs the same however many there
    are: its n-gram heads a chain of earlier places whose n-grams fall into the same slot."""

    def __init__(self, tokens: Sequence[int], shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._tokens = array("i", tokens)
        self._heads = array("i")  # slot -> where the latest n-gram of that slot ended, -1: nowhere
        self._earlier = array("i")  # place -> the one before it in the same slot
        self._build(_LEAST_SLOTS)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence grew."""
        if len(self._tokens) + len(tokens) > len(self._heads):
            self._tokens.extend(tokens)
            self._build(2 * len(self._heads))
            return
        for token in tokens:
            self._earlier.append(self._enter(len(self._tokens)))
            self._tokens.append(token)

    def find(self, limit: int) -> Found | None:
        """Up to `limit` tokens that followed the longest match, the latest among equals; a match that reaches to the
        end goes on in its own words."""
        place, best, longest = self._chain_of_last(), 0, 0
        for _ in range(_LINKS):
            if place < 0:
                break
            matched = self._matched(place)
            if matched > longest:
                best, longest = place, matched
                if matched == self._longest:
                    break
            place = self._earlier[place]
        if longest < self._shortest:
            return None
        followed = self._tokens[best : best + limit]
        period = len(self._tokens) - best
        if period < limit:
            followed = array("i", (followed[i % period] for i in range(limit)))
        return Found(tuple(followed), longest)

    def clone(self) -> NgramIndex:
        other = object.__new__(NgramIndex)
        other._shortest, other._longest = self._shortest, self._longest
        other._tokens, other._heads, other._earlier = self._tokens[:], self._heads[:], self._earlier[:]
        return other

    def check(self) -> None:
        """Every place but the last is in the chain of its slot, and chains lead back."""
        assert len(self._tokens) == len(self._earlier)
        for place in range(self._shortest, len(self._tokens)):
            reached = self._heads[self._slot(place)]
            while reached > place:
                assert self._earlier[reached] < reached
                reached = self._earlier[reached]
            assert reached == place

    # ------------------------------------------------------------------------------------------------ the chains
    def _build(self, least: int) -> None:
        """Enter all places at once into a table with more slots than tokens."""
        count, size = len(self._tokens), least
        while size < 2 * count:
            size *= 2
        heads = np.full(size, -1, dtype=np.int32)
        earlier = np.full(count, -1, dtype=np.int32)
        places = np.arange(self._shortest, count, dtype=np.int32)  # a place is the token after its n-gram
        if len(places):
            tokens = np.frombuffer(self._tokens, dtype=np.int32).astype(np.uint32)
            keys = np.zeros(len(places), dtype=np.uint32)
            for offset in range(self._shortest):
                keys = keys * np.uint32(_MULTIPLIER) + tokens[offset : offset + len(places)]
            slots = (keys ^ (keys >> np.uint32(15))) & np.uint32(size - 1)
            order = np.argsort(slots, kind="stable")
            same = slots[order][1:] == slots[order][:-1]
            earlier[places[order[1:]][same]] = places[order[:-1]][same]
            heads[slots] = places  # the last of equal slots stays
        self._heads = array("i", heads.tobytes())
        self._earlier = array("i", earlier.tobytes())

    def _enter(self, place: int) -> int:
        """A token comes to `place`: it heads the chain of what stands before it. Returns who did so far."""
        if place < self._shortest:
            return -1
        slot = self._slot(place)
        last = self._heads[slot]
        self._heads[slot] = place
        return last

    def _slot(self, place: int) -> int:
        """Where the n-gram that ends before `place` is filed."""
        key = 0
        for token in self._tokens[place - self._shortest : place]:
            key = (key * _MULTIPLIER + token) & _MASK
        return (key ^ (key >> 15)) & (len(self._heads) - 1)

    def _chain_of_last(self) -> int:
        count = len(self._tokens)
        return self._heads[self._slot(count)] if count >= self._shortest else -1

    def _matched(self, place: int) -> int:
        """How many tokens before `place` are the last tokens of all, up to the longest match that is told."""
        tokens, end, count = self._tokens, len(self._tokens), 0
        most = min(self._longest, place)
        while count < most and tokens[place - 1 - count] == tokens[end - 1 - count]:
            count += 1
        return count
