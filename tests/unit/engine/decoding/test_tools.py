from __future__ import annotations

import pytest

from byte_vocabulary import SIZE, byte_vocabulary
from quire.engine.decoding.grammar_compiler import GrammarCompiler
from quire.engine.decoding.tools import DecodingTools
from quire.types.errors import InvalidRequest
from quire.types.grammar import CheckedGrammar
from quire.types.sampling import TokenRules

pytest.importorskip("llguidance")
TEXT = 'start: "a"'


def test_an_engine_that_serves_compiles_no_grammar_that_was_not_checked() -> None:
    grammars = GrammarCompiler(byte_vocabulary, SIZE)
    tools = DecodingTools(grammars, checked_only=True)
    other = CheckedGrammar.of('start: "b"')
    for rules in (TokenRules(grammar=TEXT), TokenRules(grammar=TEXT, grammar_digest=other.digest)):
        with pytest.raises(InvalidRequest, match="structured_outputs: carries a grammar that was not checked"):
            tools.compile(rules)
    assert not grammars._kept
    tools.compile(TokenRules(grammar=TEXT, grammar_digest=CheckedGrammar.of(TEXT).digest))
    assert list(grammars._kept) == [TEXT]
    grammars.close()
