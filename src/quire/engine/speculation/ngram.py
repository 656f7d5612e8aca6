"""N-gram drafts (prompt lookup): a draft is copied from the position after the last earlier occurrence of the
sequence's last n-gram."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

import numpy as np

from quire.config.speculation import SpeculationConfig
from quire.engine.speculation.draft_length import (
    NO_DRAFT,
    Bools,
    Chances,
    DraftLength,
    DraftLengths,
    Experience,
    Floats,
)
from quire.engine.speculation.ngram_index import NOWHERE, Longs, NgramIndexes
from quire.engine.speculation.proposer import FOREVER, NO_PROPOSER, DraftProposer
from quire.engine.speculation.storage import SlotTable
from quire.types.request import Submit
from quire.types.step import Ints

_NO_GUESS = -1
_NEVER = -1
_NO_SLOT = -1
_PRIORS = (0.2, 0.8)  # the prior chance of a guess after a wrong or missing guess, and after a right one
_OWN_FORGETS, _ALL_FORGETS = (0.8, 0.9), (0.99, 0.99)
_PRIOR_WEIGHT = 4.0  # the number of guesses that a prior counts for
_COMMON_WEIGHTS = (1.0, 2.0)  # how many of a sequence's own guesses the experience of all sequences counts for
_FEW_ROWS = 32  # smaller batches are handled one by one, because numpy calls would cost more


class NgramProposers:
    """Looks up drafts in the tokens of each sequence, for whole batches at once.

    Each sequence has a shadow guess: the first token that a draft would have. Comparing it with the next sampled token
    costs no step, so the proposer notices when a sequence begins to repeat itself without spending drafts on it. While
    the DraftGate forbids drafts, tokens are only stored; they are indexed when drafts are allowed again.

    All guesses of a batch are scored before any draft is chosen, so that each choice uses the results of the whole
    batch.
    """

    def __init__(self, config: SpeculationConfig, depth: int) -> None:
        self.lengths = DraftLengths(depth)
        self._num_tokens = config.num_tokens
        self._slots = SlotTable()
        self._index = NgramIndexes(self._slots, config.lookup_min, config.lookup_max)
        self._common = tuple(Experience(forget) for forget in _ALL_FORGETS)
        self._place = self._slots.column(np.int64, NOWHERE)  # the position that the draft would be copied from
        self._guess = self._slots.column(np.int64, _NO_GUESS)  # the token at that position: the shadow guess
        self._was_right = self._slots.column(np.bool_, False)  # whether the guess before was right
        self._paced_since = self._slots.column(np.int64, _NEVER)  # number of steps when the last paced result came
        # Guesses made, and right ones, with decreasing weights: after a wrong guess, and after a right one.
        self._made = tuple(self._slots.column(np.float64, 0.0) for _ in _PRIORS)
        self._right = tuple(self._slots.column(np.float64, 0.0) for _ in _PRIORS)
        self._abandoned: deque[int] = deque()  # slots of proposers that were not closed; any thread may add one
        self._batch: Sequence[DraftProposer] | None = None  # the tuple observed last ...
        self._batch_slots: Longs = np.empty(0, dtype=np.int64)  # ... and its slots

    @property
    def num_slots(self) -> int:
        """The number of sequences that have a slot."""
        return len(self._slots)

    def begin(self, request: Submit) -> DraftProposer:
        if request.sampling.max_tokens == 1:
            return NO_PROPOSER
        return NgramProposer(self, request.prompt_token_ids)

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        self.lengths.note_step(num_tokens, num_samples, seconds)
        self._index.renew_budget()
        while self._abandoned:
            self.close_slot(self._abandoned.popleft())

    # ---------------------------------------------------------------------------------------------- a whole batch
    def observe(self, proposers: Sequence[DraftProposer], tokens: Ints) -> Sequence[int]:
        slots = self._slots_of(proposers)
        self._paced_since.values[slots] = _NEVER
        if not self.lengths.allows_drafts:
            self._index.store_all(slots, tokens)
            self._guess.values[slots], self._was_right.values[slots] = _NO_GUESS, False
            return ()
        if len(slots) < _FEW_ROWS:
            numbers = slots.tolist()
            for slot, token in zip(numbers, tokens.tolist(), strict=True):
                self.observe_token(slot, token)
            return self._worth_of_few(numbers)
        self._score(slots, tokens)
        self._index.append_all(slots, tokens)
        places = self._index.find_all(slots)
        self._place.values[slots] = places
        (rows,) = np.nonzero(places >= 0)
        guesses, found = np.full(len(slots), _NO_GUESS), slots[rows]
        guesses[rows] = self._index.tokens_at(found, places[rows])
        self._guess.values[slots] = guesses
        self._was_right.values[slots] &= guesses >= 0
        return rows[self._are_worth(found)].tolist() if len(rows) else ()

    def _worth_of_few(self, slots: list[int]) -> list[int]:
        """Return the indices of sequences for which a draft is worth its cost, with at most as many probes as there is
        room for."""
        found, room = [], self.lengths.probe_room
        for place, slot in enumerate(slots):
            num_tokens, is_probe = self.length(slot)
            if num_tokens and (room > 0 or not is_probe):
                found.append(place)
                room -= num_tokens if is_probe else 0
        return found

    def _slots_of(self, proposers: Sequence[DraftProposer]) -> Longs:
        """Return the slots of a batch. For a tuple, they are cached for the next call with the same tuple."""
        if proposers is self._batch:
            return self._batch_slots
        ours = cast("Sequence[NgramProposer]", proposers)
        slots = np.array([each.slot if each.slot >= 0 else each.open() for each in ours], dtype=np.int64)
        if isinstance(proposers, tuple):
            self._batch, self._batch_slots = proposers, slots
        return slots

    def _score(self, slots: Longs, tokens: Ints) -> None:
        """Compare the guesses of a batch with the sampled tokens, and count the correct ones."""
        guesses = self._guess.values[slots]
        (rows,) = np.nonzero(guesses >= 0)
        if not len(rows):
            return
        slots, are_right = slots[rows], guesses[rows] == tokens[rows]
        were_right = self._was_right.values[slots]
        for after, of_kind in enumerate((~were_right, were_right)):
            if of_kind.any():
                chosen, right = slots[of_kind], are_right[of_kind]
                self._made[after].values[chosen] = self._made[after].values[chosen] * _OWN_FORGETS[after] + 1.0
                self._right[after].values[chosen] = self._right[after].values[chosen] * _OWN_FORGETS[after] + right
                self._common[after].add_all(right)
        self._was_right.values[slots] = are_right

    def _are_worth(self, slots: Longs) -> Bools:
        """Return for each of these sequences, which have a guess, whether a draft is worth its cost."""
        were_right = self._was_right.values[slots]
        known = were_right | (self._made[0].values[slots] > 0.0)
        following = self._chances(slots, 1)
        first = np.where(were_right, following, self._chances(slots, 0))
        worth = np.zeros(len(slots), dtype=np.bool_)
        worth[known] = self.lengths.are_worth(first[known], following[known], self._num_tokens)
        return worth

    def _chances(self, slots: Longs, after: int) -> Floats:
        """Return the chance that a guess of each sequence is right, after a wrong guess (0) or a right one (1)."""
        weight, common = _COMMON_WEIGHTS[after], self._common[after].mean(_PRIORS[after], _PRIOR_WEIGHT)
        return (self._right[after].values[slots] + weight * common) / (self._made[after].values[slots] + weight)

    # ------------------------------------------------------------------------------------------------ one sequence
    def open_slot(self, prompt: Sequence[int], outputs: Sequence[int] = ()) -> int:
        """Take a slot for a sequence with these tokens."""
        slot = self._slots.take()
        self._index.open(slot, prompt, outputs)
        return slot

    def close_slot(self, slot: int) -> None:
        self._batch = None
        self._index.close(slot)
        self._slots.give(slot)

    def abandon_slot(self, slot: int) -> None:
        """Close a slot after the next step. Any thread may call it."""
        self._abandoned.append(slot)

    def outputs(self, slot: int) -> list[int]:
        """Return the tokens after the prompt."""
        return self._index.outputs(slot)

    def observe_paced(self, slot: int, tokens: Sequence[int]) -> None:
        """Add the new tokens of a paced sequence."""
        if self._paced_since.cells[slot] != _NEVER:
            self.lengths.note_rounds(self._paced_since.cells[slot])
        self._paced_since.cells[slot] = self.lengths.num_steps
        if self.lengths.allows_drafts:
            for token in tokens:
                self.observe_token(slot, token)
            return
        for token in tokens:
            self._index.store(slot, token)
        self._guess.cells[slot], self._was_right.cells[slot] = _NO_GUESS, False

    def observe_token(self, slot: int, token: int) -> None:
        """Compare the guess with the sampled token, index the token, and guess the next one."""
        guess = self._guess.cells[slot]
        if guess != _NO_GUESS:
            after, is_right = self._was_right.cells[slot], guess == token
            made, right, forget = self._made[after].cells, self._right[after].cells, _OWN_FORGETS[after]
            made[slot] = made[slot] * forget + 1.0
            right[slot] = right[slot] * forget + is_right
            self._common[after].add(is_right=is_right)
            self._was_right.cells[slot] = is_right
        self._index.append(slot, token)
        self.guess(slot)

    def guess(self, slot: int) -> None:
        """Look up the token that may follow a sequence, and keep it as the shadow guess."""
        place = self._place.cells[slot] = self._index.find(slot)
        if place == NOWHERE:
            self._guess.cells[slot], self._was_right.cells[slot] = _NO_GUESS, False
        else:
            self._guess.cells[slot] = self._index.token_at(slot, place)

    def length(self, slot: int, limit: int = FOREVER) -> DraftLength:
        """Return how many of the tokens found are worth verifying. A sequence without any scored guess gets no draft,
        because nothing is known about it yet."""
        after_right = self._was_right.cells[slot]
        if self._guess.cells[slot] == _NO_GUESS or not (after_right or self._made[0].cells[slot] > 0.0):
            return NO_DRAFT
        following = self._chance(slot, 1)
        chances = Chances(following if after_right else self._chance(slot, 0), following)
        return self.lengths.length(chances, min(limit, self._num_tokens))

    def draft(self, slot: int, limit: int) -> tuple[tuple[int, ...], bool]:
        """Return at most `limit` draft tokens, and whether they are a probe."""
        if not self.lengths.allows_drafts:
            return (), False
        if self._index.is_behind(slot):  # tokens came while drafts were not allowed, or only the prompt is there
            self.guess(slot)
        num_tokens, is_probe = self.length(slot, limit)
        if is_probe:
            self.lengths.note_probe(num_tokens)
        return self._index.followed(slot, self._place.cells[slot], num_tokens) if num_tokens else (), is_probe

    def _chance(self, slot: int, after: int) -> float:
        weight, common = _COMMON_WEIGHTS[after], self._common[after].mean(_PRIORS[after], _PRIOR_WEIGHT)
        right: float = self._right[after].cells[slot] + weight * common
        made: float = self._made[after].cells[slot] + weight
        return right / made


class NgramProposer:
    """The DraftProposer of one sequence. It takes a slot when it first observes a token or proposes a draft, so a
    waiting request holds none."""

    __slots__ = ("_is_closed", "_is_probe", "_owner", "_prompt", "slot")
    is_observed = True

    def __init__(self, owner: NgramProposers, prompt: Sequence[int]) -> None:
        self._owner, self._prompt = owner, prompt
        self.slot = _NO_SLOT
        self._is_probe = False  # whether the last proposed draft is a probe
        self._is_closed = False

    def open(self) -> int:
        """Take a slot."""
        assert not self._is_closed, "tokens of a sequence that ended were observed"
        self.slot = self._owner.open_slot(self._prompt)
        return self.slot

    @property
    def num_ahead(self) -> int:
        has_draft = self.slot != _NO_SLOT and self._owner.length(self.slot).num_tokens > 0
        return 0 if has_draft else FOREVER

    def observe(self, tokens: Sequence[int]) -> None:
        self._owner.observe_paced(self.slot if self.slot != _NO_SLOT else self.open(), tokens)

    def propose(self, limit: int) -> tuple[int, ...]:
        slot = self.slot if self.slot != _NO_SLOT else self.open()
        if limit <= 0:
            return ()
        tokens, self._is_probe = self._owner.draft(slot, limit)
        return tokens

    def num_to_draft(self, limit: int) -> int:  # noqa: ARG002 - DraftProposer's signature
        return 0

    def offer(self, tokens: Sequence[int]) -> None:
        raise AssertionError(f"the runtime drafted {len(tokens)} tokens that were not requested")

    def result(self, num_drafted: int, num_accepted: int) -> None:
        self._owner.lengths.note_result(num_drafted, num_accepted, is_probe=self._is_probe)

    def clone(self) -> NgramProposer:
        other = NgramProposer(self._owner, self._prompt)
        if self.slot != _NO_SLOT:
            other.slot = self._owner.open_slot(self._prompt, self._owner.outputs(self.slot))
        return other

    def close(self) -> None:
        slot, self.slot = self.slot, _NO_SLOT
        self._prompt, self._is_closed = (), True
        if slot != _NO_SLOT:
            self._owner.close_slot(slot)

    def __del__(self) -> None:
        if self.slot != _NO_SLOT:
            self._owner.abandon_slot(self.slot)
