"""Turns the engine's tokens into outputs: followers detokenize samples and end them at stop strings and loops, and
OutputBuilder builds the outputs of finished requests.

Offline and served requests use the same followers. Their text goes into outputs (`batch.py`) or into the mailbox of a
response (`dispatch/in_flight_request.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from quire.serving.text.detokenizer import Detokenizer
from quire.serving.text.repetition import REPEATED, RepetitionWatch
from quire.serving.text.stop_strings import StopStrings
from quire.serving.text.tokenizer import Tokenizer
from quire.types.beam import BeamSearchOutput, BeamSearchSequence
from quire.types.errors import InvalidRequest
from quire.types.output import CompletionOutput, Finished, FinishReason, Logprob, RequestOutput, SampleEnd
from quire.types.request import Submit
from quire.types.sampling import SamplingParams
from quire.types.step import TokenLogprobs


def is_ranked(request: Submit) -> bool:
    """Whether the engine chooses the request's samples at its end (best_of, beam search). It finds their stop strings
    itself."""
    return request.beam is not None or request.sampling.num_sequences > request.sampling.n


def answer_detokenizer(tokenizer: Tokenizer, sampling: SamplingParams) -> Detokenizer:
    """Return a detokenizer for an answer. The leading space of its first word is kept."""
    return Detokenizer(tokenizer, sampling.skip_special_tokens, sampling.spaces_between_special_tokens, continues=True)


class TextWatch(Protocol):
    """Reads the text of one sample as it is shown, and may end the sample."""

    def push(self, text: str) -> str | None:
        """Take the next text. Returns the reason why the sample ends with it, or None if it continues."""


WatchMaker: TypeAlias = Callable[[], TextWatch]  # makes the watch of one sample


class SampleText:
    """The text of one sample. Takes tokens, and returns text as soon as it cannot be the beginning of a stop string.

    Ignores all tokens after a stop string, a repetition loop, or a text at which its watch ends the sample. None of
    these ends the sample before the request's `min_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer, request: Submit, watch: TextWatch | None = None) -> None:
        sampling = request.sampling
        self._detokenizer = answer_detokenizer(tokenizer, sampling)
        self._stops = StopStrings(sampling.stops, sampling.include_stop_str_in_output)
        self._has_stops, self._min_tokens = bool(sampling.stops), sampling.min_tokens
        self._silent_ids = frozenset() if sampling.include_stop_str_in_output else frozenset(request.rules.end_ids)
        self._loops = None if sampling.loops is None else RepetitionWatch(sampling.loops)
        self._text_watch = watch
        self._pieces: list[str] = []
        self.num_characters = 0  # of all text so far, including text that is held back
        self.num_tokens = 0  # up to and including the token that ended the text
        self.stopped_by: str | None = None  # a stop string, REPEATED, or the reason of the watch
        self.is_loop = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Take the next token. Returns the text that can be shown now."""
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
        reason = None if self._text_watch is None else self._text_watch.push(shown)
        if reason is not None and not is_early and self.stopped_by is None:
            self.stopped_by = reason
        return shown

    def finish(self) -> str:
        """Return the text that was held back. Called when the sample ended for another reason than its text."""
        if self.stopped_by is not None:
            return ""
        return self._keep(self._watch(self._detokenizer.finish()) + self._stops.finish())

    def _end_loop(self) -> str:
        """End the sample as a loop. Returns the text that was held back, unless that contains a stop string."""
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


class RequestFollower:
    """Follows the samples of one request. `texts` holds their texts by sample index.

    Samples are followed token by token if `wants_all`, or if their text may end them. Ranked samples (see `is_ranked`)
    are followed at the end, when the engine has chosen them. Without a tokenizer there are no texts. `make_watch` makes
    a watch for each sample that may also end it.
    """

    def __init__(
        self, submit: Submit, tokenizer: Tokenizer | None, *, wants_all: bool, make_watch: WatchMaker | None = None
    ) -> None:
        self._submit, self._tokenizer, self._make_watch = submit, tokenizer, make_watch
        sampling = submit.sampling
        self.is_ranked = is_ranked(submit)
        wants_text = wants_all or sampling.ends_by_text or make_watch is not None
        self.is_followed = wants_text and not self.is_ranked
        self._has_text = tokenizer is not None and sampling.detokenize and wants_text
        self.texts = {index: self._text() for index in range(sampling.n)} if self.is_followed and self._has_text else {}

    def _text(self) -> SampleText:
        assert self._tokenizer is not None
        watch = None if self._make_watch is None else self._make_watch()
        return SampleText(self._tokenizer, self._submit, watch)

    def rank(self, finished: Finished) -> None:
        """Create the texts of the samples that the engine has chosen for a ranked request. `replay` fills them."""
        if self.is_ranked and self._has_text:
            self.texts = {end.index: self._text() for end in finished.samples}

    def replay(self, end: SampleEnd) -> Iterator[tuple[int, TokenLogprobs | None]]:
        """Yield the tokens of a ranked sample with their logprobs, up to the token that ends its text. The caller must
        push each token to the sample's text before it takes the next."""
        text = self.texts[end.index]
        for token, entry in zip(end.token_ids, end.logprobs or (None,) * len(end.token_ids), strict=True):
            yield token, entry
            if text.stopped_by is not None:
                return

    def finish(self, finished: Finished) -> dict[int, str]:
        """Finish all texts of the request. Returns, by sample index, the text that was not returned before."""
        self.rank(finished)
        shown = {end.index: self._replayed(end) for end in finished.samples} if self.is_ranked and self.texts else {}
        return {index: shown.get(index, "") + text.finish() for index, text in self.texts.items()}

    def _replayed(self, end: SampleEnd) -> str:
        text = self.texts[end.index]
        return "".join([text.push(token) for token, _ in self.replay(end)])

    def ends(self, finished: Finished) -> list[tuple[SampleEnd, SampleText | None]]:
        """Return every sample as the user sees it (see `cut_at_stop`), sorted by index, with its text if it was
        followed."""
        pairs = [(cut_at_stop(end, self.texts.get(end.index)), self.texts.get(end.index)) for end in finished.samples]
        return sorted(pairs, key=lambda pair: pair[0].index)


