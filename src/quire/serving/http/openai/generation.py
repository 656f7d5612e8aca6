"""The two endpoints that generate: read, prepare, enter the desk, and answer whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime

from quire.serving.desk.desk import Draining, QueueFull
from quire.serving.desk.mailbox import Failure, Mailbox
from quire.serving.desk.observer import RequestRecord
from quire.serving.desk.ticket import Ticket
from quire.serving.http.errors import ApiError, as_api_error, too_busy
from quire.serving.http.exchange import ClientGone, Exchange
from quire.serving.http.openai.answer import AnswerBuilder
from quire.serving.http.openai.job import Caller, GenerationEndpoint, Job, prepare_job
from quire.serving.http.openai.stream import EventWriter
from quire.serving.http.service import Service
from quire.types.errors import QuireError

_FAILURES = {
    "engine_down": (503, "the engine was restarted while it worked on this request; send it again", "engine_restarted"),
    "engine_error": (500, "the request failed inside the engine; the cause is in the server's log", "engine_error"),
    "admin": (503, "the request was ended by an administrator", "aborted"),
    "slow_reader": (503, "the stream was read too slowly", "slow_reader"),
    "drain": (503, "the server shut down before the request was done", "shutting_down"),
}


class Generation:
    """Handles /v1/chat/completions or /v1/completions. Whatever happens, the requests it entered end with it."""

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
            stack.callback(desk.leave, tickets)
            await self._reply(exchange, job, tickets, tickets[0].mailbox)

    @contextmanager
    def _counted_refusals(self) -> Iterator[None]:
        """What is refused here never reached the engine."""
        try:
            yield
        except QuireError as error:
            refusal = _as_refusal(error)
            self._service.observer.refused(self._endpoint, refusal.status, refusal.code)
            raise refusal from None

    async def _reply(self, exchange: Exchange, job: Job, tickets: Sequence[Ticket], mailbox: Mailbox) -> None:
        """Answer, and notice when the client hangs up meanwhile."""
        watch = asyncio.create_task(exchange.until_gone())
        watch.add_done_callback(lambda _: mailbox.hang_up())
        try:
            if job.wishes.stream:
                await self._stream(exchange, job, tickets, mailbox)
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
        )
        with service.metered() as meter:
            body = await exchange.read_body(service.limits, meter.add)
            created = int(datetime.now(UTC).timestamp())
            with service.desk.preparing():
                return await service.in_thread(prepare_job, service, self._endpoint, body, caller, created)

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
            raise _failed(mailbox.failure)
        body = await self._service.in_thread(self._builder.build, job.wishes, tickets)
        await exchange.reply(200, body)

    async def _stream(self, exchange: Exchange, job: Job, tickets: Sequence[Ticket], mailbox: Mailbox) -> None:
        """Nothing is sent before the first news, so that an early failure still has a status of its own."""
        stall, writer = self._service.limits["stall_seconds"], EventWriter(job.wishes, tickets)
        while True:
            await mailbox.wait()
            if mailbox.is_gone:
                raise ClientGone
            is_over = mailbox.is_over
            data = writer.events(mailbox.take())
            if mailbox.failure is not None:
                if not exchange.has_started:
                    raise _failed(mailbox.failure)
                broken = data + writer.failure(_failed(mailbox.failure))
                await exchange.write(broken, is_last=True, stall_seconds=stall)
                return
            if not data and not is_over:
                continue
            if not exchange.has_started:
                await exchange.start_stream()
                data = writer.opening() + data
            if is_over:
                data += writer.closing()
            await exchange.write(data, is_last=is_over, stall_seconds=stall)
            if is_over:
                return


def _as_refusal(error: QuireError) -> ApiError:
    if isinstance(error, QueueFull):
        return too_busy(str(error), error.retry_after)
    if isinstance(error, Draining):
        return ApiError(503, str(error), code="shutting_down", headers=((b"retry-after", b"1"),))
    return as_api_error(error)


def _failed(failure: Failure) -> ApiError:
    if failure.error is not None:
        return as_api_error(failure.error)
    status, message, code = _FAILURES[failure.kind]
    return ApiError(status, message, code=code)
