"""N-gram drafts in plain Python, one sequence at a time: what the arrays over slots must come to."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.speculation import SpeculationConfig
from quire.engine.speculation.draft_length import Chances, DraftLengths, Experience
from quire.engine.speculation.proposer import DraftProposer, DraftProposers
from quire.types.request import Submit
from quire.types.step import Ints

LINKS = 16


class PlainProposers:
    """All that sequences share."""

    def __init__(self, config: SpeculationConfig, depth: int) -> None:
        self.config, self.lengths = config, DraftLengths(depth)
        self.common = (Experience(0.99), Experience(0.99))


class PlainProposer:
    """One sequence. N-grams that share a bucket of the hash table are told apart only by their tokens, so a common one
    can hide a rare one, as it does in the arrays."""

    def __init__(self, owner: PlainProposers, tokens: Sequence[int]) -> None:
        self.owner, self.tokens, self.places = owner, list[int](), dict[int, list[int]]()
        self.num_buckets = 1_024
        while self.num_buckets < 2 * len(tokens):
            self.num_buckets *= 2
        self.own = (Experience(0.8), Experience(0.9))
        self.place: int | None = None  # where the guess is copied from
        self.was_right = self.is_probe = False
        self.paced_since: int | None = None
        for token in tokens:
            self._append(token)

    def observe_ahead(self, token: int) -> None:
        self.paced_since = None
        self._observe(token)

    def observe_paced(self, tokens: Sequence[int]) -> None:
        if self.paced_since is not None:
            self.owner.lengths.note_rounds(self.paced_since)
        self.paced_since = self.owner.lengths.num_steps
        for token in tokens:
            self._observe(token)

    def length(self, limit: int) -> tuple[int, bool]:
        if self.place is None or not (self.was_right or self.own[0].has_any):
            return 0, False
        chances = Chances(self._chance(self.was_right), self._chance(True))
        return self.owner.lengths.length(chances, min(limit, self.owner.config.num_tokens))

    def propose(self, limit: int) -> tuple[int, ...]:
        if limit <= 0 or not self.owner.lengths.allows_drafts:
            return ()
        if self.place is None:  # it was not looked up while drafts were not allowed
            self._guess()
        length, self.is_probe = self.length(limit)
        if self.is_probe:
            self.owner.lengths.note_probe(length)
        grown = list(self.tokens)
        for offset in range(length):
            assert self.place is not None
            grown.append(grown[self.place + offset])
        return tuple(grown[len(self.tokens) :])

    def result(self, num_drafted: int, num_accepted: int) -> None:
        self.owner.lengths.note_result(num_drafted, num_accepted, is_probe=self.is_probe)

    def _observe(self, token: int) -> None:
        allows = self.owner.lengths.allows_drafts
        if self.place is not None and allows:
            is_right = self.tokens[self.place] == token
            for guesses in (self.own, self.owner.common):
                guesses[self.was_right].add(is_right=is_right)
            self.was_right = is_right
        self._append(token)
        self.place = None
        if allows:
            self._guess()
        else:
            self.was_right = False

    def _append(self, token: int) -> None:
        if len(self.tokens) == self.num_buckets - 1:
            self.num_buckets *= 2
            self.places.clear()
            for place in range(len(self.tokens)):
                self._enter(place)
        self._enter(len(self.tokens))
        self.tokens.append(token)

    def _enter(self, place: int) -> None:
        if place >= self.owner.config.lookup_min:
            self.places.setdefault(self._bucket(place), []).append(place)

    def _bucket(self, place: int) -> int:
        """Of the n-gram before a place."""
        key = 0
        for token in self.tokens[place - self.owner.config.lookup_min : place]:
            key = (key * 0x9E3779B1 + token) % 2**32
        return (key ^ (key >> 15)) % self.num_buckets

    def _guess(self) -> None:
        config, longest, self.place = self.owner.config, 0, None
        end = len(self.tokens)
        found = self.places.get(self._bucket(end), []) if end >= config.lookup_min else []
        for place in found[-LINKS:][::-1]:
            count = 0
            while count < min(config.lookup_max, place) and self.tokens[place - 1 - count] == self.tokens[-1 - count]:
                count += 1
            if count > max(longest, config.lookup_min - 1):
                longest, self.place = count, place
        self.was_right &= self.place is not None

    def _chance(self, after_right: bool) -> float:
        prior, weight = (0.8, 2.0) if after_right else (0.2, 1.0)
        return self.own[after_right].mean(self.owner.common[after_right].mean(prior, 4.0), weight)


class ComparedProposers:
    """Asks both the proposers under test and plain ones, and asserts that all answers are the same."""

    def __init__(self, tested: DraftProposers, config: SpeculationConfig, depth: int) -> None:
        self.tested, self.plain = tested, PlainProposers(config, depth)
        self.num_returned = self.num_proposed = 0

    def begin(self, request: Submit) -> ComparedProposer:
        return ComparedProposer(self, self.tested.begin(request), PlainProposer(self.plain, request.prompt_token_ids))

    def observe(self, proposers: Sequence[DraftProposer], tokens: Ints) -> Sequence[int]:
        compared = [each for each in proposers if isinstance(each, ComparedProposer)]
        assert len(compared) == len(proposers)
        found = self.tested.observe(tuple(each.tested for each in compared), tokens)
        for each, token in zip(compared, tokens.tolist(), strict=True):
            each.plain.observe_ahead(token)
        expected, room = [], self.plain.lengths.probe_room
        for place, each in enumerate(compared):
            length, is_probe = each.plain.length(10**9)
            if length and (room > 0 or not is_probe):
                expected.append(place)
                room -= length if is_probe else 0
        assert list(found) == expected
        self.num_returned += len(found)
        return found

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        self.tested.note_step(num_tokens, num_samples, seconds)
        self.plain.lengths.note_step(num_tokens, num_samples, seconds)


class ComparedProposer:
    is_observed = True

    def __init__(self, owner: ComparedProposers, tested: DraftProposer, plain: PlainProposer) -> None:
        self.owner, self.tested, self.plain = owner, tested, plain

    @property
    def num_ahead(self) -> int:
        num_ahead = self.tested.num_ahead
        assert (num_ahead == 0) == (self.plain.length(10**9)[0] > 0)
        return num_ahead

    def observe(self, tokens: Sequence[int]) -> None:
        self.tested.observe(tokens)
        self.plain.observe_paced(tokens)

    def propose(self, limit: int) -> tuple[int, ...]:
        draft = self.tested.propose(limit)
        assert draft == self.plain.propose(limit)
        self.owner.num_proposed += len(draft)
        return draft

    def num_to_draft(self, limit: int) -> int:
        return self.tested.num_to_draft(limit)

    def offer(self, tokens: Sequence[int]) -> None:
        self.tested.offer(tokens)

    def result(self, num_drafted: int, num_accepted: int) -> None:
        self.tested.result(num_drafted, num_accepted)
        self.plain.result(num_drafted, num_accepted)

    def clone(self) -> ComparedProposer:
        raise AssertionError("the pretend engine forks nothing")

    def close(self) -> None:
        self.tested.close()
