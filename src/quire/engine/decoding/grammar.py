"""What an answer must match, as the engine sees it: which tokens may come next, and where a sequence stands."""

from __future__ import annotations

from typing import NoReturn, Protocol

from quire.types.errors import InvalidRequest, QuireError
from quire.types.sampling import TokenRules
from quire.types.step import Bits


class GrammarError(QuireError):
    """A grammar could not be compiled, or went over its limits while it was followed. Ends its request alone."""


class Matcher(Protocol):
    """Where one sequence stands in its grammar. Belongs to that sequence; not thread-safe.

    A token that ends the request (an eos, a stop token) may be chosen where the grammar may end, and nowhere else
    unless it also is text that the grammar allows. With ignore_eos no eos may be chosen at all.
    """

    def mask(self) -> Bits:
        """Which tokens may come next: [words], read-only; bit t % 32 of word t // 32. Raises GrammarError."""

    def advance(self, token: int) -> bool:
        """Take a token in. False: it is not allowed here, and nothing changed. Raises GrammarError."""

    def forced(self, limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that must come next, whatever the model says; often none. Changes nothing."""

    @property
    def is_over(self) -> bool:
        """Nothing can follow but the end: the sequence is finished, without a token that says so."""

    def clone(self) -> Matcher:
        """A matcher at the same place that goes its own way: a fork's."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were taken in."""


class Compilation(Protocol):
    """A grammar that is compiled, or will be."""

    @property
    def is_ready(self) -> bool:
        """Whether `matcher` returns or raises at once. Failed counts as ready."""

    def matcher(self, rules: TokenRules) -> Matcher:
        """A matcher at the start of the grammar. Raises GrammarError if it failed or took too long."""


class Grammars(Protocol):
    """Compiles grammars off the engine's thread, which alone calls these."""

    def compile(self, text: str) -> Compilation:
        """Begin to compile, or find what was compiled before. Raises InvalidRequest where there are no grammars."""

    def wait(self, seconds: float) -> None:
        """Return as soon as a compilation has become ready, and after `seconds` in any case."""

    def close(self) -> None:
        """Forget all. Idempotent."""


class NoGrammars:
    """An engine without a vocabulary: nothing can be compiled."""

    def compile(self, text: str) -> NoReturn:  # noqa: ARG002
        raise InvalidRequest("structured_outputs", "needs text, but this engine has no tokenizer", "leave it out")

    def wait(self, seconds: float) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing is held."""
