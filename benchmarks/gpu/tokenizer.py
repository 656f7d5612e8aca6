"""A tokenizer for models with random weights: every id of a large vocabulary stands for bytes, so that answers are
text."""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer.json with exactly `vocab_size` ids: the 256 bytes, then invented words after a
    space."""
    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(f"Ġ{_word(index)}" for index in range(vocab_size - len(letters)))]
    tokenizer = Tokenizer(BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(path))


def _word(index: int) -> str:
    """Return a word of two letters or more, different for every index."""
    base, word = len(string.ascii_lowercase), ""
    index += base  # words of one letter are left out
    while True:
        word = string.ascii_lowercase[index % base] + word
        index = index // base - 1
        if index < 0:
            return word
