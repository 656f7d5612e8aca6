"""Handles requests to generate: reads and prepares a request, queues it, and replies with a whole response or a
stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.dispatch.mailbox import Mailbox
from quire.serving.dispatch.observer import RequestRecord
from quire.serving.http.deadlines import Deadlines
from quire.serving.http.endpoint import Endpoint
from quire.serving.http.engine_calls import counted_refusals, read_head, trace_of, until_over, watched
from quire.serving.http.errors import as_failure
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.generation.event_stream import EventStream
from quire.serving.http.generation.job import Job, prepare_job
from quire.serving.http.generation.settings import GenerationSettings
from quire.serving.http.remote_prefill import RemotePrefill, headers_of
from quire.serving.http.service import Service
from quire.serving.text.answer_grammar import AnswerPlan
from quire.types.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class GenerationEndpoint(Endpoint):
    """An endpoint that generates. All such endpoints share one request path: see `GenerationHandler`."""

    generation: GenerationSettings

    def make_handler(self, service: Service) -> Handler:
        return GenerationHandler(service, self)


class GenerationHandler:
    """Handles the requests of one endpoint. When a call ends for any reason, its engine requests are ended too."""

    def __init__(self, service: Service, endpoint: GenerationEndpoint) -> None:
        self._service, self._endpoint = service, endpoint
        self._format = endpoint.generation.make_format(service)
        prefill = service.config.prefill
        self._prefill = None if prefill is None else RemotePrefill(prefill)

    async def __call__(self, exchange: Exchange) -> None:
        dispatcher, received_at = self._service.dispatcher, time.monotonic()
        self._service.observer.received(self._endpoint.name)
        with ExitStack() as stack:
            with self._counted_refusals():
                deadlines = Deadlines.of(exchange, self._service.config.timeouts, received_at)
                stack.enter_context(dispatcher.accept())
                with deadlines.while_preparing() as timeout:
                    async with timeout:
                        job = await self._prepare(exchange, received_at)
                        if self._prefill is not None:
                            job = await self._prefilled(exchange, job, self._prefill)
                stack.enter_context(self._service.holding_pixels(job.num_pixel_bytes))
                exchange.scope["quire.request_id"] = job.request_id
                exchange.warnings = job.options.warnings
                requests = self._requests(job, received_at, trace_of(exchange))
                dispatcher.enqueue(requests)
            recent = self._service.recent_requests.begin(exchange.principal, _names(job, requests), requests)
            stack.callback(self._service.recent_requests.end, recent)
            stack.callback(dispatcher.cancel, requests)
            stack.enter_context(deadlines.enforced(dispatcher, requests))
            await self._reply(exchange, job, requests, requests[0].mailbox)

    def _counted_refusals(self) -> AbstractContextManager[None]:
        return counted_refusals(self._service, self._endpoint.name, self._endpoint.generation.in_own_names)

    async def _reply(self, exchange: Exchange, job: Job, requests: Sequence[InFlightRequest], mailbox: Mailbox) -> None:
        async with watched(exchange, mailbox):
            if job.options.stream:
                stream = self._format.stream(job.options, requests)
                await EventStream(exchange, job, requests, self._service.limits, stream).run()
            else:
                await self._reply_whole(exchange, job, requests, mailbox)

    async def _prepare(self, exchange: Exchange, received_at: float) -> Job:
        """Read the body and return its job. Raises QuireError or ClientGone."""
        service = self._service
        service.generating_engine()
        head = read_head(service, exchange, self._endpoint.query, received_at)
        with service.metered() as meter:
            body = await exchange.read_body(service.limits, meter.add)
            with service.dispatcher.preparing():
                settings, fields = self._endpoint.generation, self._endpoint.fields_by_name
                job = await service.knowing_adapters(
                    lambda: service.in_thread_of(body, prepare_job, service, settings, fields, body, head)
                )
                return job if job.plan is None else await self._constrained(job, job.plan)

    async def _prefilled(self, exchange: Exchange, job: Job, prefill: RemotePrefill) -> Job:
        """Have prefill servers compute the prompts of the job that are long enough. If that fails, the engine computes
        them."""
        salt = job.options.parameters.get("cache_salt", "")
        return replace(job, submits=await prefill.compute(job.submits, headers_of(exchange), salt))

    async def _constrained(self, job: Job, plan: AnswerPlan) -> Job:
        """Return the job with its grammar, which a checker process builds and validates so that text threads stay
        free."""
        try:
            begun = await self._service.in_thread(self._service.texts.checker.begin, plan)
            return job.with_grammar(await asyncio.wrap_future(begun))
        except InvalidRequest as error:
            raise job.refusal(error) from None

    def _requests(self, job: Job, received_at: float, traceparent: str) -> list[InFlightRequest]:
        """Return the engine requests of a job, which share one mailbox."""
        options = job.options
        mailbox = Mailbox(asyncio.get_running_loop(), len(job.submits))
        render = self._format.logprobs_renderer(options) if options.wants_logprobs else None
        make_watch = None if options.reading is None else options.reading.watch_maker()
        requests: list[InFlightRequest] = []
        for submit in job.submits:
            record = RequestRecord(
                submit.request_id,
                self._endpoint.name,
                len(submit.prompt_token_ids),
                submit.sampling,
                options.stream,
                received_at,
                name=job.request_id,
                traceparent=traceparent,
            )
            first = len(requests) * submit.sampling.n
            requests.append(
                InFlightRequest(submit, record, mailbox, first, options.stream, job.interval, render, make_watch)
            )
        return requests

    async def _reply_whole(
        self, exchange: Exchange, job: Job, requests: Sequence[InFlightRequest], mailbox: Mailbox
    ) -> None:
        await until_over(mailbox)
        if mailbox.failure is not None:
            raise as_failure(job.named(mailbox.failure))
        body = await self._service.in_thread(self._format.body, job.options, requests)
        await exchange.reply(200, body)


def _names(job: Job, requests: Sequence[InFlightRequest]) -> list[str]:
    """Return the ids by which a client may fork its request: its own id, that of the response, and those in the
    engine."""
    return [job.request_id, job.options.response_id, *(request.submit.request_id for request in requests)]
