from __future__ import annotations

import json

import jsonschema
import pytest

from benchmarks.schemas import make_schemas
from benchmarks.structured import Stopwatch
from byte_vocabulary import RULES, SIZE, byte_vocabulary
from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.engine.decoding.grammar_tokens import GrammarTokens, reason_of
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
