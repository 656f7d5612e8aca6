"""The model's vocabulary as llguidance reads it, and the limits every grammar is held to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.engine.decoding.vocabulary import Vocabulary
from quire.types.step import Bits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CANONICAL_CHARACTERS = 2_048  # of a forced text are tokenized as the model would; what lies behind is asked again later
_QUOTED = re.compile(r"\s*(\d+ \||\^+\s*$)")  # a line of the grammar, or the mark below one
MAX_REASON = 400  # characters of llguidance's message that a user is shown


class GrammarTokens:
    """A vocabulary with an end of its own, one past the model's tokens: which of those end a text, requests decide.

    Needs llguidance. Shared by all grammars of an engine and never changed.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        from llguidance import LLTokenizer

        spoken = _Spoken(vocabulary, vocab_size)
        self.vocab_size, self.end = vocab_size, vocab_size
        self.num_words = -(-vocab_size // 32)
        self.tokenizer: LLTokenizer = LLTokenizer(spoken, n_vocab=vocab_size + 1, eos_token=vocab_size)  # type: ignore[arg-type]
        spoken.greedy = self.tokenizer.greedy_tokenize
        self._limits = grammar_limits()

    def begin(self, grammar: str) -> LLMatcher:
        """A matcher at the start of a grammar, or one in its error state. Takes as long as the limits allow."""
        from llguidance import LLMatcher

        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=self._limits)

    def read_mask(self, state: LLMatcher) -> tuple[Bits, bool]:
        """Which of the model's tokens may come next, and whether the text may end here."""
        bits = np.empty(-(-(self.vocab_size + 1) // 32), dtype=np.uint32)
        state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        word, bit = divmod(self.end, 32)
        may_end = bool(bits[word] >> bit & 1)
        bits[word] &= (1 << bit) - 1
        return bits[: self.num_words], may_end


def grammar_limits() -> LLParserLimits:
    """What one grammar may cost to compile and one mask to find. Beyond it, its request is refused or ends.

    The states bound memory, at one or two kilobytes each, and how long a text can be forced at once.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def reason_of(state: LLMatcher) -> str:
    """llguidance's complaint in one line, without the grammar it quotes; empty if it has none."""
    lines = state.get_error().replace("<non-verbose/>", "").splitlines()
    text = " ".join(" ".join(line.split()) for line in lines if not _QUOTED.match(line)).strip()
    if text.startswith("NoExtension"):
        return "no text can match it"
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."


class _Spoken:
    """What LLTokenizer asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        tokens = list(vocabulary.tokens[:vocab_size])
        self._encode, self._tokens = vocabulary.encode, tokens
        self.tokens = [*tokens, *[b""] * (vocab_size - len(tokens)), b"<end of answer>"]
        self.eos_token_id = vocab_size
        self.special_token_ids = [*sorted(i for i in vocabulary.special_ids if i < vocab_size), vocab_size]
        self.greedy: Any = None  # llguidance's own way, known once it has read the tokens

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of `text` as the model's tokenizer cuts it where that spells it exactly, else the longest ones."""
        whole = text if isinstance(text, str) else text.decode()
        head, tail = whole[:CANONICAL_CHARACTERS], whole[CANONICAL_CHARACTERS:]
        ids = list(self._encode(head))
        limit = len(self._tokens)
        if any(i >= limit for i in ids) or b"".join(self._tokens[i] for i in ids) != head.encode():
            ids = self.greedy(head)
        return [*ids, *self.greedy(tail)] if tail else ids
