"""bad_words: bans the token that would complete a listed token sequence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.runtime.sampling.samples import Longs, Members, Part
from quire.runtime.sampling.transforms.transform import Step
from quire.runtime.transfer import Uploader
from quire.types.step import Ints, NewRow


class _RowWords(NamedTuple):
    """The bad words of one row, without padding, so that a long word costs no other word and no other row anything."""

    last: Longs  # [words]: the token that completes each word
    tokens: Longs  # [tokens]: the tokens before the last one, word by word
    distances: Longs  # [tokens]: distance of each before the token to be sampled
    words: Longs  # [tokens]: the index of its word in `last`


class _BatchWords(NamedTuple):
    """The bad words of all samples of a part, on the device."""

    last: Tensor  # [words]: index of the completing token in the flattened logits
    tokens: Tensor  # [tokens]
    distances: Tensor  # [tokens]
    words: Tensor  # [tokens]: the index of its word in `last`
    lines: Tensor  # [tokens]: the index of its sample in the part
    rows: Tensor  # [tokens]: the row of its sample


class BadWords:
    """Bans a word's last token while the row's output ends with the tokens before it.

    As in vLLM, only generated tokens can begin a bad word, never the prompt's.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.members = Members(num_rows)
        self._uploader = Uploader(device)
        self._words: dict[int, _RowWords] = {}  # by row; may contain rows that were removed
        self._batch: tuple[Part, _BatchWords] | None = None  # the last step's part and its words

    def add(self, new: NewRow) -> None:
        words = new.rules.bad_words
        if not words:
            return
        self.members.join(new.row)
        self._words[new.row] = _row_words(words)

    def apply(self, logits: Tensor, part: Part, step: Step) -> None:
        found, history = self._words_of(logits, part, step), step.history
        places = step.lengths(part).index_select(0, found.lines) - found.distances
        tokens = history.tokens[found.rows, places.clamp(min=0)]
        is_output = places >= history.num_prompt.index_select(0, found.rows)
        is_other = (tokens != found.tokens) | ~is_output
        num_others = torch.zeros_like(found.last).index_add_(0, found.words, is_other.long())
        logits.view(-1).scatter_add_(0, found.last, torch.where(num_others == 0, float("-inf"), 0.0))

    def _words_of(self, logits: Tensor, part: Part, step: Step) -> _BatchWords:
        """Return the words of a part. They are reused while the sampler passes the same part."""
        if self._batch is None or self._batch[0] is not part:
            self._words = {row: words for row, words in self._words.items() if row in self.members}
            words = self._join(logits.shape[1], part, step.samples.rows[part.host_positions])
            self._batch = part, words
        return self._batch[1]

    def _join(self, vocab_size: int, part: Part, rows: Ints) -> _BatchWords:
        """Concatenate the words of the part's samples. `rows`: the row of each sample."""
        each = [self._words[row] for row in rows.tolist()]
        num_words, num_tokens = [len(words.last) for words in each], [len(words.tokens) for words in each]
        begins = np.cumsum(num_words) - num_words  # index of each sample's first word
        last, tokens, distances, words = (np.concatenate(arrays) for arrays in zip(*each, strict=True))
        samples = np.arange(len(each))
        return _BatchWords(
            *self._uploader.upload(
                np.repeat(part.host_positions, num_words) * vocab_size + last,
                tokens,
                distances,
                np.repeat(begins, num_tokens) + words,
                np.repeat(samples, num_tokens),
                np.repeat(rows.astype(np.int64), num_tokens),
            )
        )


def _row_words(words: tuple[tuple[int, ...], ...]) -> _RowWords:
    lengths = [len(word) - 1 for word in words]
    tokens = np.array([token for word in words for token in word[:-1]], dtype=np.int64)
    ends = np.repeat(np.cumsum(lengths), lengths)
    last = np.array([word[-1] for word in words], dtype=np.int64)
    return _RowWords(last, tokens, ends - np.arange(len(tokens)), np.repeat(np.arange(len(words)), lengths))
