"""From the engine's terminal message to the outputs users hold in their hands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quire.serving.sample_text import SampleText, answer_detokenizer
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest
from quire.types.output import CompletionOutput, Finished, FinishReason, Logprob, RequestOutput, SampleEnd
from quire.types.request import Submit
from quire.types.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """New text of one sample. The last piece of a sample carries its finish reason."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    request_id: str = ""


def settled(end: SampleEnd, text: SampleText | None) -> SampleEnd:
    """A sample as its user sees it: cut after the token that ended its followed text."""
    if text is None or text.stopped_by is None:
        return end
    count = text.num_tokens
    return replace(
        end,
        token_ids=end.token_ids[:count],
        logprobs=end.logprobs[:count],
        finish_reason="repetition" if text.is_loop else "stop",
        stop_reason=text.stopped_by,
    )


def own_fault(finished: Finished) -> InvalidRequest | None:
    """What was wrong with a request that was accepted and failed; None: nothing, the engine is at fault.

    A grammar may turn out too costly only while it is followed.
    """
    if not finished.refused:
        return None
    return InvalidRequest(finished.refused, (finished.error or "").removeprefix(f"{finished.refused}: "))


def read_whole(tokenizer: Tokenizer, request: Submit, end: SampleEnd) -> SampleText:
    """The text of a sample that nobody followed, read as if somebody had."""
    text = SampleText(tokenizer, request)
    for token in end.token_ids:
        text.push(token)
    text.finish()
    return text


def spoken_ids(request: Submit, token_ids: Sequence[int]) -> Sequence[int]:
    """The tokens of an answer that its text shows: all but a last one that ended it."""
    is_silent = token_ids and token_ids[-1] in request.rules.end_ids
    return token_ids[:-1] if is_silent and not request.sampling.include_stop_str_in_output else token_ids


def _sum_of(logprobs: Sequence[TokenLogprobs]) -> float:
    return sum(float(entry.logprobs[0]) for entry in logprobs)


class OutputBuilder:
    """Builds RequestOutputs. Without a tokenizer texts are empty and tokens have no names."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str] = {}

    def build(
        self, request: Submit, prompt: str | None, finished: Finished, texts: Mapping[int, SampleText]
    ) -> RequestOutput:
        """`texts` holds, by sample index, the texts that were followed token by token; the rest are decoded here."""
        outputs = [self._completion(request, end, texts.get(end.index), finished.error) for end in finished.samples]
        prompt_logprobs = None
        if request.sampling.prompt_logprobs is not None and finished.prompt_logprobs is not None:
            prompt_logprobs = [None if entry is None else self._logprobs(entry) for entry in finished.prompt_logprobs]
        return RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=sorted(outputs, key=lambda output: output.index),
            finished=True,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=finished.num_cached_tokens,
            metrics={"num_preemptions": float(finished.num_preemptions)},
            sampling=request.sampling,
        )

    def _completion(
        self, request: Submit, end: SampleEnd, text: SampleText | None, error: str | None
    ) -> CompletionOutput:
        end = settled(end, text)
        stop_reason = error if end.finish_reason == "error" else end.stop_reason
        token_ids, logprobs = end.token_ids, end.logprobs
        wants_logprobs = request.sampling.logprobs is not None
        num_named = len(tuple(request.sampling.logprob_token_ids or ()))
        return CompletionOutput(
            index=end.index,
            text=self._decode(request, token_ids) if text is None else text.text,
            token_ids=list(token_ids),
            cumulative_logprob=_sum_of(logprobs) if wants_logprobs else end.cumulative_logprob,
            logprobs=[self._logprobs(entry, num_named) for entry in logprobs] if wants_logprobs else None,
            finish_reason=end.finish_reason,
            stop_reason=stop_reason,
            score=end.score,
        )

    def _decode(self, request: Submit, token_ids: Sequence[int]) -> str:
        sampling = request.sampling
        if self._tokenizer is None or not sampling.detokenize:
            return ""
        detokenizer = answer_detokenizer(self._tokenizer, sampling)
        return detokenizer.push(spoken_ids(request, token_ids)) + detokenizer.finish()

    def _logprobs(self, entry: TokenLogprobs, num_named: int = 0) -> dict[int, Logprob]:
        """The chosen token first, then the most likely ones with their ranks, then the last `num_named` without."""
        token_ids, values = entry.token_ids.tolist(), entry.logprobs.tolist()
        chosen = {token_ids[0]: Logprob(values[0], entry.rank, self._name(token_ids[0]))}
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
