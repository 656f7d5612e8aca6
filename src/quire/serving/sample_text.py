"""The text of one sample while its tokens arrive, and the stop string that may end it."""

from __future__ import annotations

from quire.serving.text.detokenizer import Detokenizer
from quire.serving.text.stop_strings import StopStrings
from quire.serving.text.tokenizer import Tokenizer
from quire.types.request import Submit
from quire.types.sampling import SamplingParams


def answer_detokenizer(tokenizer: Tokenizer, sampling: SamplingParams) -> Detokenizer:
    """A detokenizer for text that follows a prompt: its leading space is part of it."""
    return Detokenizer(tokenizer, sampling.skip_special_tokens, sampling.spaces_between_special_tokens, continues=True)


class SampleText:
    """Takes tokens, gives text that is safe to show. After a stop string is found, further tokens are ignored.

    Stop strings are looked for only in text that comes after the request's `min_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer, request: Submit) -> None:
        sampling = request.sampling
        self._detokenizer = answer_detokenizer(tokenizer, sampling)
        self._stops = StopStrings(sampling.stops, sampling.include_stop_str_in_output)
        self._has_stops, self._min_tokens = bool(sampling.stops), sampling.min_tokens
        self._silent_ids = frozenset() if sampling.include_stop_str_in_output else frozenset(request.rules.end_ids)
        self._pieces: list[str] = []
        self.num_characters = 0  # of all text so far, also of what is held back
        self.num_tokens = 0  # up to and including the one that completed a stop string
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that became certain with it."""
        if self.stopped_by is not None:
            return ""
        self.num_tokens += 1
        if token_id in self._silent_ids:
            return ""
        text = self._detokenizer.push((token_id,))
        self.num_characters += len(text)
        return self._keep(text if self.num_tokens <= self._min_tokens else self._watch(text))

    def finish(self) -> str:
        """The sample ended by other means: return the text that was held back."""
        if self.stopped_by is not None:
            return ""
        return self._keep(self._watch(self._detokenizer.finish()) + self._stops.finish())

    def _watch(self, text: str) -> str:
        found = self._stops.push(text) if self._has_stops else text
        if isinstance(found, str):
            return found
        self.stopped_by = found.stop
        return found.text

    def _keep(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text
