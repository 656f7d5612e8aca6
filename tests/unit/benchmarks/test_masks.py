from __future__ import annotations

import pytest

from benchmarks.masks import HEADER, Times, all_grammars, measure, vocabularies
from quire.engine.decoding.compiled_grammar import CompiledGrammar
from quire.engine.decoding.grammar_tokens import GrammarTokens
from word_vocabulary import SIZE, word_vocabulary

pytest.importorskip("llguidance")


def test_every_grammar_that_is_measured_can_be_compiled() -> None:
    tokens = GrammarTokens(word_vocabulary(), SIZE)
    found = all_grammars()
    assert len(found["20 JSON schemas"]) == 20
    for grammars in found.values():
        for grammar in grammars:
            CompiledGrammar(grammar, tokens)


@pytest.mark.parametrize("num_rows", [1, 12])
def test_all_ways_are_measured_at_every_step_but_the_first_ones(num_rows: int) -> None:
    tokens, plain = vocabularies(word_vocabulary())
    times = measure(['start: "yes" | "no" | /[a-z]{3,9}/'], num_rows, 16, tokens, plain, 2)
    figures = (times.plain, times.alone, times.threads, times.table, times.engine, times.consume)
    assert [len(one) for one in figures] == [14] * 6
    assert len(times.cells()) + 2 == len(HEADER)


def test_figures_are_medians_in_microseconds() -> None:
    times = Times(*([1e-6, 3e-6, 2e-6] for _ in range(6)))
    assert times.cells() == ["2.0", "2.0", "2.0", "2.0", "2", "2"]
