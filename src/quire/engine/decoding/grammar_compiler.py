"""Compiles grammars with llguidance on a separate thread, and keeps the most recently used ones."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable

from quire.engine.decoding.compiled_grammar import CompiledGrammar, mask_threads
from quire.engine.decoding.grammar import Compilation, GrammarError
from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.engine.decoding.grammar_tokens import GrammarTokens
from quire.engine.decoding.native_memory import give_back, native_bytes
from quire.engine.decoding.vocabulary import VocabularySource
from quire.types.sampling import TokenRules

MAX_KEPT = 64
MAX_NATIVE_BYTES = 12 << 20  # native memory of the kept grammars; above it, the least recently used are dropped
WORTH_BYTES = 64 << 10  # dropping a grammar that frees less was in vain: it is small, or requests still use it
MAX_DROPPED_IN_VAIN = 4  # after this many in a row, the growth is not that of grammars
MAX_EXTRA_LEXERS = 32  # of all grammars together, besides the first lexer of each
IDLE_SECONDS = 10.0  # a grammar that was in no batch for this long may lose its extra lexers to another
COMPILE_SECONDS = 20.0  # limit from request to end of compilation, including the wait for earlier ones
VOCABULARY_SECONDS = 40.0  # added to the limit while the tables of the vocabulary are built
STACK_BYTES = 64 << 20  # far more than the grammar checker has, so a checked grammar cannot overflow it
_FIELD = "structured_outputs: "


class GrammarCompiler:
    """The Grammars of an engine with a vocabulary. The vocabulary is loaded once: with the first grammar, or in `warm`.

    Its thread is a daemon: when the engine closes, unfinished compilations are dropped. Grammars were checked before
    they were submitted; if one fails to compile here anyway, its request ends. While no grammar waits, the thread
    compiles additional lexers for grammars that many rows use.
    """

    def __init__(
        self,
        source: VocabularySource,
        vocab_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_lexers: int | None = None,
    ) -> None:
        """`max_lexers`: limit per grammar; more lexers than threads that compute masks are useless."""
        self._source, self.vocab_size, self._clock = source, vocab_size, clock
        self._max_lexers = mask_threads() if max_lexers is None else max_lexers
        self._kept: OrderedDict[str, _Compiling] = OrderedDict()
        self._waiting: queue.SimpleQueue[_Compiling | Callable[[], None] | None] = queue.SimpleQueue()
        # Grammars with extra lexers; only the thread uses it.
        self._grown: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._news = threading.Event()
        self._native_bytes: int | None = None  # in use when the vocabulary was loaded, before the first grammar

    def warm(self) -> None:
        """Load the vocabulary now, in the background."""
        if self._thread is None:
            self._start()

    def compile(self, text: str) -> Compilation:
        found = self._kept.get(text)
        if found is None or found.has_failed:
            seconds = COMPILE_SECONDS if self._native_bytes is not None else COMPILE_SECONDS + VOCABULARY_SECONDS
            found = self._kept[text] = _Compiling(text, self._clock, seconds)
            self.warm()
            self._waiting.put(found)
            self._drop_grown()
        self._kept.move_to_end(text)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return found

    def _drop_grown(self) -> None:
        """Drop the least recently used grammars while all grammars together hold too much native memory. Requests keep
        the grammars they use.

        malloc counts the whole process, including prompts and tables of the engine. How much each drop frees shows
        whether the memory belongs to grammars; if not, it is added to the baseline until it is freed.
        """
        if self._native_bytes is None:
            return
        in_use = native_bytes()
        self._native_bytes = min(self._native_bytes, in_use)
        num_kept, in_vain = len(self._kept), 0
        while len(self._kept) > 1 and in_use - self._native_bytes > MAX_NATIVE_BYTES:
            if in_vain == MAX_DROPPED_IN_VAIN:
                self._native_bytes = in_use - MAX_NATIVE_BYTES // 2
                break
            self._kept.popitem(last=False)
            before, in_use = in_use, native_bytes()
            in_vain = 0 if before - in_use >= WORTH_BYTES else in_vain + 1
        if len(self._kept) < num_kept:
            self._waiting.put(give_back)

    def wait(self, seconds: float) -> None:
        self._news.wait(seconds)
        self._news.clear()

    def close(self) -> None:
        self._kept.clear()
        self._waiting.put(None)

    # -------------------------------------------------------------------------------------- called by a grammar
    def add_lexer(self, grammar: CompiledGrammar) -> None:
        self._waiting.put(lambda: self._add_lexer(grammar))

    def add_slices(self, grammar: CompiledGrammar) -> None:
        self._waiting.put(grammar.add_slices)

    # ----------------------------------------------------------------------------------------------- on the thread
    def _start(self) -> None:
        usual = threading.stack_size(STACK_BYTES)
        try:
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()
        finally:
            threading.stack_size(usual)

    def _work(self) -> None:
        try:
            tokens = GrammarTokens(self._source(), self.vocab_size)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the vocabulary, the requests must get an error
            self._fail_all(f"the vocabulary cannot be used for structured outputs: {error}")
            return
        give_back()  # the memory that building it needed and freed
        self._native_bytes = native_bytes()
        later: deque[Callable[[], None]] = deque()
        while (job := self._waiting.get()) is not None:
            if isinstance(job, _Compiling):
                if not job.has_failed:  # else its requests have ended already; continue with the next job
                    job.run(lambda text: CompiledGrammar(text, tokens, max_lexers=self._max_lexers, builder=self))
                self._news.set()
            else:
                later.append(job)
            while later and self._waiting.empty():
                _try(later.popleft())

    def _fail_all(self, reason: str) -> None:
        while (job := self._waiting.get()) is not None:
            if isinstance(job, _Compiling):
                job.fail(reason)
                self._news.set()

    def _add_lexer(self, grammar: CompiledGrammar) -> None:
        """Compile an additional lexer of a grammar, if there is memory for it or an idle grammar gives up its extra
        ones."""
        grown = sorted((one for one in self._grown if one.num_extra), key=lambda one: one.used_at)
        if sum(one.num_extra for one in grown) >= MAX_EXTRA_LEXERS:
            if time.monotonic() - grown[0].used_at < IDLE_SECONDS:
                return
            grown[0].shrink()
        grammar.add_lexer()
        self._grown.add(grammar)


def _try(job: Callable[[], None]) -> None:
    """Run a job that only makes masks faster. If it fails, the grammar is used without it."""
    try:
        job()
    except Exception:
        logging.getLogger(__name__).debug("a grammar could not be compiled again", exc_info=True)


class _Compiling:
    """The compilation of one grammar. The thread runs it; the engine reads it when it is ready."""

    def __init__(self, text: str, clock: Callable[[], float], seconds: float) -> None:
        self._text, self._clock = text, clock
        self._deadline = clock() + seconds
        self._compiled: CompiledGrammar | None = None
        self._error = ""

    @property
    def is_ready(self) -> bool:
        return self._compiled is not None or bool(self._error) or self._clock() > self._deadline

    @property
    def has_failed(self) -> bool:
        return self.is_ready and self._compiled is None

    def matcher(self, rules: TokenRules) -> GrammarMatcher:
        if self._compiled is None:
            raise GrammarError(f"{_FIELD}{self._error or 'took too long to compile'}")
        return self._compiled.matcher(rules.end_ids)

    def run(self, compile_text: Callable[[str], CompiledGrammar]) -> None:
        try:
            self._compiled = compile_text(self._text)
        except GrammarError as error:
            self.fail(str(error).removeprefix(_FIELD))
        except Exception as error:  # noqa: BLE001 - contain the fault: only this grammar's requests end
            self.fail(f"cannot be compiled: {error}")

    def fail(self, reason: str) -> None:
        self._error = " ".join(reason.split()) or "cannot be compiled"
