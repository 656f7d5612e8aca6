"""Compiles grammars on a thread of its own and keeps the last ones."""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.engine.decoding.grammar import Compilation, GrammarError
from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.engine.decoding.grammar_tokens import GrammarTokens, reason_of
from quire.engine.decoding.vocabulary import VocabularySource
from quire.types.sampling import TokenRules

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_KEPT = 64
COMPILE_SECONDS = 20.0  # from the request to the end of its compilation, those before it included
STACK_BYTES = 64 << 20  # far more than the check at the door has, so what passed there cannot overflow here


class GrammarCompiler:
    """The Grammars of an engine with a vocabulary, which is asked for once, when the first grammar comes or at `warm`.

    Its thread is a daemon: what it compiles when the engine closes is dropped. Grammars were checked at the door; one
    that fails here all the same ends its request.
    """

    def __init__(
        self, source: VocabularySource, vocab_size: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source, self._vocab_size, self._clock = source, vocab_size, clock
        self._tokens: GrammarTokens | None = None  # the thread's own
        self._kept: OrderedDict[str, _Compiling] = OrderedDict()
        self._waiting: queue.SimpleQueue[_Compiling | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._news = threading.Event()

    def warm(self) -> None:
        """Load the vocabulary now, in the background."""
        if self._thread is None:
            self._start()

    def compile(self, text: str) -> Compilation:
        found = self._kept.get(text)
        if found is None or found.has_failed:
            found = self._kept[text] = _Compiling(text, self._clock)
            self.warm()
            self._waiting.put(found)
        self._kept.move_to_end(text)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return found

    def wait(self, seconds: float) -> None:
        self._news.wait(seconds)
        self._news.clear()

    def close(self) -> None:
        self._kept.clear()
        self._waiting.put(None)

    def _start(self) -> None:
        usual = threading.stack_size(STACK_BYTES)
        try:
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()
        finally:
            threading.stack_size(usual)

    def _work(self) -> None:
        try:
            self._tokens = GrammarTokens(self._source(), self._vocab_size)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the vocabulary, requests must hear of it
            self._fail_all(f"the vocabulary cannot be used for structured outputs: {error}")
            return
        while (compiling := self._waiting.get()) is not None:
            compiling.run(self._tokens)
            self._news.set()

    def _fail_all(self, reason: str) -> None:
        while (compiling := self._waiting.get()) is not None:
            compiling.fail(reason)
            self._news.set()


class _Compiling:
    """One grammar on its way. The thread runs it; the engine reads it once it is ready."""

    def __init__(self, text: str, clock: Callable[[], float]) -> None:
        self._text, self._clock = text, clock
        self._deadline = clock() + COMPILE_SECONDS
        self._compiled: tuple[GrammarTokens, LLMatcher] | None = None
        self._error = ""

    @property
    def is_ready(self) -> bool:
        return self._compiled is not None or bool(self._error) or self._clock() > self._deadline

    @property
    def has_failed(self) -> bool:
        return self.is_ready and self._compiled is None

    def matcher(self, rules: TokenRules) -> GrammarMatcher:
        if self._compiled is None:
            raise GrammarError(f"structured_outputs: {self._error or 'took too long to compile'}")
        tokens, start = self._compiled
        return GrammarMatcher(tokens, start.deep_copy(), rules.end_ids)

    def run(self, tokens: GrammarTokens) -> None:
        """Compile and find the first mask, which builds most of what later ones need."""
        try:
            start = tokens.begin(self._text)
            if not start.is_error():
                tokens.read_mask(start)
            if start.is_error():
                self.fail(reason_of(start))
            else:
                self._compiled = tokens, start
        except Exception as error:  # noqa: BLE001 - one grammar's fault must not stop the thread
            self.fail(f"cannot be compiled: {error}")

    def fail(self, reason: str) -> None:
        self._error = " ".join(reason.split()) or "cannot be compiled"
