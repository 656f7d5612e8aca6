"""The endpoints that generate: read, prepare, enter the dispatcher, and answer whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.dispatch.mailbox import Mailbox
from quire.serving.dispatch.observer import RequestRecord
from quire.serving.http.deadlines import Deadlines
from quire.serving.http.errors import as_failure, as_refusal
from quire.serving.http.exchange import ClientGone, Exchange
from quire.serving.http.generation.event_stream import EventStream
from quire.serving.http.generation.job import Job, prepare_job
from quire.serving.http.generation.response import ResponseBuilder
from quire.serving.http.request_head import GenerationEndpoint, RequestHead
from quire.serving.http.service import Service
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest, QuireError


class GenerationHandler:
    """Handles one endpoint. Whatever happens, the requests it entered end with it."""

    def __init__(self, service: Service, builder: ResponseBuilder, endpoint: GenerationEndpoint) -> None:
        self._service, self._builder, self._endpoint = service, builder, endpoint

    async def __call__(self, exchange: Exchange) -> None:
        dispatcher, received_at = self._service.dispatcher, time.monotonic()
        self._service.observer.received(self._endpoint)
        with ExitStack() as stack:
            with self._counted_refusals():
                deadlines = Deadlines.of(exchange, self._service.config.timeouts, received_at)
                stack.enter_context(dispatcher.accept())
                with deadlines.while_preparing() as timeout:
                    async with timeout:
                        job = await self._prepare(exchange, received_at)
                exchange.scope["quire.request_id"] = job.request_id
                trace = exchange.headers.get(b"traceparent", b"")[:64].decode("latin-1")
                requests = self._requests(job, received_at, trace)
                dispatcher.enqueue(requests)
            recent = self._service.recent_requests.begin(exchange.principal, _names(job, requests), requests)
            stack.callback(self._service.recent_requests.end, recent)
            stack.callback(dispatcher.cancel, requests)
            stack.enter_context(deadlines.enforced(dispatcher, requests))
            await self._reply(exchange, job, requests, requests[0].mailbox)

    @contextmanager
    def _counted_refusals(self) -> Iterator[None]:
        """What is refused here never reached the engine."""
        try:
            yield
        except QuireError as error:
            refusal = as_refusal(error)
            self._service.observer.refused(self._endpoint, refusal.status, refusal.code)
            raise refusal from None

    async def _reply(self, exchange: Exchange, job: Job, requests: Sequence[InFlightRequest], mailbox: Mailbox) -> None:
        """Answer, and notice when the client hangs up meanwhile."""
        watch = asyncio.create_task(exchange.until_gone())
        watch.add_done_callback(lambda _: mailbox.hang_up())
        try:
            if job.options.stream:
                await EventStream(exchange, job, requests, self._service.limits, self._builder.extras).run()
            else:
                await self._answer(exchange, job, requests, mailbox)
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def _prepare(self, exchange: Exchange, received_at: float) -> Job:
        service = self._service
        service.engine()
        lenient = exchange.is_asked("lenient") or service.config.lenient
        head = RequestHead(
            request_id=exchange.request_id,
            named_it="quire.given_id" in exchange.scope,
            principal=exchange.principal,
            explain=exchange.is_asked("explain"),
            lenient=lenient,
            received_at=received_at,
            warnings=exchange.check_query("explain", "lenient", lenient=lenient),
            shares_cache=service.config.access.shares_cache,
        )
        with service.metered() as meter:
            body = await exchange.read_body(service.limits, meter.add)
            created = int(datetime.now(UTC).timestamp())
            with service.dispatcher.preparing():
                job = await service.in_thread_for(len(body), prepare_job, service, self._endpoint, body, head, created)
                return job if job.structure is None else await self._constrained(job, job.structure)

    async def _constrained(self, job: Job, structure: StructuredOutputsParams) -> Job:
        """The job once its structure was checked: the text threads go on with others meanwhile."""
        try:
            begun = await self._service.in_thread(self._service.texts.checker.begin, structure)
            return job.with_grammar(await asyncio.wrap_future(begun))
        except InvalidRequest as error:
            raise job.refusal(error) from None

    def _requests(self, job: Job, received_at: float, traceparent: str) -> list[InFlightRequest]:
        options = job.options
        mailbox = Mailbox(asyncio.get_running_loop(), len(job.submits))
        render = self._builder.renderer(options) if options.wants_logprobs else None
        requests: list[InFlightRequest] = []
        for submit in job.submits:
            record = RequestRecord(
                submit.request_id,
                self._endpoint,
                len(submit.prompt_token_ids),
                submit.sampling,
                options.stream,
                received_at,
                name=job.request_id,
                traceparent=traceparent,
            )
            first = len(requests) * submit.sampling.n
            requests.append(InFlightRequest(submit, record, mailbox, first, options.stream, job.interval, render))
        return requests

    # -------------------------------------------------------------------------------------------------- answering
    async def _answer(
        self, exchange: Exchange, job: Job, requests: Sequence[InFlightRequest], mailbox: Mailbox
    ) -> None:
        while not mailbox.is_over:
            await mailbox.wait()
        if mailbox.is_gone:
            raise ClientGone
        if mailbox.failure is not None:
            raise as_failure(job.named(mailbox.failure))
        body = await self._service.in_thread(self._builder.build, job.options, requests)
        await exchange.reply(200, body)


def _names(job: Job, requests: Sequence[InFlightRequest]) -> list[str]:
    """What a client may call its request by: its own name for it, the answer's id, and the engine's."""
    return [job.request_id, job.options.answer_id, *(request.submit.request_id for request in requests)]
