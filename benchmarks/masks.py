"""Measures the microseconds of a grammar mask, row by row and in the mask table's threads.

    python -m benchmarks.masks                         # the default model's vocabulary, a minute
    python -m benchmarks.masks --rows 1,256 --threads 4
    python -m benchmarks.masks --model FOLDER          # another model's vocabulary; only its tokenizer is read

Rows follow a grammar at random. At every step the masks of all rows are computed three times: one by one with
llguidance's own slices, one by one with Quire's, and in the table, which also consumes the rows' tokens. `until done`
is the time from the batch's start until all its masks are complete, and `all threads` the processor time of that, both
per mask; `engine` is the processor time of the engine's thread for a whole step, and `consume` what it would
additionally need to consume the tokens itself. The others are processor time per mask. All are medians over the steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.report import facts, publish, save
from benchmarks.schemas import make_schemas
from quire.engine.decoding.compiled_grammar import CompiledGrammar, mask_threads
from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.engine.decoding.grammar_tokens import GrammarTokens
from quire.engine.decoding.mask_table import MaskTable
from quire.engine.decoding.vocabulary import Vocabulary
from quire.runtime.loading.catalogue import DEFAULT
from quire.runtime.loading.progress import silent
from quire.runtime.loading.resolve import resolve_model
from quire.serving.text.structure import Structure, grammar_of
from quire.serving.text.token_table import vocabulary_of
from quire.serving.text.tokenizer import load_tokenizer
from quire.types.step import Bits

TEN_FIELDS = {
    "type": "object",
    "properties": {
        f"field_{place}": [
            {"type": "string", "maxLength": 30},
            {"type": "integer"},
            {"enum": ["red", "green", "blue"]},
        ][place % 3]
        for place in range(10)
    },
    "required": [f"field_{place}" for place in range(10)],
    "additionalProperties": False,
}
EMAIL = r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,6}"
HEADER = ["grammar", "rows", "llguidance's slices", "one by one", "all threads", "until done", "engine", "consume"]


def all_grammars() -> dict[str, list[str]]:
    """Return the measured grammars: for each name, the grammars that its rows follow in turn."""
    schemas = [Structure("json", json.dumps(schema)) for schema in make_schemas(20)]
    return {
        "regex [a-z ]{200,4000}": [grammar_of(Structure("regex", "[a-z ]{200,4000}"))],
        "a JSON schema of ten fields": [grammar_of(Structure("json", json.dumps(TEN_FIELDS)))],
        "20 JSON schemas": [grammar_of(schema) for schema in schemas],
        "an e-mail regex": [grammar_of(Structure("regex", EMAIL))],
    }


class AtOnce:
    """Compiles additional lexers immediately when they are requested, because nothing else is measured meanwhile."""

    def add_lexer(self, grammar: CompiledGrammar) -> None:
        grammar.add_lexer()

    def add_slices(self, grammar: CompiledGrammar) -> None:
        """Do nothing: the grammars measured here have no slices of their own."""


@dataclass(slots=True)
class Times:
    """Seconds, one entry per step."""

    plain: list[float] = field(default_factory=list)  # per mask
    alone: list[float] = field(default_factory=list)  # per mask
    threads: list[float] = field(default_factory=list)  # per mask
    table: list[float] = field(default_factory=list)  # per mask
    engine: list[float] = field(default_factory=list)  # per step
    consume: list[float] = field(default_factory=list)  # per step

    def cells(self) -> list[str]:
        medians = (statistics.median(figures) * 1e6 for figures in (self.plain, self.alone, self.threads, self.table))
        steps = (statistics.median(figures) * 1e6 for figures in (self.engine, self.consume))
        return [*(f"{figure:.1f}" for figure in medians), *(f"{figure:.0f}" for figure in steps)]


class Walk:
    """Rows on random paths through grammars. A row whose grammar is complete starts again."""

    def __init__(
        self, grammars: list[str], num_rows: int, tokens: GrammarTokens, plain: GrammarTokens, threads: int
    ) -> None:
        self.random = random.Random(0)
        self._compiled = [CompiledGrammar(text, tokens, max_lexers=threads, builder=AtOnce()) for text in grammars]
        self._plainly = [CompiledGrammar(text, plain) for text in grammars]
        self.rows = [self._fresh(row) for row in range(num_rows)]
        self._plain_rows = [self._fresh_plain(row) for row in range(num_rows)]

    def _fresh(self, row: int) -> GrammarMatcher:
        return self._compiled[row % len(self._compiled)].matcher(())

    def _fresh_plain(self, row: int) -> GrammarMatcher:
        return self._plainly[row % len(self._plainly)].matcher(())

    def step(self, table: MaskTable, chosen: list[int] | None, times: Times) -> list[int]:
        """Consume the tokens and compute all masks in all ways. Returns the next token of each row."""
        copies = [matcher.clone() for matcher in self.rows]
        for group in (copies, self._plain_rows) if chosen is not None else ():
            began = time.thread_time()
            for matcher, token in zip(group, chosen or (), strict=True):
                matcher.advance(token)
            if group is copies:
                times.consume.append(time.thread_time() - began)
        live = [not matcher.is_over for matcher in copies]

        def in_table() -> None:
            began, spent, all_spent = time.perf_counter(), time.thread_time(), time.process_time()
            table.begin(range(len(self.rows)), self.rows, chosen)
            self._filled = table.finish()
            times.table.append((time.perf_counter() - began) / len(self.rows))
            times.engine.append(time.thread_time() - spent)
            times.threads.append((time.process_time() - all_spent) / len(self.rows))

        ways: list[Callable[[], None]] = [
            in_table,
            lambda: times.alone.append(_one_by_one(copies, live)),
            lambda: times.plain.append(_one_by_one(self._plain_rows, live)),
        ]
        for way in self.random.sample(ways, len(ways)):
            way()
        assert not self._filled.failed, self._filled.failed
        return [self._go_on(row, self._filled.bits[row], is_live=live[row]) for row in range(len(self.rows))]

    def _go_on(self, row: int, bits: Bits, *, is_live: bool) -> int:
        if not is_live:
            self.rows[row], self._plain_rows[row] = self._fresh(row), self._fresh_plain(row)
            bits = self.rows[row].clone().mask()
        allowed = np.flatnonzero(np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), bitorder="little"))
        return int(min(self.random.choices(allowed, k=3)))  # frequent tokens (low ids) are more likely than rare ones


def _one_by_one(matchers: list[GrammarMatcher], live: list[bool]) -> float:
    asked = [matcher for matcher, is_live in zip(matchers, live, strict=True) if is_live]
    began = time.thread_time()
    for matcher in asked:
        matcher.mask()
    return (time.thread_time() - began) / max(1, len(asked))


def measure(
    grammars: list[str], num_rows: int, num_steps: int, tokens: GrammarTokens, plain: GrammarTokens, threads: int
) -> Times:
    """Return the times of all steps except the first eighth, in which lexers are built and rows move to them."""
    walk = Walk(grammars, num_rows, tokens, plain, threads)
    table = MaskTable(num_rows, tokens.vocab_size, threads)
    chosen, times, warm = None, Times(), Times()
    for step in range(num_steps):
        chosen = walk.step(table, chosen, times if step >= num_steps // 8 else warm)
    table.close()
    return times


def vocabularies(vocabulary: Vocabulary) -> tuple[GrammarTokens, GrammarTokens]:
    """Return the vocabulary with Quire's slices, and with llguidance's own."""
    from llguidance import LLTokenizer

    tokens, plain = (GrammarTokens(vocabulary, len(vocabulary.tokens)) for _ in range(2))
    plain.tokenizer = plain.tokenizer.with_slices(LLTokenizer.general_slices())
    return tokens, plain


def main() -> None:
    arguments, where = _parse(), facts()
    tokens, plain = vocabularies(vocabulary_of(load_tokenizer(resolve_model(arguments.model, progress=silent))))
    rows = []
    for name, grammars in all_grammars().items():
        for num_rows in map(int, arguments.rows.split(",")):
            times = measure(grammars, num_rows, arguments.steps, tokens, plain, arguments.threads)
            rows.append([name, str(num_rows), *times.cells()])
    title = f"Masks in microseconds, {tokens.vocab_size} tokens of vocabulary, {arguments.threads} threads"
    publish(title, HEADER, rows, where)
    save(arguments.out, title, where, {"header": HEADER, "rows": rows})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masks")
    parser.add_argument("--model", default=DEFAULT, help="path or name; default: the embedded default model")
    parser.add_argument("--rows", default="1,16,256", help="numbers of rows, with commas between them")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--threads", type=int, default=mask_threads(), help="that compute masks in the table")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