def cut_at_stop(end: SampleEnd, text: SampleText | None) -> SampleEnd:
    """Return a sample as the user sees it: cut after the token at which its text ended it."""
    if text is None or text.stopped_by is None:
        return end
    count = text.num_tokens
    return end._replace(
        token_ids=end.token_ids[:count],
        logprobs=end.logprobs[:count],
        finish_reason="repetition" if text.is_loop else "stop",
        stop_reason=text.stopped_by,
    )


def visible_ids(request: Submit, token_ids: Sequence[int]) -> Sequence[int]:
    """Return the tokens that the text of an answer shows: all except a last one that ended it."""
    is_silent = token_ids and token_ids[-1] in request.rules.end_ids
    return token_ids[:-1] if is_silent and not request.sampling.include_stop_str_in_output else token_ids


def logprobs_by_handle(logprobs: Sequence[tuple[int, TokenLogprobs]]) -> dict[int, list[TokenLogprobs]]:
    """Group the logprobs of a step by sample handle, in the order of each sample's tokens."""
    entries: dict[int, list[TokenLogprobs]] = {}
    for handle, entry in logprobs:
        entries.setdefault(handle, []).append(entry)
    return entries


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """New text of one sample. The last piece of a sample has its finish reason."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    request_id: str = ""
    logprobs: tuple[dict[int, Logprob], ...] = ()  # of `token_ids`, if requested


def request_fault(finished: Finished) -> InvalidRequest | None:
    """Return the InvalidRequest of an accepted request that failed through its own fault, or None if the engine is at
    fault.

    For example, a grammar may prove too costly only while tokens are matched.
    """
    if not finished.refused:
        return None
    return InvalidRequest(finished.refused, (finished.error or "").removeprefix(f"{finished.refused}: "))


def _sum_of(logprobs: Sequence[TokenLogprobs]) -> float:
    return sum(float(entry.logprobs[0]) for entry in logprobs)


class OutputBuilder:
    """Builds RequestOutputs. Without a tokenizer, texts are empty and tokens have no text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str] = {}

    def build(
        self,
        request: Submit,
        prompt: str | None,
        finished: Finished,
        texts: Mapping[int, SampleText],
        token_ids: Sequence[int] | None = None,
    ) -> RequestOutput:
        """Build the output of a finished request. `texts` holds, by sample index, the texts that were followed token by
        token; all others are decoded here. `token_ids` are those of the request, if they are at hand as ints."""
        outputs = [self._completion(request, end, texts.get(end.index), finished.error) for end in finished.samples]
        prompt_logprobs = None
        if request.sampling.prompt_logprobs is not None and finished.prompt_logprobs is not None:
            prompt_logprobs = [
                None if line is None else self._read_line(*line) for line in finished.prompt_logprobs.lines()
            ]
        if len(outputs) > 1:
            outputs.sort(key=lambda output: output.index)
        metrics = {"num_preemptions": float(finished.num_preemptions)}
        return RequestOutput(  # without names, which would take as long again
            request.request_id,
            prompt,
            request.prompt_token_ids.tolist() if token_ids is None else list(token_ids),
            outputs,
            True,
            prompt_logprobs,
            finished.num_cached_tokens,
            metrics,
            request.sampling,
            request.adapter,
        )

    def _completion(
        self, request: Submit, end: SampleEnd, text: SampleText | None, error: str | None
    ) -> CompletionOutput:
        if text is not None:
            end = cut_at_stop(end, text)
        index, token_ids, finish_reason, stop_reason, logprobs, total, score = end
        entries = None
        if request.sampling.logprobs is not None:
            num_named = len(tuple(request.sampling.logprob_token_ids or ()))
            entries = [self.read_logprobs(entry, num_named) for entry in logprobs]
            total = _sum_of(logprobs)
        shown = self._decode(request, token_ids) if text is None else text.text
        if finish_reason == "error":
            stop_reason = error
        return CompletionOutput(index, shown, list(token_ids), total, entries, finish_reason, stop_reason, score)

    def _decode(self, request: Submit, token_ids: Sequence[int]) -> str:
        sampling = request.sampling
        if self._tokenizer is None or not sampling.detokenize:
            return ""
        detokenizer = answer_detokenizer(self._tokenizer, sampling)
        return detokenizer.push(visible_ids(request, token_ids)) + detokenizer.finish()

    def read_logprobs(self, entry: TokenLogprobs, num_named: int = 0) -> dict[int, Logprob]:
        """Return the logprobs of one position by token id: the chosen token, then the most likely ones with their
        ranks, then the last `num_named`, which were requested by id, without ranks."""
        return self._read_line(entry.token_ids.tolist(), entry.logprobs.tolist(), entry.rank, num_named)

    def _read_line(
        self, token_ids: Sequence[int], values: Sequence[float], rank: int, num_named: int = 0
    ) -> dict[int, Logprob]:
        chosen = {token_ids[0]: Logprob(values[0], rank, self._name(token_ids[0]))}
        num_ranked = len(token_ids) - 1 - num_named
        for place, (token, value) in enumerate(zip(token_ids[1:], values[1:], strict=True), start=1):
            chosen.setdefault(token, Logprob(value, place if place <= num_ranked else None, self._name(token)))
        return chosen

    def _name(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = self._tokenizer.token_text(token_id)
        return name


def beam_output(output: RequestOutput, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """Convert the output of a request with beams. Without a tokenizer, texts are empty."""
    sequences = [_sequence(output, one, tokenizer) for one in output.outputs]
    return BeamSearchOutput(sequences, output.request_id, output.prompt_token_ids)


def _sequence(output: RequestOutput, found: CompletionOutput, tokenizer: Tokenizer | None) -> BeamSearchSequence:
    tokens = [*output.prompt_token_ids, *found.token_ids]
    skips = output.sampling is None or output.sampling.skip_special_tokens
    return BeamSearchSequence(
        tokens=tokens,
        text="" if tokenizer is None else tokenizer.decode(tokens, skips),
        cum_logprob=float("nan") if found.cumulative_logprob is None else found.cumulative_logprob,
        score=float("nan") if found.score is None else found.score,
        output_token_ids=found.token_ids,
        output_text=found.text,
        finish_reason=found.finish_reason,
        stop_reason=found.stop_reason,
    )
