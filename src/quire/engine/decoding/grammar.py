"""The protocols of guided decoding: Matcher, Compilation and Grammars. GrammarCompiler implements them with
llguidance."""

from __future__ import annotations

from typing import NoReturn, Protocol

from quire.types.errors import InvalidRequest, QuireError
from quire.types.sampling import TokenRules
from quire.types.step import Bits

_LOOK_SECONDS = 0.01


class GrammarError(QuireError):
    """A grammar could not be compiled, or exceeded its limits during decoding. Only its request ends."""


class Matcher(Protocol):
    """The position of one sequence in its grammar. Belongs to that sequence; not thread-safe.

    An end token of the request (eos or a stop token) is allowed where the grammar may end; elsewhere only if it is also
    text that the grammar allows. With ignore_eos no eos token is ever allowed.
    """

    def mask(self) -> Bits:
        """Return the bitmask of allowed next tokens: [words], read-only; bit t % 32 of word t // 32. Raises
        GrammarError."""

    def advance(self, token: int) -> bool:
        """Consume a token. Returns False and changes nothing if the grammar does not allow it. Raises GrammarError."""

    def forced(self, limit: int) -> tuple[int, ...]:
        """Return up to `limit` next tokens that the grammar forces; often none. Consumes nothing."""

    @property
    def is_over(self) -> bool:
        """Whether the grammar is complete and no token can follow: the sequence ends without an end token."""

    def clone(self) -> Matcher:
        """Return an independent matcher at the same position, for a fork of the sequence."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` calls of `advance` that returned True."""


class Compilation(Protocol):
    """A grammar that is compiled or being compiled."""

    @property
    def is_ready(self) -> bool:
        """Whether the compilation has succeeded or failed, so that `matcher` returns or raises at once."""

    def matcher(self, rules: TokenRules) -> Matcher:
        """Return a matcher at the start of the grammar. Raises GrammarError if compiling failed or took too long."""


class Grammars(Protocol):
    """Compiles grammars on another thread. Only the engine's thread calls these methods."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens that a mask covers."""

    def compile(self, text: str) -> Compilation:
        """Start to compile a grammar, or return its earlier compilation. Raises InvalidRequest without a vocabulary."""

    def wait(self, seconds: float) -> None:
        """Wait until a compilation becomes ready, at most `seconds`."""

    def close(self) -> None:
        """Drop all grammars. Idempotent."""


class NoGrammars:
    """The Grammars of an engine without a vocabulary: refuses all grammars."""

    vocab_size = 0

    def compile(self, text: str) -> NoReturn:  # noqa: ARG002
        raise InvalidRequest("structured_outputs", "needs text, but this engine has no tokenizer", "leave it out")

    def wait(self, seconds: float) -> None:
        """Do nothing: nothing is ever being compiled."""

    def close(self) -> None:
        """Do nothing."""


class SynchronousGrammars:
    """Wraps another Grammars so that `compile` returns only when the compilation has ended. Engines that receive the
    same requests then plan the same steps, independent of how long compiling takes."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars, self.vocab_size = grammars, grammars.vocab_size

    def compile(self, text: str) -> Compilation:
        compilation = self._grammars.compile(text)
        while not compilation.is_ready:
            self._grammars.wait(_LOOK_SECONDS)
        return compilation

    def wait(self, seconds: float) -> None:
        self._grammars.wait(seconds)

    def close(self) -> None:
        self._grammars.close()
