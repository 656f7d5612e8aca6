"""Toy grammars, and real ones of llguidance over the pretend model's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from quire.engine.decoding.compiled_grammar import CompiledGrammar
from quire.engine.decoding.grammar import Matcher
from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.engine.decoding.grammar_tokens import GrammarTokens
from quire.engine.decoding.vocabulary import Vocabulary
from quire.types.sampling import TokenRules
from toy_decoding import ToyCompilation, ToyGrammars
from toy_model import VOCAB, digest, next_token

SPECIAL = frozenset({3, 50})
# the letters, and then pairs of them
TEXTS = [bytes([97 + token % 26, 97 + 7 * token % 26][: 1 + (token >= 26)]) for token in range(VOCAB)]
REAL_GRAMMARS = (
    "start: /[a-h]{2,9}/",
    "start: /[a-z]+/",
    'start: "abcefgh" /[e-z]+/ "stop"',
    'start: ("ab" | "xyzk") /[klm]*/ ("q" | "rr")+',
    'start: /[a-c]/ "efghijklmno" /[p-z]{1,4}/',
    'start: ("yes" | "no" | "perhaps") ("," | /[a-z]/)*',
)


def _encode(text: str) -> list[int]:
    """The longest token first."""
    data, ids = text.encode(), []
    while data:
        fitting = [token for token in range(VOCAB) if token not in SPECIAL and data.startswith(TEXTS[token])]
        ids.append(max(fitting, key=lambda token: (len(TEXTS[token]), -token)))
        data = data[len(TEXTS[ids[-1]]) :]
    return ids


@cache
def _tokens() -> GrammarTokens:
    return GrammarTokens(Vocabulary(TEXTS, SPECIAL, (3,), _encode), VOCAB)


@cache
def _compiled(text: str) -> CompiledGrammar:
    return CompiledGrammar(text, _tokens())


def real_matcher(text: str, end_ids: tuple[int, ...]) -> GrammarMatcher:
    return _compiled(text).matcher(end_ids)


def real_answer(
    prompt: Sequence[int], length: int, text: str, *, seed: int, index: int, end_ids: tuple[int, ...]
) -> list[int]:
    """The answer under a real grammar, of a matcher that is asked for one mask at a time."""
    tokens: list[int] = []
    matcher = real_matcher(text, end_ids)
    while len(tokens) < length:
        allowed = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
        tokens.append(next_token([*prompt, *tokens], seed, index, allowed))
        if tokens[-1] in end_ids:
            break
        assert matcher.advance(tokens[-1])
        if matcher.is_over:
            break
    return tokens


@dataclass
class RealCompilation(ToyCompilation):
    def matcher(self, rules: TokenRules) -> Matcher:
        assert self.is_ready
        return real_matcher(self.text, rules.end_ids)


@dataclass
class FuzzGrammars(ToyGrammars):
    """Compiles a toy grammar in as many ticks as it has letters, and a real one in up to 8."""

    def compile(self, text: str) -> ToyCompilation:
        if text in REAL_GRAMMARS:
            return RealCompilation(text, self, self.time + digest([len(text), self.time]) % 9)
        return super().compile(text)
