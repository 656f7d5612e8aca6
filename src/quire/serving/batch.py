"""Submits requests to an in-process engine and assembles their outputs: `Batch` for the requests of one call, and
`LiveRequests` for requests that the user steps, branches and cancels one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.config.engine import SchedulerConfig
from quire.serving.client import EngineClient
from quire.serving.outputs import (
    OutputBuilder,
    RequestFollower,
    SampleText,
    StreamPiece,
    logprobs_by_handle,
    request_fault,
)
from quire.serving.requests import Prompt
from quire.serving.terminal import DeferredInterrupt
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import EngineDead, InvalidRequest, QuireError
from quire.types.images import PromptImage
from quire.types.output import Finished, Logprob, RequestOutput, TokensOut
from quire.types.request import Abort, Branch, Submit
from quire.types.step import TokenLogprobs
from quire.types.value_checks import Whole


@dataclass(slots=True)
class _Live:
    request: Submit
    prompt: str | None
    token_ids: Sequence[int] | None  # of the prompt, as the user gave them
    handle: int  # of sample 0
    place: int  # index into the list of outputs
    submitted_at: float
    follower: RequestFollower | None  # None: its samples are decoded at their end


class Ended(NamedTuple):
    """The output of a request that has ended, and its error if it failed."""

    output: RequestOutput
    error: QuireError | None


class Batch:
    """Submits requests, receives the engine's tokens, and assembles outputs in the order of submission.

    Samples with stop strings are detokenized token by token; with `follow_all`, all samples are. Outputs have text only
    if there is a tokenizer and the request asks for text. Without `keep_outputs`, nothing of a finished request is kept
    but what `take_ended` returns.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        *,
        follow_all: bool = False,
        keep_outputs: bool = True,
    ) -> None:
        self._client, self._tokenizer, self._follow_all = client, tokenizer, follow_all
        self._keep_outputs = keep_outputs
        self._builder = OutputBuilder(tokenizer)
        self._live: dict[str, _Live] = {}
        self._followed: dict[int, tuple[_Live, int]] = {}  # by sample handle
        self._outputs: list[RequestOutput | None] = []
        self._ended: list[Ended] = []
        self.errors: list[QuireError] = []  # of requests whose outputs are kept
        self.num_output_tokens = 0

    @property
    def is_live(self) -> bool:
        return bool(self._live)

    @property
    def num_finished(self) -> int:
        """How many requests whose outputs are kept have ended."""
        return len(self._outputs) - len(self._live)

    @property
    def outputs(self) -> list[RequestOutput]:
        """The outputs of all finished requests, in the order of submission."""
        return [output for output in self._outputs if output is not None]

    def submit(self, request: Submit, prompt: str | None, token_ids: Sequence[int] | None = None) -> None:
        """Queue one request. `token_ids` are those of its prompt, if they are at hand as ints: its output gets them.
        Raises InvalidRequest and leaves the batch unchanged."""
        follower, sampling = None, request.sampling
        if self._follow_all or sampling.stop or sampling.repetition_detection is not None:
            follower = RequestFollower(request, self._tokenizer, wants_all=self._follow_all)
        handle = self._client.submit(request)
        live = _Live(request, prompt, token_ids, handle, len(self._outputs), time.monotonic(), follower)
        self._live[request.request_id] = live
        if self._keep_outputs:
            self._outputs.append(None)
        if follower is not None and follower.is_followed:
            self._followed.update((handle + index, (live, index)) for index in range(request.sampling.n))

    def step(self) -> list[StreamPiece]:
        """Wait for the next batch of tokens. Returns the new text of the followed samples."""
        out = self._client.receive()
        self.num_output_tokens += len(out.samples)
        pieces = self._follow(out) if self._followed else []
        for finished in out.finished:
            live = self._live.pop(finished.request_id, None)
            if live is not None:
                pieces.extend(self._end(live, finished))
        return pieces

    def take_ended(self) -> list[Ended]:
        """Without `keep_outputs`: return the requests that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def cancel(self) -> None:
        """Abort all live requests and wait until they have ended."""
        for request_id in self._live:
            self._client.abort(Abort(request_id))
        while self._live and self._client.has_work:
            self.step()

    def _follow(self, out: TokensOut) -> list[StreamPiece]:
        pieces, entries = [], logprobs_by_handle(out.logprobs) if self._follow_all and out.logprobs else {}
        for handle, token_id in zip(out.samples.tolist(), out.token_ids.tolist(), strict=True):
            followed = self._followed.get(handle)
            if followed is None:
                continue
            live, index = followed
            sample = None if live.follower is None else live.follower.texts.get(index)
            text = "" if sample is None else sample.push(token_id)
            if self._follow_all:
                logprobs = self._read_logprobs(live, entries[handle].pop(0)) if entries.get(handle) else ()
                request_id = live.request.request_id
                pieces.append(StreamPiece(index, text, (token_id,), request_id=request_id, logprobs=logprobs))
            if sample is not None and sample.stopped_by is not None:
                del self._followed[handle]
                self._client.abort(Abort(live.request.request_id, index, sample.stopped_by))
        return pieces

    def _read_logprobs(self, live: _Live, entry: TokenLogprobs) -> tuple[dict[int, Logprob], ...]:
        num_named = len(tuple(live.request.sampling.logprob_token_ids or ()))
        return (self._builder.read_logprobs(entry, num_named),)

    def _failure(self, reason: str) -> QuireError:
        return QuireError(reason) if self._client.dead is None else EngineDead(reason)

    def _end(self, live: _Live, finished: Finished) -> list[StreamPiece]:
        rest: dict[int, str] = {}
        texts: dict[int, SampleText] = {}
        if (follower := live.follower) is not None:
            rest, texts = follower.finish(finished), follower.texts
            for index in range(live.request.sampling.n):
                self._followed.pop(live.handle + index, None)
        output = self._builder.build(live.request, live.prompt, finished, texts, live.token_ids)
        output.metrics["latency_seconds"] = time.monotonic() - live.submitted_at
        error = None if finished.error is None else request_fault(finished) or self._failure(finished.error)
        if self._keep_outputs:
            self._outputs[live.place] = output
            if error is not None:
                self.errors.append(error)
        else:
            self._ended.append(Ended(output, error))
        if not self._follow_all or follower is None:
            return []
        name, is_new = live.request.request_id, follower.is_ranked
        return [
            StreamPiece(
                one.index,
                rest.get(one.index, ""),
                tuple(one.token_ids) if is_new else (),
                one.finish_reason,
                one.stop_reason,
                name,
                tuple(one.logprobs or ()) if is_new else (),
            )
            for one in output.outputs
        ]


_FIRST_SLICE, _SLICE = 64, 512  # requests that are made and submitted in one go, in some milliseconds


class Feed:
    """Makes and submits the requests of one call in slices, so that the device computes the first ones while the others
    are tokenized. `make(slice)` returns the requests of `prompts[slice]`."""

    def __init__(self, batch: Batch, prompts: Sequence[Prompt], make: Callable[[slice], Sequence[Submit]]) -> None:
        self._batch, self._prompts, self._make, self._next = batch, prompts, make, 0

    def submit_first(self, scheduler: SchedulerConfig) -> None:
        """Submit what fills the first two steps, or all if the policy may prefer later requests."""
        if scheduler.policy == "fcfs":
            self.submit_tokens(2 * scheduler.max_num_batched_tokens, most=scheduler.num_rows)
        else:
            self.submit_all()

    def submit_tokens(self, num_tokens: int, *, most: int) -> None:
        """Submit slices until their prompts have `num_tokens` tokens in total, or until `most` requests are
        submitted."""
        while num_tokens > 0 and self._next < min(most, len(self._prompts)):
            num_tokens -= self._submit(_FIRST_SLICE)

    def submit_some(self) -> None:
        """Submit the next slice, if requests are left."""
        if self._next < len(self._prompts):
            self._submit(_SLICE)

    def submit_all(self) -> None:
        self._submit(len(self._prompts))

    def _submit(self, count: int) -> int:
        """Submit the next `count` requests. Returns the number of their prompt tokens. Raises InvalidRequest that names
        the refused prompt."""
        requests = self._make(slice(self._next, self._next + count))
        for request in requests:
            try:
                prompt = self._prompts[self._next]
                token_ids = None if request.images else prompt.token_ids
                self._batch.submit(request, prompt.text, token_ids)
            except InvalidRequest as error:
                where = f"prompts[{self._next}]: " if len(self._prompts) > 1 else ""
                raise InvalidRequest(where + error.field, error.reason, error.fix) from None
            self._next += 1
        return sum([len(request.prompt_token_ids) for request in requests])


class LiveRequest:
    """One request of an LLM. It advances whenever its engine is stepped: by `wait` of any request, or by `LLM.step`."""

    def __init__(self, request: Submit, step: Callable[[], object], cancel: Callable[[Abort], None]) -> None:
        self._request, self._step, self._cancel = request, step, cancel
        self._tokens: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self._texts: list[list[str]] = [[] for _ in range(request.sampling.n)]
        self._output: RequestOutput | None = None

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def images(self) -> tuple[PromptImage, ...]:
        return self._request.images

    @property
    def adapter(self) -> str:
        """The name of its LoRA adapter; empty: none."""
        return self._request.adapter

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt. For a fork, this includes the answer tokens that it kept."""
        return tuple(self._request.prompt_token_ids)

    @property
    def num_samples(self) -> int:
        return len(self._tokens) if self._output is None else len(self._output.outputs)

    @property
    def is_finished(self) -> bool:
        return self._output is not None

    @property
    def output(self) -> RequestOutput | None:
        """The output, or None until the request is finished."""
        return self._output

    def token_ids(self, index: int = 0) -> tuple[int, ...]:
        """Return the tokens that sample `index` has generated so far. Ranked samples (best_of, beams) have none before
        the end. Raises InvalidRequest if there is no such sample."""
        index = self._sample(index)
        if self._output is not None:
            return tuple(next((one.token_ids for one in self._output.outputs if one.index == index), ()))
        return tuple(self._tokens[index])

    def text(self, index: int = 0) -> str:
        """Return the text of sample `index` so far. Characters that a later token could change are held back. Raises
        InvalidRequest if there is no such sample."""
        index = self._sample(index)
        if self._output is not None:
            return next((one.text for one in self._output.outputs if one.index == index), "")
        return "".join(self._texts[index])

    def wait(self) -> RequestOutput:
        """Step the engine until this request is finished, and return its output."""
        while self._output is None:
            self._step()
        return self._output

    def cancel(self, index: int | None = None) -> None:
        """Abort the request, or only sample `index`. What it has generated is kept. Idempotent. Raises InvalidRequest
        if there is no such sample."""
        sample = None if index is None else self._sample(index)
        if self._output is None:
            self._cancel(Abort(self.request_id, sample))

    def _sample(self, index: int) -> int:
        """Return a sample index as int (numpy integers are accepted). Raises InvalidRequest if there is no such
        sample."""
        return _check_whole("index", index, self.num_samples - 1)

    def take(self, piece: StreamPiece) -> None:
        """Add a new piece of a sample. Called by LiveRequests."""
        self._tokens[piece.index] += piece.token_ids
        self._texts[piece.index].append(piece.text)

    def settle(self, output: RequestOutput) -> None:
        """Set the final output. Called by LiveRequests."""
        self._output = output


