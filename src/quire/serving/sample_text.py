"""The text of one sample while its tokens arrive, and the stop string or the loop that may end it."""

from __future__ import annotations

from quire.serving.text.detokenizer import Detokenizer
from quire.serving.text.repetition import REPEATED, RepetitionWatch
from quire.serving.text.stop_strings import StopStrings
from quire.serving.text.tokenizer import Tokenizer
from quire.types.request import Submit
from quire.types.sampling import SamplingParams


def is_ranked(request: Submit) -> bool:
    """Whether its samples are known only at the end: the engine compares them, and finds their stop strings itself."""
    return request.beam is not None or request.sampling.num_sequences > request.sampling.n


def answer_detokenizer(tokenizer: Tokenizer, sampling: SamplingParams) -> Detokenizer:
    """A detokenizer for text that follows a prompt: its leading space is part of it."""
    return Detokenizer(tokenizer, sampling.skip_special_tokens, sampling.spaces_between_special_tokens, continues=True)


class SampleText:
    """Takes tokens, gives text that is safe to show. After a stop string or a loop is found, tokens are ignored.

    Both are looked for only after the request's `min_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer, request: Submit) -> None:
        sampling = request.sampling
        self._detokenizer = answer_detokenizer(tokenizer, sampling)
        self._stops = StopStrings(sampling.stops, sampling.include_stop_str_in_output)
        self._has_stops, self._min_tokens = bool(sampling.stops), sampling.min_tokens
        self._silent_ids = frozenset() if sampling.include_stop_str_in_output else frozenset(request.rules.end_ids)
        self._loops = None if sampling.loops is None else RepetitionWatch(sampling.loops)
        self._pieces: list[str] = []
        self.num_characters = 0  # of all text so far, also of what is held back
        self.num_tokens = 0  # up to and including the one that ended it
        self.stopped_by: str | None = None  # a stop string, or REPEATED
        self.is_loop = False

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
        is_early, repeats = self.num_tokens <= self._min_tokens, self._loops is not None and self._loops.push(token_id)
        shown = self._keep(text if is_early else self._watch(text))
        if repeats and not is_early and self.stopped_by is None:
            shown += self._end_loop()
        return shown

    def finish(self) -> str:
        """The sample ended by other means: return the text that was held back."""
        if self.stopped_by is not None:
            return ""
        return self._keep(self._watch(self._detokenizer.finish()) + self._stops.finish())

    def _end_loop(self) -> str:
        """End it here, with the text that was held back, unless that holds a stop string."""
        rest = self.finish()
        if self.stopped_by is None:
            self.is_loop, self.stopped_by = True, REPEATED
        return rest

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
