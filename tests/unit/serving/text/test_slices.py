"""A long text is tokenized in slices, and its tokens are those of the whole text."""

from __future__ import annotations

from itertools import chain

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers

from quire.serving.text import tokenizer as tokenizer_module
from quire.serving.text.edges import set_edges
from quire.serving.text.pretokenizers import SCHEMES
from quire.serving.text.slices import can_slice, slices_of
from quire.serving.text.special_tokens import SpecialTokens
from quire.serving.text.tokenizer import Tokenizer
from tests.unit.serving.text.vocabularies import build_gguf_tokenizer, sentencepiece

CORPUS = [
    "it's what we've said, they're gone; the end.\n\nfoo_bar = 12345 + x\n    return it\n",
    "über naïve 漢字 かな",
] * 20
WORDS = [
    "it's",
    "the",
    "they're",
    "we",
    "12345",
    "\n",
    "\n\n",
    "    ",
    ";",
    "é",
    "漢字",
    "한국",
    "<end>",
    "_",
    "'",
    "½",
    "e\u0301",
]
TEXTS = st.lists(st.sampled_from([*WORDS, " ", " ", " "]) | st.text(max_size=3), max_size=40).map("".join)


def trained(name: str) -> tokenizers.Tokenizer:
    """A byte-level tokenizer with the word splitting of a known scheme."""
    scheme = SCHEMES[name]
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=scheme.ignore_merges))
    backend.pre_tokenizer = scheme.build()
    if scheme.nfc:
        backend.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return backend


BACKENDS = {name: trained(name) for name in sorted(SCHEMES) if name != "superbpe"}  # whose tokens reach across words


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(text=TEXTS, size=st.integers(1, 12))
def test_the_tokens_of_the_slices_are_those_of_the_text(name: str, text: str, size: int) -> None:
    backend = BACKENDS[name]
    text = text.encode(errors="ignore").decode()
    assert can_slice(backend)
    parts = list(slices_of(text, size))
    assert "".join(parts) == text
    sliced = chain.from_iterable(backend.encode(part, add_special_tokens=False).ids for part in parts)
    assert list(sliced) == backend.encode(text, add_special_tokens=False).ids


def test_a_long_text_is_cut_often_and_gets_its_special_tokens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = trained("smollm")
    end = backend.token_to_id("<end>")
    set_edges(backend, end, end)
    tokenizer = Tokenizer(backend, SpecialTokens(end, (end,), None))
    text = "the words of a long text " * 40
    whole = {added: tokenizer.encode(text, added) for added in (False, True)}
    monkeypatch.setattr(tokenizer_module, "SLICE_CHARACTERS", 50)
    seen: list[str] = []
    monkeypatch.setattr(tokenizer_module, "slices_of", lambda text: _noted(slices_of(text, 50), seen))
    assert {added: tokenizer.encode(text, added) for added in (False, True)} == whole
    assert len(seen) >= 30
    assert max(map(len, seen)) < 80


def _noted(parts: object, seen: list[str]) -> list[str]:
    found = list(parts)  # type: ignore[call-overload]
    seen.extend(found)
    return found


def test_a_text_without_words_is_one_slice() -> None:
    assert list(slices_of("a" * 1_000 + " 1" * 50, 10)) == ["a" * 1_000 + " 1" * 50]
    assert list(slices_of("", 10)) == [""]


def test_a_tokenizer_that_adds_or_joins_across_words_is_not_cut() -> None:
    assert not can_slice(build_gguf_tokenizer(sentencepiece(), "f")[0])
    assert not can_slice(trained("superbpe"))
    joining = tokenizers.Tokenizer(models.BPE({"a": 0, "Ġ": 1, "b": 2, "aĠ": 3, "aĠb": 4}, [("a", "Ġ"), ("aĠ", "b")]))
    joining.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert not can_slice(joining)
    swallowing = trained("smollm")
    swallowing.add_special_tokens([AddedToken("mask", rstrip=True)])
    assert not can_slice(swallowing)
    prefixed = trained("smollm")
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not can_slice(prefixed)
