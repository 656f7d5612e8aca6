"""The endpoints that generate: read, prepare, enter the desk, and answer whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime

from quire.serving.desk.mailbox import Mailbox
from quire.serving.desk.observer import RequestRecord
from quire.serving.desk.ticket import Ticket
from quire.serving.http.exchange import ClientGone, Exchange
from quire.serving.http.openai.answer import AnswerBuilder
from quire.serving.http.openai.caller import Caller, GenerationEndpoint
from quire.serving.http.openai.event_stream import EventStream
from quire.serving.http.openai.failures import as_failure, as_refusal
from quire.serving.http.openai.job import Job, prepare_job
from quire.serving.http.service import Service
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest, QuireError


class Generation:
    """Handles one endpoint. Whatever happens, the requests it entered end with it."""

    def __init__(self, service: Service, builder: AnswerBuilder, endpoint: GenerationEndpoint) -> None:
        self._service, self._builder, self._endpoint = service, builder, endpoint

    async def __call__(self, exchange: Exchange) -> None:
        desk, received_at = self._service.desk, time.monotonic()
        self._service.observer.received(self._endpoint)
        with ExitStack() as stack:
            with self._counted_refusals():
                stack.enter_context(desk.visit())
                job = await self._prepare(exchange, received_at)
                exchange.scope["quire.request_id"] = job.request_id
                trace = exchange.headers.get(b"traceparent", b"")[:64].decode("latin-1")
                tickets = self._tickets(job, received_at, trace)
                desk.enter(tickets)
            remembered = self._service.answers.begin(exchange.principal, _names(job, tickets), tickets)
            stack.callback(self._service.answers.end, remembered)
            stack.callback(desk.leave, tickets)
            await self._reply(exchange, job, tickets, tickets[0].mailbox)

    @contextmanager
    def _counted_refusals(self) -> Iterator[None]:
        """What is refused here never reached the engine."""
        try:
            yield
        except QuireError as error:
            refusal = as_refusal(error)
            self._service.observer.refused(self._endpoint, refusal.status, refusal.code)
            raise refusal from None

    async def _reply(self, exchange: Exchange, job: Job, tickets: Sequence[Ticket], mailbox: Mailbox) -> None:
        """Answer, and notice when the client hangs up meanwhile."""
        watch = asyncio.create_task(exchange.until_gone())
        watch.add_done_callback(lambda _: mailbox.hang_up())
        try:
            if job.wishes.stream:
                await EventStream(exchange, job, tickets, self._service.limits, self._builder.extras).run()
            else:
                await self._answer(exchange, job, tickets, mailbox)
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def _prepare(self, exchange: Exchange, received_at: float) -> Job:
        service = self._service
        service.engine()
        lenient = exchange.is_asked("lenient") or service.config.lenient
        caller = Caller(
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
            with service.desk.preparing():
                job = await service.in_thread(prepare_job, service, self._endpoint, body, caller, created)
                return job if job.structure is None else await self._constrained(job, job.structure)

    async def _constrained(self, job: Job, structure: StructuredOutputsParams) -> Job:
        """The job once its structure was checked: the text threads go on with others meanwhile."""
        try:
            begun = await self._service.in_thread(self._service.texts.checker.begin, structure)
            return job.with_grammar(await asyncio.wrap_future(begun))
        except InvalidRequest as error:
            raise job.refusal(error) from None

    def _tickets(self, job: Job, received_at: float, traceparent: str) -> list[Ticket]:
        wishes = job.wishes
        mailbox = Mailbox(asyncio.get_running_loop(), len(job.submits))
        render = self._builder.renderer(wishes) if wishes.wants_logprobs else None
        tickets: list[Ticket] = []
        for submit in job.submits:
            record = RequestRecord(
                submit.request_id,
                self._endpoint,
                len(submit.prompt_token_ids),
                submit.sampling,
                wishes.stream,
                received_at,
                name=job.request_id,
                traceparent=traceparent,
            )
            first = len(tickets) * submit.sampling.n
            tickets.append(Ticket(submit, record, mailbox, first, wishes.stream, job.interval, render))
        return tickets

    # -------------------------------------------------------------------------------------------------- answering
    async def _answer(self, exchange: Exchange, job: Job, tickets: Sequence[Ticket], mailbox: Mailbox) -> None:
        while not mailbox.is_over:
            await mailbox.wait()
        if mailbox.is_gone:
            raise ClientGone
        if mailbox.failure is not None:
            raise as_failure(job.named(mailbox.failure))
        body = await self._service.in_thread(self._builder.build, job.wishes, tickets)
        await exchange.reply(200, body)


def _names(job: Job, tickets: Sequence[Ticket]) -> list[str]:
    """What a client may call its request by: its own name for it, the answer's id, and the engine's."""
    return [job.request_id, job.wishes.answer_id, *(ticket.submit.request_id for ticket in tickets)]
