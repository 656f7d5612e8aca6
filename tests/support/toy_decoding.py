"""Toy grammars and toy guesses for the pretend model, and the answers they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.engine.decoding.grammar import GrammarError, Matcher
from quire.engine.speculation.proposer import FOREVER, NO_PROPOSER, DraftProposer
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.request import Submit
from quire.types.sampling import TokenRules
from quire.types.step import Bits
from toy_model import VOCAB, all_logprobs, digest, next_token

_WORDS = -(-VOCAB // 32)
_SHIFTS = np.arange(VOCAB) % 40


# ------------------------------------------------------------------------------------------------------- grammars
def allowed_after(grammar: str, tokens: Sequence[int], end_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Which tokens a toy grammar allows after `tokens`: about half of all, or only one; ends only now and then."""
    value = digest(tokens, digest([ord(letter) for letter in grammar]))
    allowed = (value >> _SHIFTS) % 2 == 1
    if value % 3 == 0:
        allowed[:] = False
        allowed[value % VOCAB] = True
    ends = list(end_ids)
    allowed[ends] = value % 5 == 0
    if not allowed.any():
        allowed[[token for token in range(VOCAB) if token not in ends][value % 50]] = True
    return allowed


def is_over_after(grammar: str, tokens: Sequence[int]) -> bool:
    return bool(tokens) and digest(tokens, len(grammar)) % 23 == 0


def grammar_answer(
    prompt: Sequence[int], length: int, grammar: str, *, seed: int, index: int = 0, end_ids: Sequence[int] = ()
) -> list[int]:
    """The answer that any correct engine must give under a toy grammar."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.append(next_token([*prompt, *tokens], seed, index, allowed_after(grammar, tokens, end_ids)))
        if tokens[-1] in end_ids or is_over_after(grammar, tokens):
            break
    return tokens


@dataclass
class ToyMatcher:
    """Follows a toy grammar."""

    grammar: str
    end_ids: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)

    def mask(self) -> Bits:
        assert not self.is_over, "an ended grammar was asked what comes next"
        if len(self.tokens) > 4 and self.grammar.startswith("tired"):
            raise GrammarError("the grammar is tired")
        return pack(self._allowed())

    def advance(self, token: int) -> bool:
        if self.is_over or not self._allowed()[token]:
            return False
        self.tokens.append(token)
        return True

    def forced(self, limit: int) -> tuple[int, ...]:
        ahead = ToyMatcher(self.grammar, self.end_ids, list(self.tokens))
        found: list[int] = []
        while len(found) < limit and not ahead.is_over and (choices := np.flatnonzero(ahead._allowed())).size == 1:
            found.append(int(choices[0]))
            ahead.tokens.append(found[-1])
        return tuple(found)

    @property
    def is_over(self) -> bool:
        return is_over_after(self.grammar, self.tokens)

    def clone(self) -> ToyMatcher:
        return ToyMatcher(self.grammar, self.end_ids, list(self.tokens))

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.tokens)
        del self.tokens[len(self.tokens) - num_tokens :]

    def _allowed(self) -> npt.NDArray[np.bool_]:
        return allowed_after(self.grammar, self.tokens, self.end_ids)


def pack(allowed: npt.NDArray[np.bool_]) -> Bits:
    padded = np.zeros(_WORDS * 32, dtype=bool)
    padded[:VOCAB] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


@dataclass
class ToyCompilation:
    text: str
    owner: ToyGrammars
    ready_at: int

    @property
    def is_ready(self) -> bool:
        return self.owner.time >= self.ready_at

    def matcher(self, rules: TokenRules) -> Matcher:
        assert self.is_ready
        if self.text.startswith("bad"):
            raise GrammarError("structured_outputs: the grammar is bad")
        return ToyMatcher(self.text, rules.end_ids)


@dataclass
class ToyGrammars:
    """Compiles a text in as many ticks of `time` as it has letters. Waiting lets time pass."""

    time: int = 0
    num_waits: int = 0
    closed: bool = False
    vocab_size: int = VOCAB

    def compile(self, text: str) -> ToyCompilation:
        if text.startswith("refused"):
            raise InvalidRequest("structured_outputs", "is refused at once")
        return ToyCompilation(text, self, self.time + len(text))

    def wait(self, seconds: float) -> None:
        assert 0 < seconds < 1
        self.num_waits += 1
        self.time += 1

    def close(self) -> None:
        self.closed = True


# -------------------------------------------------------------------------------------------------------- guesses
@dataclass
class ToyProposer:
    """Knows what the model would say without a grammar, and is wrong now and then; runs ahead now and then. One that is
    observed is passed every token while it runs ahead, and asks to be paced now and then."""

    owner: ToyProposers
    seed: int
    index: int
    tokens: list[int]
    offered: tuple[int, ...] = ()
    is_observed: bool = False
    wants_pacing: bool = False
    is_closed: bool = False

    @property
    def num_ahead(self) -> int:
        if self.is_observed:
            return 0 if self.wants_pacing else FOREVER
        return (0, 0, 0, 2, 5)[digest(self.tokens, 3) % 5] if self.owner.may_run_ahead else 0

    def observe(self, tokens: Sequence[int]) -> None:
        assert len(tokens) > 0
        assert not self.is_closed
        self.tokens.extend(tokens)
        self.offered = ()
        self.wants_pacing = digest(self.tokens, 11) % 4 == 0

    def propose(self, limit: int) -> tuple[int, ...]:
        assert limit > 0
        if self.owner.orders:
            return self.offered[:limit]
        count, history, guess = digest(self.tokens, 5) % self.owner.longest, list(self.tokens), []
        for _ in range(count if self.owner.ignores_limit else min(limit, count)):
            history.append(next_token(history, self.seed, self.index))
            guess.append((history[-1] + (digest(history, 7) % 3 == 0)) % VOCAB)
        return tuple(guess)

    def num_to_draft(self, limit: int) -> int:
        assert limit > 0
        count = digest(self.tokens, 9) % (self.owner.longest - 1) if self.owner.orders else 0
        return count if self.owner.ignores_limit else min(limit, count)

    def offer(self, tokens: Sequence[int]) -> None:
        self.offered = tuple(tokens)

    def result(self, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted > 0
        self.owner.num_drafted += num_drafted
        self.owner.num_accepted += num_accepted

    def clone(self) -> ToyProposer:
        return ToyProposer(
            self.owner, self.seed, self.index + 1, list(self.tokens), self.offered, self.is_observed, self.wants_pacing
        )

    def close(self) -> None:
        self.is_closed = True


@dataclass
class ToyProposers:
    """Proposes drafts for requests with a seed of at least 100; on order by the executor, if `orders`."""

    orders: bool = False
    may_run_ahead: bool = True
    observes: bool = False
    longest: int = 5  # drafts have fewer tokens than this
    ignores_limit: bool = False  # drafts may be longer than what was asked for
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0

    def begin(self, request: Submit) -> DraftProposer:
        seed = request.sampling.seed
        if seed is None or seed < 100:
            return NO_PROPOSER
        return ToyProposer(self, seed, 0, list(request.prompt_token_ids), is_observed=self.observes)

    def observe(self, proposers: Sequence[DraftProposer], tokens: npt.NDArray[np.int32]) -> list[int]:
        assert len(proposers) == len(tokens) == len(set(map(id, proposers)))
        for proposer, token in zip(proposers, tokens.tolist(), strict=True):
            proposer.observe([token])
        return [place for place, proposer in enumerate(proposers) if proposer.num_ahead == 0]

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        assert num_tokens > 0
        assert num_samples >= 0
        assert seconds >= 0
        self.num_steps += 1


# ---------------------------------------------------------------------------------------------------------- beams
@dataclass(frozen=True)
class BeamAnswer:
    tokens: tuple[int, ...]
    logprob: float
    score: float


@dataclass(frozen=True)
class BeamQuestion:
    """A beam search over the pretend model."""

    prompt: tuple[int, ...]
    rules: BeamRules
    length: int
    end_ids: tuple[int, ...] = ()
    grammar: str = ""
    stop: str = ""  # of the letters that VOCABULARY gives the tokens

    def ends(self, tokens: tuple[int, ...]) -> bool:
        if tokens[-1] in self.end_ids or len(tokens) >= self.length:
            return True
        if self.grammar and is_over_after(self.grammar, tokens):
            return True
        return bool(self.stop) and self.stop in "".join(letter(token) for token in tokens)

    def logprobs(self, tokens: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Of the candidates; all others are impossible."""
        found = all_logprobs([*self.prompt, *tokens])
        if self.grammar:
            found = np.where(allowed_after(self.grammar, tokens, self.end_ids), found, -np.inf)
        width = self.rules.width
        count = width + max(width, len(self.end_ids)) + (8 if self.stop or self.grammar else 0)
        found[np.argsort(-found, kind="stable")[count:]] = -np.inf
        return found


