"""The requests of one call, from submission to their outputs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from quire.serving.client import EngineClient
from quire.serving.outputs import OutputBuilder, StreamPiece, own_fault, read_whole
from quire.serving.sample_text import SampleText, is_ranked
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import QuireError
from quire.types.output import Finished, RequestOutput, TokensOut
from quire.types.request import Abort, Submit


@dataclass(slots=True)
class _Live:
    request: Submit
    prompt: str | None
    handle: int  # of sample 0
    place: int  # in the list of outputs
    submitted_at: float
    texts: dict[int, SampleText]  # by sample index; empty when its text is not wanted token by token


class Batch:
    """Submits requests, reads the engine's tokens and assembles outputs in the order of submission.

    Only samples that may end by their text (all of them with `follow_all`) are followed token by token. Text is made
    only where there is a tokenizer and the request wants it.
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None, *, follow_all: bool = False) -> None:
        self._client, self._tokenizer, self._follow_all = client, tokenizer, follow_all
        self._builder = OutputBuilder(tokenizer)
        self._live: dict[str, _Live] = {}
        self._followed: dict[int, tuple[_Live, int]] = {}  # by sample handle
        self._outputs: list[RequestOutput | None] = []
        self._ended: list[RequestOutput] = []
        self.errors: list[QuireError] = []
        self.num_output_tokens = 0

    @property
    def is_live(self) -> bool:
        return bool(self._live)

    @property
    def num_finished(self) -> int:
        return len(self._outputs) - len(self._live)

    @property
    def outputs(self) -> list[RequestOutput]:
        """The outputs of all requests that finished."""
        return [output for output in self._outputs if output is not None]

    def submit(self, request: Submit, prompt: str | None) -> None:
        """Queue one request. Raises InvalidRequest and leaves the batch as it was."""
        sampling, texts = request.sampling, []
        is_followed = (self._follow_all or sampling.ends_by_text) and not is_ranked(request)
        if is_followed and self._tokenizer is not None and sampling.detokenize:
            texts = [SampleText(self._tokenizer, request) for _ in range(sampling.n)]
        handle = self._client.submit(request)
        live = _Live(request, prompt, handle, len(self._outputs), time.monotonic(), dict(enumerate(texts)))
        self._live[request.request_id] = live
        self._outputs.append(None)
        if is_followed:
            self._followed.update((handle + index, (live, index)) for index in range(sampling.n))

    def step(self) -> list[StreamPiece]:
        """Wait for the next tokens; return the new text of the followed samples."""
        out = self._client.receive()
        self.num_output_tokens += len(out.samples)
        pieces = self._follow(out) if self._followed else []
        for finished in out.finished:
            live = self._live.pop(finished.request_id, None)
            if live is not None:
                pieces.extend(self._end(live, finished))
        return pieces

    def take_ended(self) -> list[RequestOutput]:
        """The outputs that came since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def cancel(self) -> None:
        """Abort what is live and wait for its end, so that the engine is free again."""
        for request_id in self._live:
            self._client.abort(Abort(request_id))
        while self._live and self._client.has_work:
            self.step()

    def _follow(self, out: TokensOut) -> list[StreamPiece]:
        pieces = []
        for handle, token_id in zip(out.samples.tolist(), out.token_ids.tolist(), strict=True):
            followed = self._followed.get(handle)
            if followed is None:
                continue
            live, index = followed
            sample = live.texts.get(index)
            text = "" if sample is None else sample.push(token_id)
            if self._follow_all:
                pieces.append(StreamPiece(index, text, (token_id,), request_id=live.request.request_id))
            if sample is not None and sample.stopped_by is not None:
                del self._followed[handle]
                self._client.abort(Abort(live.request.request_id, index, sample.stopped_by))
        return pieces

    def _end(self, live: _Live, finished: Finished) -> list[StreamPiece]:
        if is_ranked(live.request) and self._tokenizer is not None and live.request.sampling.detokenize:
            live.texts = {end.index: read_whole(self._tokenizer, live.request, end) for end in finished.samples}
            rest = {index: sample.text for index, sample in live.texts.items()}
        else:
            rest = {index: sample.finish() for index, sample in live.texts.items()}
        for index in range(live.request.sampling.n):
            self._followed.pop(live.handle + index, None)
        output = self._builder.build(live.request, live.prompt, finished, live.texts)
        output.metrics["latency_seconds"] = time.monotonic() - live.submitted_at
        self._outputs[live.place] = output
        self._ended.append(output)
        if finished.error is not None:
            self.errors.append(own_fault(finished) or QuireError(finished.error))
        if not self._follow_all:
            return []
        name, is_new = live.request.request_id, is_ranked(live.request)
        return [
            StreamPiece(
                one.index,
                rest.get(one.index, ""),
                tuple(one.token_ids) if is_new else (),
                one.finish_reason,
                one.stop_reason,
                name,
            )
            for one in output.outputs
        ]