class LiveRequests:
    """All live requests of one engine. Not thread-safe."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None) -> None:
        self._client, self._tokenizer = client, tokenizer
        self._batch: Batch | None = None
        self._live: dict[str, LiveRequest] = {}
        self._errors: list[QuireError] = []  # of requests that failed in the batch; each step raises one

    @property
    def is_live(self) -> bool:
        return bool(self._live)

    def start(self, request: Submit, prompt: str | None = None) -> LiveRequest:
        """Submit a request. Raises InvalidRequest and starts nothing."""
        if self._batch is None or not self._live:
            self._batch, self._errors = Batch(self._client, self._tokenizer, follow_all=True, keep_outputs=False), []
        self._batch.submit(request, prompt)
        live = self._live[request.request_id] = LiveRequest(request, self.step, self._client.abort)
        return live

    def step(self) -> list[StreamPiece]:
        """Run one engine step for all live requests. Returns the new pieces; none if no request is live. Raises the
        QuireError of a request that failed."""
        batch = self._batch
        if batch is None or not self._live:
            return []
        try:
            with DeferredInterrupt() as interrupt:
                pieces, ended = batch.step(), batch.take_ended()
            interrupt.check()
        except QuireError:
            self._live.clear()
            raise
        for piece in pieces:
            self._live[piece.request_id].take(piece)
        for end in ended:
            self._live.pop(end.output.request_id).settle(end.output)
            self._errors += () if end.error is None else (end.error,)
        if self._errors:
            raise self._errors.pop(0)
        return pieces


def _check_whole(name: str, value: object, high: int) -> int:
    """Return `value` as an int in [0, high]. Raises InvalidRequest for any other value."""
    number = Whole(0, high)(name, value)
    assert number is not None
    return number


def branch_of(source: LiveRequest | RequestOutput, index: int, at_token: int | None) -> tuple[tuple[int, ...], Branch]:
    """Return the tokens that a fork of sample `index` begins with, and the `Branch` that names their source. `at_token`
    is how many tokens of the answer are kept; None: all so far."""
    given: object = source
    if not isinstance(given, LiveRequest | RequestOutput):
        reason = f"must be a request or its output, got {type(given).__name__}"
        raise InvalidRequest("source", reason, "pass what start() or generate() returned")
    if isinstance(source, LiveRequest):
        answer = source.token_ids(index)
    else:
        index = _check_whole("index", index, len(source.outputs) - 1)
        answer = tuple(source.outputs[index].token_ids)
    at_token = len(answer) if at_token is None else _check_whole("at_token", at_token, len(answer))
    tokens = (*source.prompt_token_ids, *answer[:at_token])
    return tokens, Branch(source.request_id, index, len(tokens))