def letter(token: int) -> str:
    return "" if token == 1 or token >= 90 else chr(97 + token % 26)


def beam_answers(question: BeamQuestion) -> list[BeamAnswer]:
    """What any correct engine must find, best first: all continuations of all beams are looked at, step by step."""
    rules, width = question.rules, question.rules.width
    running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[BeamAnswer] = []
    for length in range(1, question.length + 1):
        totals = np.concatenate([np.float32(total) + question.logprobs(tokens) for tokens, total in running])
        order = [int(place) for place in np.argsort(-totals, kind="stable") if np.isfinite(totals[place])]
        reached = [((*running[place // VOCAB][0], place % VOCAB), float(totals[place])) for place in order]
        for tokens, total in reached[:width]:
            if question.ends(tokens):
                finished.append(BeamAnswer(tokens, total, total / length**rules.length_penalty))
        finished = sorted(finished, key=lambda one: -one.score)[:width]
        running = [(tokens, total) for tokens, total in reached if not question.ends(tokens)][:width]
        if not running or (len(finished) == width and not _may_improve(question, running[0][1], length, finished[-1])):
            break
    return finished


def _may_improve(question: BeamQuestion, best: float, length: int, worst: BeamAnswer) -> bool:
    rules = question.rules
    if rules.early_stopping is True:
        return False
    if rules.early_stopping == "never" and rules.length_penalty > 0:
        length = question.length
    return best / length**rules.length_penalty > worst.score
