"""Handles requests for embeddings, scores and classes: reads and tokenizes their texts, queues them, and replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from quire.config.embedding import PoolingModel
from quire.runtime.finished_rows import finish_rows
from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.dispatch.mailbox import Mailbox
from quire.serving.dispatch.observer import RequestRecord
from quire.serving.http.deadlines import Deadlines
from quire.serving.http.endpoint import Endpoint
from quire.serving.http.engine_calls import counted_refusals, read_head, trace_of, until_over, watched
from quire.serving.http.errors import as_failure
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.fields import check_body
from quire.serving.http.json_body import decode_json
from quire.serving.http.request_head import RequestHead
from quire.serving.http.service import Service
from quire.serving.http.validators.values import UnsupportedParameter
from quire.serving.pooled_texts import NOTHING_SAMPLED, PooledText, Rows, TextReader, check_total, cut_up
from quire.types.errors import InvalidRequest
from quire.types.pooling import PoolingParams
from quire.types.request import Submit, pack_tokens


@dataclass(frozen=True, slots=True)
class PoolingCall:
    """One request with its validated fields."""

    reader: TextReader
    given: dict[str, Any]
    limits: dict[str, int]
    name: str  # the model name in the response
    response_id: str
    created: int
    received_at: float

    def params(self, **changes: Any) -> PoolingParams:
        return PoolingParams(self.given.get("dimensions"), **changes)


@dataclass(frozen=True, slots=True)
class PoolingJob:
    """The texts to compute. `write` returns the response from their rows (one per text) and their number of tokens."""

    texts: Sequence[PooledText]
    params: PoolingParams
    write: Callable[[Rows, int], Any]


@dataclass(frozen=True, kw_only=True)
class PoolingEndpoint(Endpoint):
    """An endpoint for models that embed or classify. `read` validates a request and tokenizes its texts in a text
    thread; it raises InvalidRequest with the endpoint's field names."""

    id_prefix: str
    read: Callable[[PoolingCall], PoolingJob]

    def make_handler(self, service: Service) -> Handler:
        return PoolingHandler(service, self)


@dataclass(frozen=True, slots=True)
class _Prepared:
    job: PoolingJob
    model: PoolingModel
    submits: list[Submit]
    warnings: tuple[str, ...]


