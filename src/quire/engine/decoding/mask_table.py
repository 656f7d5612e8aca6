"""MaskTable: computes masks for GuidedRows with llguidance in threads, while the engine does other work."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.engine.decoding.compiled_grammar import CompiledGrammar, mask_threads
from quire.engine.decoding.grammar import GrammarError, Matcher
from quire.engine.decoding.grammar_matcher import GrammarMatcher, Lexer
from quire.types.step import Bits, Ints

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Flags = npt.NDArray[np.bool_]
FEW = 4  # rows per batch
QUICK_SECONDS = 200e-6  # masks of FEW rows that take less are computed by the engine's thread
FIRST_GUESS = 20e-6  # seconds for a mask, before any was measured
FIRST_WORDS = 64  # first words of a mask; two bits set there show that it allows several tokens


@dataclass(frozen=True, slots=True)
class FilledMasks:
    """The masks of some rows. The mask of a row that has failed or is over allows no token.

    GuidedRows reads `changed`, `over` and `failed`, and later gets the bits of the rows of its step from
    `MaskTable.masks`. The benchmarks read `rows` and `bits`, which are valid until the next `begin`.
    """

    rows: Ints  # [rows]
    bits: Bits  # [rows, words of the vocabulary], read-only; bit t % 32 of word t // 32 is set where t is allowed
    changed: Flags  # [rows], False where the mask equals the row's previous mask
    over: Flags  # [rows], True: the grammar is complete after the token that the row has consumed
    failed: tuple[tuple[int, GrammarError], ...]  # rows without a mask, and why


@dataclass(slots=True)
class _Batch:
    """Masks whose computation was started together. A line is the index of a row in the batch and in the matrix of
    masks."""

    rows: Ints
    matchers: Sequence[Matcher]
    tokens: Sequence[int] | None  # the tokens that the matchers consume first
    over: Flags
    on_engine_thread: Sequence[int] = ()  # lines that `finish` computes one by one, on the engine's thread
    asked: list[tuple[GrammarMatcher, int]] = field(default_factory=list)  # llguidance computes their masks
    forced: list[tuple[int, int]] = field(default_factory=list)  # (line, the only token that is allowed)
    failed: dict[int, GrammarError] = field(default_factory=dict)  # by line
    changed: Flags | None = None
    done: threading.Event | None = None  # None: no thread works on it
    error: Exception | None = None  # a fault of the table, not of a row


class MaskTable:
    """Computes the masks of a batch of rows, and determines which of them differ from these rows' previous masks.

    A separate thread passes the batch to llguidance, which works on it with several threads and without the GIL.
    Between `begin` and `finish` the matchers of the batch belong to the table. The masks equal those of `Matcher.mask`:
    they do not depend on the batch, on threads or on timing.
    """

    def __init__(self, num_rows: int, vocab_size: int, threads: int | None = None) -> None:
        self._words, self._end = -(-vocab_size // 32), vocab_size
        line_words = -(-(vocab_size + 1) // 32)  # llguidance's end token follows the vocabulary
        self._filled: Bits = np.zeros((num_rows, line_words), dtype=np.uint32)  # by line
        self._last: Bits = np.zeros((num_rows, line_words), dtype=np.uint32)  # by row: its previous mask
        self._is_known: Flags = np.zeros(num_rows, dtype=np.bool_)  # by row: whether `_last` holds its mask
        self._line_bytes = line_words * 4
        self._threads = mask_threads() if threads is None else threads
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Ends the thread; called at the latest when the interpreter exits.
        self._end_thread: Callable[[], object] | None = None
        self._batch: _Batch | None = None  # begun, not finished
        self._forgotten: set[int] = set()  # rows that got a new sequence since then
        self._mask_seconds = FIRST_GUESS  # processor time per mask in small batches
        self._is_closed = False

    # ------------------------------------------------------------------------------------------ the engine's thread
    def begin(self, rows: Sequence[int], matchers: Sequence[Matcher], tokens: Sequence[int] | None = None) -> None:
        """Start to compute the next-token masks of these rows, at their matchers' current positions. Returns at once;
        `finish` returns the masks.

        With `tokens`, each matcher first consumes its token, which was sampled under the previous mask and does not end
        the request. Without `tokens`, no matcher may be over.
        """
        if self._is_closed or self._batch is not None:
            raise RuntimeError("the table is closed" if self._is_closed else "the batch before is not finished")
        batch = _Batch(np.array(rows, dtype=np.int32), matchers, tokens, np.zeros(len(rows), dtype=np.bool_))
        if len(matchers) <= FEW and len(matchers) * self._mask_seconds <= QUICK_SECONDS:
            batch.on_engine_thread = range(len(matchers))
        else:
            batch.on_engine_thread = [
                line for line, matcher in enumerate(matchers) if not isinstance(matcher, GrammarMatcher)
            ]
        if len(batch.on_engine_thread) < len(matchers):
            self._hand_over(batch)
        self._batch = batch

    def _hand_over(self, batch: _Batch) -> None:
        """Pass a batch to the table's thread."""
        if batch.tokens is None and len(batch.matchers) > FEW:
            self._split_forced(batch)
        if self._thread is None:
            from llguidance import LLExecutor

            pool = LLExecutor(self._threads)
            self._thread = threading.Thread(target=self._serve, args=(pool,), name="masks", daemon=True)
            self._thread.start()
            # A thread that is inside llguidance when the interpreter exits would crash it.
            self._end_thread = weakref.finalize(self, _end_thread, self._batches, self._thread)
        batch.done = threading.Event()
        self._batches.put(batch)
        time.sleep(0)  # yields the GIL, so that the thread starts now and not when this thread next waits

    def finish(self) -> FilledMasks:
        """Wait for the masks that `begin` started, and return them.

        Masks of matchers other than llguidance's, and those of a few quick rows, are computed here. A row's fault is
        reported in `failed`, not raised.
        """
        batch, self._batch = self._batch, None
        if batch is None:
            batch = _Batch(np.zeros(0, dtype=np.int32), (), None, np.zeros(0, dtype=np.bool_))
        if batch.done is not None:
            batch.done.wait()
        if batch.error is not None:
            raise batch.error
        if batch.on_engine_thread:
            self._compute_each(batch, batch.on_engine_thread)
        if batch.changed is None:
            batch.changed = self._find_changed(batch)
        self._is_known[batch.rows] = True
        if self._forgotten:
            self._is_known[list(self._forgotten)] = False
            self._forgotten.clear()
        bits = self._filled[: len(batch.rows), : self._words]
        bits.setflags(write=False)
        failed = tuple((int(batch.rows[line]), error) for line, error in sorted(batch.failed.items()))
        return FilledMasks(batch.rows, bits, batch.changed, batch.over, failed)

    def masks(self, rows: Ints | npt.NDArray[np.intp]) -> Bits:
        """Return the last masks of these rows: [rows, words of the vocabulary]."""
        first, count = int(rows[0]), len(rows)
        are_neighbours = int(rows[-1]) == first + count - 1 and np.array_equal(rows, np.arange(first, first + count))
        return (self._last[first : first + count] if are_neighbours else self._last[rows])[:, : self._words]

    def forget(self, row: int) -> None:
        """Note that a row has a new sequence: its next mask counts as changed."""
        if self._batch is None:
            self._is_known[row] = False
        else:
            self._forgotten.add(row)

    def close(self) -> None:
        """End the threads; masks being computed are finished first. Idempotent."""
        self._is_closed = True
        if self._end_thread is not None:
            self._end_thread()
            self._thread = None

    def _split_forced(self, batch: _Batch) -> None:
        """Split the batch: matchers that allow a single token, because they are inside a forced run, go to `forced`;
        those whose masks llguidance must compute go to `asked`. May move matchers of `asked` to other lexers, to share
        the work among threads."""
        asked, failed, over = batch.asked, batch.failed, batch.over.tolist()
        for line, matcher in enumerate(batch.matchers):
            if not isinstance(matcher, GrammarMatcher) or over[line] or line in failed:
                continue
            try:
                token = matcher.forced_token()
            except Exception as error:  # noqa: BLE001 - contain the fault: only this request ends
                failed[line] = _as_grammar_error(error)
                continue
            if token is None:
                asked.append((matcher, line))
            else:
                batch.forced.append((line, token))
        by_lexer: defaultdict[Lexer, list[GrammarMatcher]] = defaultdict(list)
        for matcher, _ in asked:
            by_lexer[matcher.lexer].append(matcher)
        followers: defaultdict[CompiledGrammar, dict[Lexer, list[GrammarMatcher]]] = defaultdict(dict)
        for lexer, matchers in by_lexer.items():
            if isinstance(lexer.owner, CompiledGrammar):
                followers[lexer.owner][lexer] = matchers
        for grammar, lexers in followers.items():
            grammar.balance(lexers)

    # ------------------------------------------------------------------------------------------- the table's thread
    def _serve(self, pool: LLExecutor) -> None:
        """Compute batches until the queue ends with None. `pool` is llguidance's thread pool."""
        while (batch := self._batches.get()) is not None:
            try:
                self._work(batch, pool)
            except Exception as error:  # noqa: BLE001 - `finish` raises it
                batch.error = error
            assert batch.done is not None
            batch.done.set()

    def _work(self, batch: _Batch, pool: LLExecutor) -> None:
        if len(batch.matchers) <= FEW:
            self._compute_each(batch, sorted({*range(len(batch.matchers))} - {*batch.on_engine_thread}))
        else:
            self._compute_all(batch, pool)
        if not batch.on_engine_thread:
            batch.changed = self._find_changed(batch)

    def _compute_all(self, batch: _Batch, pool: LLExecutor) -> None:
        if batch.tokens is not None:
            self._consume_tokens(batch, batch.tokens, pool)
            self._split_forced(batch)
        if batch.asked:
            self._compute_in_threads(batch, pool)
        if batch.forced:
            lines, tokens = np.array(batch.forced).T
            self._filled[lines] = 0
            self._filled[lines, tokens >> 5] = np.uint32(1) << (tokens & 31).astype(np.uint32)
        without = [*batch.failed, *np.flatnonzero(batch.over).tolist()]
        self._filled[without] = 0

    def _consume_tokens(self, batch: _Batch, tokens: Sequence[int], pool: LLExecutor) -> None:
        """Let llguidance consume the tokens of all its matchers at once."""
        together: list[tuple[GrammarMatcher, int]] = []
        for line, matcher in enumerate(batch.matchers):
            if isinstance(matcher, GrammarMatcher):
                if matcher.can_consume_in_batch(tokens[line]):
                    together.append((matcher, line))
                else:
                    self._consume_alone(batch, line)
        if not together:
            return
        try:
            are_consumed = pool.consume_token_par([(matcher.state, tokens[line]) for matcher, line in together])
        except Exception:  # noqa: BLE001 - contain the fault: none has consumed its token, so try each alone
            for _, line in together:
                self._consume_alone(batch, line)
            return
        for (matcher, line), is_consumed in zip(together, are_consumed, strict=True):
            try:
                if is_consumed:
                    matcher.note_consumed(tokens[line])
                    if matcher.state.is_stopped():
                        batch.over[line] = matcher.is_over
                else:
                    matcher.undo_failure()
                    self._consume_alone(batch, line)
            except Exception as error:  # noqa: BLE001 - contain the fault: only this request ends
                batch.failed[line] = _as_grammar_error(error)

    def _compute_in_threads(self, batch: _Batch, pool: LLExecutor) -> None:
        """Let llguidance compute masks, ordered by lexer, so that matchers that share a lock are in one thread."""
        by_lexer: defaultdict[Lexer, list[tuple[LLMatcher, int]]] = defaultdict(list)
        for matcher, line in batch.asked:
            matcher.note_mask()
            by_lexer[matcher.lexer].append((matcher.state, line))
        for lexer, followers in by_lexer.items():
            lexer.num_masks += len(followers)
        items = [item for group in by_lexer.values() for item in group]
        try:
            pool.unsafe_compute_mask_ptr(items, self._filled.ctypes.data, self._line_bytes, len(self._filled))
        except Exception:  # noqa: BLE001 - contain the fault: ask each matcher alone
            for _, line in items:
                self._compute_alone(batch, line)
        else:
            self._read_ends(batch)

    def _read_ends(self, batch: _Batch) -> None:
        """Replace llguidance's end token in each mask by the tokens that end the request.

        A line without any token may be a failure, and one with a single token may begin a forced run: their matchers
        are asked for the reason.
        """
        lines = np.array([line for _, line in batch.asked])
        word, bit = divmod(self._end, 32)
        column = self._filled[lines, word]
        may_end = (column >> np.uint32(bit) & np.uint32(1)).astype(np.bool_)
        self._filled[lines, word] = column & np.uint32((1 << bit) - 1)
        is_empty, is_single = self._find_narrow(lines)
        is_single &= ~may_end
        by_ends: dict[tuple[int, ...], list[int]] = {}
        for place in np.flatnonzero(may_end).tolist():
            matcher, line = batch.asked[place]
            by_ends.setdefault(matcher.ends, []).append(line)
        for ends, ending in by_ends.items():
            for token in ends:
                self._filled[ending, token >> 5] |= np.uint32(1 << (token & 31))
        for place in np.flatnonzero(is_empty).tolist():
            matcher, line = batch.asked[place]
            if not matcher.ends or matcher.state.is_error():
                self._compute_alone(batch, line)
        for place in np.flatnonzero(is_single).tolist():
            matcher, line = batch.asked[place]
            try:
                matcher.find_run()
            except Exception:  # noqa: BLE001 - contain the fault: only this request ends
                self._compute_alone(batch, line)

    def _find_narrow(self, lines: npt.NDArray[np.intp]) -> tuple[Flags, Flags]:
        """Return which of these lines allow no token, and which may allow a single one because the bitwise OR of their
        words has a single bit."""
        is_empty, is_single = (np.zeros(len(lines), dtype=np.bool_) for _ in range(2))
        words = np.bitwise_or.reduce(self._filled[lines, :FIRST_WORDS], axis=1)
        narrow = np.flatnonzero((words & (words - np.uint32(1))) == 0)
        if len(narrow):
            words = np.bitwise_or.reduce(self._filled[lines[narrow]], axis=1)
            is_empty[narrow] = words == 0
            is_single[narrow] = (words != 0) & ((words & (words - np.uint32(1))) == 0)
        return is_empty, is_single

    # --------------------------------------------------------------------------------------------------- either one
    def _compute_each(self, batch: _Batch, lines: Sequence[int]) -> None:
        """Compute masks one by one, and note how long they take."""
        began = time.thread_time()
        for line in lines:
            self._consume_alone(batch, line)
            self._compute_alone(batch, line)
        seconds = (time.thread_time() - began) / len(lines)
        # Limit the influence of one slow mask.
        self._mask_seconds += (min(seconds, 4 * self._mask_seconds) - self._mask_seconds) / 8

    def _consume_alone(self, batch: _Batch, line: int) -> None:
        """Let one matcher consume its token, if it has one."""
        if batch.tokens is None:
            return
        matcher, token = batch.matchers[line], batch.tokens[line]
        try:
            if not matcher.advance(token):
                raise GrammarError(f"structured_outputs: token {token} was chosen where the grammar does not allow it")
            batch.over[line] = matcher.is_over
        except Exception as error:  # noqa: BLE001 - contain the fault: only this request ends
            batch.failed[line] = _as_grammar_error(error)

    def _compute_alone(self, batch: _Batch, line: int) -> None:
        """Compute the mask of one row, or note why it has none."""
        if line not in batch.failed and not batch.over[line]:
            try:
                bits = batch.matchers[line].mask()
                if not bits.any():
                    raise GrammarError("structured_outputs: no token can follow, and the answer may not end here")
                self._filled[line, : self._words] = bits
            except Exception as error:  # noqa: BLE001 - contain the fault: only this request ends
                batch.failed[line] = _as_grammar_error(error)
            else:
                return
        self._filled[line] = 0

    def _find_changed(self, batch: _Batch) -> Flags:
        """Return which masks differ from the last ones of their rows, and keep the new ones."""
        rows, count = batch.rows, len(batch.rows)
        if count <= FEW:
            return np.array([self._has_changed(int(row), line) for line, row in enumerate(rows)], dtype=np.bool_)
        first, filled = int(rows[0]), self._filled[:count]
        are_neighbours = np.array_equal(rows, np.arange(first, first + count))
        last = self._last[first : first + count] if are_neighbours else self._last[rows]
        differs: Flags = (filled != last).any(axis=1)
        if differs.all() and are_neighbours:
            last[:] = filled
        else:
            self._last[rows[differs]] = filled[differs]
        return differs | ~self._is_known[rows]

    def _has_changed(self, row: int, line: int) -> bool:
        if self._filled[line].tobytes() == self._last[row].tobytes():  # the fastest comparison for one line
            return not self._is_known[row]
        self._last[row] = self._filled[line]
        return True


def _end_thread(batches: queue.SimpleQueue[_Batch | None], thread: threading.Thread) -> None:
    """Let the table's thread finish its batch, and end it."""
    batches.put(None)
    thread.join()


def _as_grammar_error(error: Exception) -> GrammarError:
    if isinstance(error, GrammarError):
        return error
    return GrammarError(f"structured_outputs: the grammar failed: {error!r}")
