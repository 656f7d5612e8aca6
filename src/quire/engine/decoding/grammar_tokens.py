"""The model's vocabulary in the form that llguidance needs, and the limits of every grammar."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.engine.decoding.grammar_slices import GENERAL_SLICES, LETTER_SLICES, repeated_classes, slices_of
from quire.engine.decoding.vocabulary import Vocabulary
from quire.types.step import Bits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Characters of a forced text given to the model's tokenizer; the rest is tokenized greedily.
CANONICAL_CHARACTERS = 2_048
REMEMBERED_TEXTS = 8_192  # forced texts whose tokens are cached
REMEMBERED_CHARACTERS = 256  # length of the longest cached text
MIN_SLICE_TOKENS = 8_192  # checking this many tokens takes about 0.1 ms of every mask
MAX_SLICED = 8  # cached tokenizers with slices for one grammar
_QUOTED = re.compile(r"\s*(\d+ \||\^+\s*$)")  # a line of the grammar, or the mark below one
_BARE_SLASH = re.compile(r"(?<!\\)/")  # an unescaped slash would end a regex in a grammar
MAX_REASON = 400  # characters of llguidance's message shown to a user
_PLAIN_REASONS = {  # llguidance's messages that do not say what to do, and what is said instead
    r'Unimplemented keys: \["(.+)"\]': '"{}" cannot be enforced while the model generates; leave it out, and check it '
    "in the answer",
    "oneOf constraints are not supported": "one value could match several branches of its oneOf; use anyOf, or add "
    '"x-guidance": {{"coerce_one_of": true}} to the schema, which means the same',
    r"Resource '([^']*)' is not present in a registry": "refers to {}, and nothing is fetched; copy that schema "
    "to $defs",
    r"Pointer '([^']*)' does not exist": "refers to {}, which is not in the schema; add it, or correct the $ref",
    "Too many items": "has too many ways to continue, as a schema that must contain itself; make it smaller, or the "
    "part that contains itself optional",
}


class GrammarTokens:
    """The vocabulary that all grammars of an engine share. Needs llguidance.

    llguidance gets a separate end token with the id after the model's last token, because each request decides which of
    the model's tokens end it. So a mask from llguidance has one bit more than the vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        from llguidance import LLTokenizer

        source = _TokenizerSource(vocabulary, vocab_size)
        self.vocab_size, self.end = vocab_size, vocab_size
        self.num_words = -(-vocab_size // 32)  # of a mask
        self.line_words = -(-(vocab_size + 1) // 32)  # of a mask with the bit of the end token
        self.tokenizer: LLTokenizer = LLTokenizer(
            source,  # type: ignore[arg-type]
            n_vocab=vocab_size + 1,
            eos_token=vocab_size,
            slices=list(GENERAL_SLICES),
        )
        source.greedy = self.tokenizer.greedy_tokenize
        self._sliced: OrderedDict[tuple[str, ...], LLTokenizer] = OrderedDict()
        self._limits = grammar_limits()

    def begin(self, grammar: str, tokenizer: LLTokenizer | None = None) -> LLMatcher:
        """Compile a grammar within the limits. Returns a matcher at its start, or one in the error state.

        Every call builds a new lexer. `tokenizer`: one with slices for this grammar.
        """
        from llguidance import LLMatcher

        return LLMatcher(tokenizer or self.tokenizer, grammar, log_level=0, limits=self._limits)

    def read_mask(self, state: LLMatcher) -> tuple[Bits, bool]:
        """Return the bitmask of the model's tokens that may come next, and whether the text may end here."""
        bits = np.empty(self.line_words, dtype=np.uint32)
        state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        word, bit = divmod(self.end, 32)
        may_end = bool(bits[word] >> bit & 1)
        bits[word] &= (1 << bit) - 1
        return bits[: self.num_words], may_end

    def own_slices(self, grammar: str) -> tuple[str, ...]:
        """Return slices for the character classes that a grammar repeats, if the general slices cover too few tokens.

        Also builds them, to check that llguidance can. That holds the GIL for 50 ms and more.
        """
        found: list[str] = []
        for name, repeats in repeated_classes(grammar).items():
            if self._num_walked(name) >= MIN_SLICE_TOKENS:
                found.extend(slices_of(name, repeats))
        if not found:
            return ()
        general = GENERAL_SLICES if "%json" in grammar else ()
        for slices in ((*found, *general), (found[-1],)):
            try:
                self.sliced(slices)
            # Their regexes are too expensive to compare, or llguidance does not support them.
            except (RuntimeError, ValueError):
                continue
            return slices
        return ()

    def sliced(self, slices: tuple[str, ...]) -> LLTokenizer:
        """Return the tokenizer with these slices. Only one thread may call this."""
        if slices not in self._sliced:
            self._sliced[slices] = self.tokenizer.with_slices(list(slices))
        self._sliced.move_to_end(slices)
        while len(self._sliced) > MAX_SLICED:
            self._sliced.popitem(last=False)
        return self._sliced[slices]

    def _num_walked(self, name: str) -> int:
        """Return how many tokens of a character class are covered by no general slice inside that class."""
        inside = self._tokens_of(slices_of(name, 24)[-1])
        rest = inside.copy()
        for letters in map(self._tokens_of, LETTER_SLICES):
            if not (letters & ~inside).any():
                rest &= ~letters
        return int(np.unpackbits(rest.view(np.uint8)).sum())

    def _tokens_of(self, regex: str) -> Bits:
        """Return the bitmask of the tokens that match a regex from their first to their last character."""
        state = self.begin("start: /{}/".format(_BARE_SLASH.sub(r"\/", regex)))
        return self.read_mask(state)[0] if not state.is_error() else np.zeros(self.num_words, dtype=np.uint32)


def grammar_limits() -> LLParserLimits:
    """Return the limits of compiling a grammar and of computing a mask. A request above them is refused or ends.

    The number of lexer states bounds memory (1 to 2 kB each) and the length of a forced text.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def reason_of(state: LLMatcher) -> str:
    """Return llguidance's error message in one line, without the grammar it quotes; empty if there is none."""
    lines = state.get_error().replace("<non-verbose/>", "").splitlines()
    text = " ".join(" ".join(line.split()) for line in lines if not _QUOTED.match(line)).strip()
    if text.startswith("NoExtension"):
        return "no text can match it"
    for pattern, plain in _PLAIN_REASONS.items():
        if found := re.search(pattern, text):
            return plain.format(*found.groups())[:MAX_REASON]
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."


class _TokenizerSource:
    """The tokenizer that LLTokenizer calls to tokenize a forced text, from any thread that computes a mask.

    The last results are cached, because rows of one grammar are forced to the same texts.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        tokens = list(vocabulary.tokens[:vocab_size])
        self._encode, self._tokens = vocabulary.encode, tokens
        self.tokens = [*tokens, *[b""] * (vocab_size - len(tokens)), b"<end of answer>"]
        self.eos_token_id = vocab_size
        self.special_token_ids = [*sorted(i for i in vocabulary.special_ids if i < vocab_size), vocab_size]
        self.greedy: Any = None  # llguidance's greedy tokenization, set once it has read the tokens
        self._remembered: dict[str, list[int]] = {}

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of `text`: those of the model's tokenizer if they spell it exactly, otherwise the greedy
        ones."""
        whole = text if isinstance(text, str) else text.decode()
        found = self._remembered.get(whole)
        if found is None:
            found = self._tokenize(whole)
            if len(whole) <= REMEMBERED_CHARACTERS:
                if len(self._remembered) >= REMEMBERED_TEXTS:
                    self._remembered.clear()
                self._remembered[whole] = found
        return found

    def _tokenize(self, text: str) -> list[int]:
        head, tail = text[:CANONICAL_CHARACTERS], text[CANONICAL_CHARACTERS:]
        ids = list(self._encode(head))
        limit = len(self._tokens)
        if any(i >= limit for i in ids) or b"".join(self._tokens[i] for i in ids) != head.encode():
            ids = self.greedy(head)
        return [*ids, *self.greedy(tail)] if tail else ids