class PoolingHandler:
    """Handles the requests of one endpoint. When a call ends for any reason, its engine requests are ended too."""

    def __init__(self, service: Service, endpoint: PoolingEndpoint) -> None:
        self._service, self._endpoint = service, endpoint

    async def __call__(self, exchange: Exchange) -> None:
        service, received_at = self._service, time.monotonic()
        dispatcher = service.dispatcher
        service.observer.received(self._endpoint.name)
        with ExitStack() as stack:
            with counted_refusals(service, self._endpoint.name):
                deadlines = Deadlines.of(exchange, service.config.timeouts, received_at)
                stack.enter_context(dispatcher.accept())
                with deadlines.while_preparing() as timeout:
                    async with timeout:
                        prepared = await self._prepare(exchange, received_at)
                exchange.warnings = prepared.warnings
                requests = self._requests(exchange, prepared.submits, received_at)
                dispatcher.enqueue(requests)
            stack.callback(dispatcher.cancel, requests)
            stack.enter_context(deadlines.enforced(dispatcher, requests))
            mailbox = requests[0].mailbox
            async with watched(exchange, mailbox):
                await until_over(mailbox)
                if mailbox.failure is not None:
                    raise as_failure(mailbox.failure)
                body = await service.in_thread(_encode_body, prepared.job, prepared.model, requests)
                await exchange.reply(200, body)

    async def _prepare(self, exchange: Exchange, received_at: float) -> _Prepared:
        service = self._service
        service.pooling_model()
        head = read_head(service, exchange, self._endpoint.query, received_at)
        with service.metered() as meter:
            body = await exchange.read_body(service.limits, meter.add)
            with service.dispatcher.preparing():
                return await service.knowing_adapters(lambda: service.in_thread_for(len(body), self._read, body, head))

    def _read(self, body: bytes, head: RequestHead) -> _Prepared:
        """Return the engine requests of a body, with their warnings. Raises InvalidRequest or ApiError."""
        service, endpoint, limits = self._service, self._endpoint, self._service.limits
        model = service.pooling_model()
        given, warnings = check_body(
            endpoint.fields_by_name, decode_json(body, limits["nesting"]), limits, strict=head.strict
        )
        useless = self._drop_useless(given, model, strict=head.strict)
        call = PoolingCall(
            reader=TextReader(model, service.texts.tokenizer, max_tokens=limits["prompt_tokens"]),
            given=given,
            limits=dict(limits),
            name=self._model_name(given.get("model")),
            response_id=f"{endpoint.id_prefix}-{given.get('request_id', head.request_id)}",
            created=int(datetime.now(UTC).timestamp()),
            received_at=head.received_at,
        )
        job = endpoint.read(call)
        check_total("input", sum(len(text.token_ids) for text in job.texts), limits["prompt_tokens"])
        parts = cut_up(job.texts, model)
        names = head.engine_ids(endpoint.id_prefix, given.get("request_id"), len(parts))
        submits = [
            Submit(
                name,
                pack_tokens(chain.from_iterable(text.token_ids for text in part)),
                NOTHING_SAMPLED,
                priority=given.get("priority", 0),
                cache_salt=head.salt(given.get("cache_salt", "")) if model.by_decoder else "",
                tenant=f"{head.principal}/{names[0]}",  # unique, so that requests share the engine fairly
                pooling=call.reader.work(part, job.params),
            )
            for name, part in zip(names, parts, strict=True)
        ]
        return _Prepared(job, model, submits, (*head.warnings, *warnings, *useless))

    def _model_name(self, asked: str | None) -> str:
        """Return the model name for the response. Raises InvalidRequest for the name of a LoRA adapter."""
        name = self._service.served_name(asked)
        if self._service.adapter_of(name):
            reason = f"{name!r:.80} is a LoRA adapter, and adapters are for calls that generate text"
            raise InvalidRequest("model", reason, f"send {self._service.names[0]!r:.80}, or leave model out")
        return name

    def _drop_useless(self, given: dict[str, Any], model: PoolingModel, *, strict: bool) -> list[str]:
        """Remove fields that have no effect with this model and server. Returns warnings about them; if `strict`,
        raises the first one as an error."""
        policy = self._service.engine().policy
        reasons = (
            {"priority": f"has no effect with the {policy!r} policy of this server"} if policy != "priority" else {}
        )
        if not model.by_decoder:
            reasons["cache_salt"] = "has no effect on an encoder, which caches no prompts"
        useless = [
            UnsupportedParameter(name, reason, "leave it out") for name, reason in reasons.items() if given.pop(name, 0)
        ]
        if useless and strict:
            raise useless[0]
        return [str(error) for error in useless]

    def _requests(self, exchange: Exchange, submits: Sequence[Submit], received_at: float) -> list[InFlightRequest]:
        mailbox, trace = Mailbox(asyncio.get_running_loop(), len(submits)), trace_of(exchange)
        return [
            InFlightRequest(
                submit,
                RequestRecord(
                    submit.request_id,
                    self._endpoint.name,
                    len(submit.prompt_token_ids),
                    submit.sampling,
                    False,
                    received_at,
                    name=exchange.request_id,
                    traceparent=trace,
                ),
                mailbox,
                place,
            )
            for place, submit in enumerate(submits)
        ]


def _encode_body(job: PoolingJob, model: PoolingModel, requests: Sequence[InFlightRequest]) -> bytes:
    """Return the body of the response."""
    numbers = b"".join(request.finished.pooled for request in requests if request.finished is not None)
    rows = np.frombuffer(numbers, np.float32).reshape(len(job.texts), -1)
    if model.by_decoder:
        rows = finish_rows(rows, model.settings, job.params)
    return msgspec.json.encode(job.write(rows, sum(len(text.token_ids) for text in job.texts)))
