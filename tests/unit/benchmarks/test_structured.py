from __future__ import annotations

import json

import jsonschema
import pytest

from benchmarks import structured
from benchmarks.schemas import make_schemas
from benchmarks.structured import Stopwatch, refuse_all
from byte_vocabulary import RULES, SIZE, byte_vocabulary
from hostile_structures import Hostile
from quire.engine.decoding.compiled_grammar import CompiledGrammar
from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.engine.decoding.grammar_tokens import GrammarTokens, reason_of
from quire.engine.decoding.mask_table import MaskTable
from quire.serving.text.structure import Structure, grammar_of

pytest.importorskip("llguidance")
TOKENS = GrammarTokens(byte_vocabulary(), SIZE)


def test_the_schemas_are_valid_different_and_all_can_be_compiled() -> None:
    schemas = make_schemas(200)
    assert len({json.dumps(schema) for schema in schemas}) == 200
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
        state = TOKENS.begin(grammar_of(Structure("json", json.dumps(schema))))
        assert not reason_of(state), schema


def test_equal_seeds_make_equal_schemas() -> None:
    assert make_schemas(20, seed=3) == make_schemas(20, seed=3) != make_schemas(20, seed=4)


def test_the_stopwatch_times_masks_and_puts_everything_back() -> None:
    plain = GrammarMatcher.mask
    match = GrammarMatcher(TOKENS, TOKENS.begin("start: /[ab]+/"), RULES.end_ids)
    with Stopwatch() as watch:
        for _ in range(3):
            match.mask()
            match.advance(ord("a"))
    assert len(watch.masks) == 3
    assert watch.total > sum(watch.masks) > 0
    assert GrammarMatcher.mask is plain


@pytest.mark.parametrize("num_rows", [2, 40])
def test_the_stopwatch_times_masks_of_the_table_in_all_its_threads(num_rows: int) -> None:
    """A few rows are computed by the engine's thread, many by the table's and llguidance's."""
    begin, finish = MaskTable.begin, MaskTable.finish
    grammar = CompiledGrammar("start: /[a-z ]{20,400}/", TOKENS)
    with Stopwatch() as watch:
        table = MaskTable(num_rows, SIZE, threads=2)
        matchers = [grammar.matcher(RULES.end_ids) for _ in range(num_rows)]
        for step in range(5):
            table.begin(range(num_rows), matchers, [ord("a")] * num_rows if step else None)
            table.finish()
        assert len(watch.threads) == (0 if num_rows == 2 else 3)
        by_engine = watch.engine
    table.close()
    assert len(watch.masks) == 5 * num_rows
    assert by_engine > 0
    assert 0 < sum(watch.masks) <= watch.total * 1.001
    assert (watch.total > by_engine) == (num_rows == 40)
    assert (MaskTable.begin, MaskTable.finish) == (begin, finish)


def test_the_slowest_refusals_come_again_at_once_and_what_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hostiles = [
        Hostile("no JSON", {"json": "{"}),
        Hostile("harmless", {"regex": "a+"}),
        Hostile("may be taken", {"regex": "b+"}, refused=False),
        Hostile("nothing matches", {"json": "false"}),
        Hostile("no regex", {"regex": "("}),
    ]
    monkeypatch.setattr(structured, "all_hostile", lambda: hostiles)
    refusals = refuse_all(byte_vocabulary, 2)
    assert len(refusals.alone) == 3
    assert len(refusals.at_once) == 2
    assert max(refusals.at_once) > min(refusals.alone) > 0.0
    assert refusals.passed == ["harmless"]
    assert refuse_all(byte_vocabulary, 0).at_once == []
