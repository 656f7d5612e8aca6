from __future__ import annotations

import json
import random

import numpy as np
import pytest
import tokenizers

from quire.serving.text.special_tokens import SpecialTokens
from quire.serving.text.token_table import vocabulary_of, vocabulary_source
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest
from tests.unit.serving.text import vocabularies

TEXTS = ["the", " the there", "hello 123", '{"a": [1, 2]}\n', "é", "日本語 🦜", "\x00\x7f\t"]
TOKENIZERS = {
    "byte-level": vocabularies.build(vocabularies.byte_level()),
    "SentencePiece": vocabularies.build(vocabularies.sentencepiece()),
    "SentencePiece without a first space": vocabularies.build(vocabularies.sentencepiece(add_space_prefix=False)),
}


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_that_go_on_from_a_text_spell_exactly_what_they_are_asked_to(tokenizer: Tokenizer, text: str) -> None:
    vocabulary = vocabulary_of(tokenizer)
    assert b"".join(vocabulary.tokens[token] for token in vocabulary.encode(text)) == text.encode()


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_every_token_has_the_bytes_it_adds_to_a_text(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer)
    assert len(vocabulary.tokens) == tokenizer.vocab_size
    assert {bytes([byte]) for byte in range(256)} <= set(vocabulary.tokens)
    assert b" the" in vocabulary.tokens


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_special_tokens_and_ends_are_marked(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer)
    assert set(tokenizer.eos_ids) <= vocabulary.special_ids
    assert vocabulary.eos_ids == tokenizer.eos_ids
    assert all(vocabulary.tokens[token].startswith(b"<") for token in vocabulary.special_ids)


def test_a_tokenizer_that_joins_by_spaces_is_refused() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        vocabulary_of(Tokenizer(backend, SpecialTokens(None, (), None)))


def test_all_who_ask_share_one_vocabulary() -> None:
    source = vocabulary_source(TOKENIZERS["byte-level"])
    assert source() is source()


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("seed", range(8))
def test_what_a_grammar_lets_through_is_decoded_to_what_it_asked_for(tokenizer: Tokenizer, seed: int) -> None:
    pytest.importorskip("llguidance")
    from quire.engine.decoding.grammar_matcher import GrammarMatcher
    from quire.engine.decoding.grammar_tokens import GrammarTokens

    tokens = GrammarTokens(vocabulary_of(tokenizer), tokenizer.vocab_size)
    grammar = 'start: "{" /"(the|hello|é)+": [0-9]{1,3}/ (", " /"[the ]{1,6}": (true|null)/)? "}"'
    match, rng, ids = GrammarMatcher(tokens, tokens.begin(grammar), tokenizer.eos_ids), random.Random(seed), []
    while not match.is_over:
        bits = np.unpackbits(match.mask().view(np.uint8), bitorder="little")
        ids.append(rng.choice(np.flatnonzero(bits).tolist()))
        assert match.advance(ids[-1])
    assert json.loads(tokenizer.decode(ids))
