"""Sequences are looked at again at their tick, and once."""

from __future__ import annotations

import pytest

from harness import VOCABULARY, Harness
from quire.engine.decoding.tools import DecodingTools
from toy_decoding import ToyGrammars, ToyProposers
from toy_model import continuation


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_entry_that_a_sequence_left_behind_when_it_lost_its_row_changes_nothing(depth: int) -> None:
    lookaheads = ToyProposers(True, True)
    engine = Harness(depth=depth, tools=DecodingTools(ToyGrammars(), lookaheads, lambda: VOCABULARY))
    asked = {f"r{number}": ([number, 5, 7], 100 + number) for number in range(4)}
    for name, (prompt, seed) in asked.items():
        engine.submit(name, prompt, max_tokens=30, seed=seed)

    def list_twice(_: int) -> None:
        for sequences in engine.core._scheduler.decoding._events.values():
            sequences[:] = [*dict.fromkeys(sequences)] * 2

    engine.run(each=list_twice)
    for name, (prompt, seed) in asked.items():
        assert engine.answer(name) == continuation(prompt, 30, seed=seed)
