"""Requests that are computed step by step under their user's eyes, to be branched and ended while they run."""

from __future__ import annotations

from collections.abc import Callable

from quire.serving.batch import Batch
from quire.serving.client import EngineClient
from quire.serving.interrupts import DeferredInterrupt
from quire.serving.outputs import StreamPiece
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest, QuireError
from quire.types.output import RequestOutput
from quire.types.request import Abort, Branch, Submit


class LiveRequest:
    """One request. It goes on while its engine is stepped, by whichever request's `wait` or by `LLM.step`."""

    def __init__(self, request: Submit, step: Callable[[], object], cancel: Callable[[Abort], None]) -> None:
        self._request, self._step, self._cancel = request, step, cancel
        self._tokens: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self._texts: list[list[str]] = [[] for _ in range(request.sampling.n)]
        self._output: RequestOutput | None = None

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Of a fork: with the tokens it kept."""
        return tuple(self._request.prompt_token_ids)

    @property
    def num_samples(self) -> int:
        return len(self._tokens) if self._output is None else len(self._output.outputs)

    @property
    def is_finished(self) -> bool:
        return self._output is not None

    @property
    def output(self) -> RequestOutput | None:
        """What came of it, once it is finished."""
        return self._output

    def token_ids(self, index: int = 0) -> tuple[int, ...]:
        """What sample `index` has generated so far. Samples that are ranked have nothing before the end."""
        if self._output is not None:
            return tuple(next((one.token_ids for one in self._output.outputs if one.index == index), ()))
        return tuple(self._tokens[index])

    def text(self, index: int = 0) -> str:
        """The same as text, as far as it is certain."""
        if self._output is not None:
            return next((one.text for one in self._output.outputs if one.index == index), "")
        return "".join(self._texts[index])

    def wait(self) -> RequestOutput:
        """Step the engine until this request is finished."""
        while self._output is None:
            self._step()
        return self._output

    def cancel(self, index: int | None = None) -> None:
        """End it now, or only one of its samples; what it has generated stays. Idempotent."""
        if self._output is None:
            self._cancel(Abort(self.request_id, index))

    def take(self, piece: StreamPiece) -> None:
        """News of it, from its engine."""
        self._tokens[piece.index] += piece.token_ids
        self._texts[piece.index].append(piece.text)

    def settle(self, output: RequestOutput) -> None:
        """Its end, from its engine."""
        self._output = output


class LiveRequests:
    """All live requests of one engine. One caller at a time."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None) -> None:
        self._client, self._tokenizer = client, tokenizer
        self._batch: Batch | None = None
        self._live: dict[str, LiveRequest] = {}

    @property
    def is_live(self) -> bool:
        return bool(self._live)

    def start(self, request: Submit, prompt: str | None = None) -> LiveRequest:
        """Raises InvalidRequest and starts nothing."""
        if self._batch is None or not self._live:
            self._batch = Batch(self._client, self._tokenizer, follow_all=True)
        self._batch.submit(request, prompt)
        live = self._live[request.request_id] = LiveRequest(request, self.step, self._client.abort)
        return live

    def step(self) -> list[StreamPiece]:
        """Compute one step of all of them. Returns what is new; nothing when none is live. Raises QuireError for one
        that failed."""
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
        for output in ended:
            self._live.pop(output.request_id).settle(output)
        if batch.errors:
            raise batch.errors.pop(0)
        return pieces


def branch_of(source: LiveRequest | RequestOutput, index: int, at_token: int | None) -> tuple[tuple[int, ...], Branch]:
    """The tokens a fork begins with, and where they stand. `at_token` counts tokens of the answer; None: all so far."""
    if isinstance(source, LiveRequest):
        answer = source.token_ids(index) if 0 <= index < source.num_samples else None
    else:
        found = next((one for one in source.outputs if one.index == index), None)
        answer = None if found is None else tuple(found.token_ids)
    if answer is None:
        raise InvalidRequest("index", f"is {index}, but the request has no such sample", "choose another")
    if at_token is None:
        at_token = len(answer)
    if not 0 <= at_token <= len(answer):
        reason = f"is {at_token}, but {len(answer)} tokens are generated"
        raise InvalidRequest("at_token", reason, f"choose a value in [0, {len(answer)}]")
    tokens = (*source.prompt_token_ids, *answer[:at_token])
    return tokens, Branch(source.request_id, index, len(tokens))
