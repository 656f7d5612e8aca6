"""Prompt lookup: what followed the last tokens when they came before may follow them again."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.speculation import SpeculationConfig
from quire.engine.decoding.lookahead import NO_LOOKAHEAD, Lookahead
from quire.engine.decoding.lookahead_control import Control, Pace
from quire.engine.decoding.lookahead_index import Found, NgramIndex
from quire.types.request import Submit

# Tokens to run ahead where nothing is found; doubles each time. A look costs the sequence a step that it sits out.
_FIRST_LOOK, _LOOK_AFTER_DRAFT, _LONGEST_LOOK = 16, 8, 256


class NgramLookaheads:
    """Looks up drafts in what each sequence has said so far.

    `runs_ahead`: a sequence that waits for its results loses time, so where nothing is found it runs ahead.
    """

    def __init__(self, config: SpeculationConfig, *, runs_ahead: bool) -> None:
        self._config, self._runs_ahead = config, runs_ahead
        kinds = range(config.lookup_min, config.lookup_max + 1)
        self.control = Control({matched: 1.0 - 0.7 ** (matched - 0.5) for matched in kinds})

    def begin(self, request: Submit) -> Lookahead:
        if request.sampling.max_tokens == 1:
            return NO_LOOKAHEAD
        return NgramLookahead(request.prompt_token_ids, self._config, self.control, runs_ahead=self._runs_ahead)

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        self.control.note_step(num_tokens, num_samples, seconds)


class NgramLookahead:
    """One sequence's drafts. Its tokens are indexed when it is first looked up."""

    def __init__(self, prompt: Sequence[int], config: SpeculationConfig, control: Control, *, runs_ahead: bool) -> None:
        self._prompt, self._config, self._control, self._runs_ahead = prompt, config, control, runs_ahead
        self._index: NgramIndex | None = None
        self._pace = Pace(control, runs_ahead=runs_ahead)
        self._kind = config.lookup_min  # of the draft that is being verified
        self._look = _FIRST_LOOK
        self.num_ahead = _FIRST_LOOK if runs_ahead else 0

    def observe(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)
        self._pace.observe(len(tokens), waited=self.num_ahead == 0)
        if self._runs_ahead:
            self.num_ahead = self._pace.rest or self._looked()

    def propose(self, limit: int) -> tuple[int, ...]:
        found, length = self._find(limit)
        if found is None or not length:
            return ()
        self._kind = found.matched
        return found.tokens[:length]

    def order(self, limit: int) -> int:  # noqa: ARG002 - Lookahead's signature
        return 0

    def offer(self, tokens: Sequence[int]) -> None:
        raise AssertionError(f"{len(tokens)} tokens were drafted that nobody ordered")

    def result(self, num_drafted: int, num_accepted: int) -> None:
        self._pace.result(self._kind, num_drafted, num_accepted)

    def clone(self) -> NgramLookahead:
        other = NgramLookahead(self._prompt, self._config, self._control, runs_ahead=self._runs_ahead)
        other._index = None if self._index is None else self._index.clone()
        return other

    @property
    def _tokens(self) -> NgramIndex:
        if self._index is None:
            self._index = NgramIndex(self._prompt, self._config.lookup_min, self._config.lookup_max)
        return self._index

    def _find(self, limit: int) -> tuple[Found | None, int]:
        """What may follow, and how much of it is worth trying."""
        limit = min(limit, self._config.num_tokens)
        if limit <= 0 or self._pace.rest:
            return None, 0
        found = self._tokens.find(limit)
        if found is None:
            return None, 0
        is_good = found.matched == self._config.lookup_max
        return found, self._pace.length(found.matched, limit, is_good=is_good)

    def _looked(self) -> int:
        """How far to run ahead: not at all where there is a draft."""
        if self._find(self._config.num_tokens)[1]:
            self._look = _LOOK_AFTER_DRAFT
            return 0
        look, self._look = self._look, min(2 * self._look, _LONGEST_LOOK)
        return look
