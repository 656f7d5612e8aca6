"""Tracing: one OpenTelemetry span per request, with the attribute names of vLLM. Needs the `trace` extra."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from quire import __version__
from quire.observability.observed_request import ObservedRequest, phases
from quire.types.errors import ConfigError
from quire.types.install import install_extra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"


class Tracer(Protocol):
    """Receives every finished or aborted request. Its methods must not block or raise."""

    def ended(self, record: ObservedRequest) -> None: ...

    def close(self) -> None:
        """Send the remaining spans, within a few seconds. Idempotent."""


class NoTracer:
    """The tracer of a server without a trace endpoint: it does nothing."""

    def ended(self, record: ObservedRequest) -> None: ...

    def close(self) -> None: ...


def make_tracer(endpoint: str | None, model_name: str) -> Tracer:
    """Make a tracer that sends spans to an OTLP/HTTP collector, or NoTracer if `endpoint` is None.

    Raises ConfigError if the packages of the `trace` extra are missing.
    """
    if endpoint is None:
        return NoTracer()
    check_installed()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return SpanTracer(OTLPSpanExporter(endpoint=endpoint, timeout=5), model_name)


def check_installed() -> None:
    """Raise ConfigError if the packages of the `trace` extra are missing."""
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        reason = "needs OpenTelemetry, which is not installed"
        raise ConfigError("trace_endpoint", reason, install_extra("trace")) from None


class SpanTracer:
    """Makes one span per request when the request ends. A background thread exports the spans."""

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._model_name = model_name
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "quire", "service.version": __version__}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire", __version__)
        self._epoch = time.time_ns() - time.monotonic_ns()  # the zero of the monotonic clock, in ns since 1970

    def ended(self, record: ObservedRequest) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = record.finished_at if record.finished_at is not None else time.monotonic()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=TraceContextTextMapPropagator().extract({"traceparent": record.traceparent}),
            kind=SpanKind.SERVER,
            start_time=self._date(record.received_at),
            attributes=_attributes(record, self._model_name, end),
        )
        for entry in record.ledger:
            span.add_event(entry.kind, {"amount": entry.amount, "note": entry.note}, self._date(entry.at))
        if "error" in record.finish_reasons:
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._date(end))

    def close(self) -> None:
        self._provider.force_flush(3_000)
        self._provider.shutdown()

    def _date(self, moment: float) -> int:
        """Convert a time on the monotonic clock to nanoseconds since 1970."""
        return self._epoch + int(moment * 1e9)


def _attributes(
    record: ObservedRequest, model_name: str, end: float
) -> dict[str, str | bool | int | float | Sequence[str]]:
    sampling = record.sampling
    spent = phases(record.ledger, record.received_at, record.first_token_at, end)
    first = record.first_token_at
    optional = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.latency.time_in_queue": spent.queue,
        "gen_ai.latency.time_to_first_token": None if first is None else first - record.received_at,
        "gen_ai.latency.time_in_model_prefill": spent.prefill,
        "gen_ai.latency.time_in_model_decode": spent.decode,
        "gen_ai.latency.time_in_model_inference": spent.inference,
    }
    return {
        "gen_ai.request.id": record.request_id,
        "gen_ai.response.model": model_name,
        "gen_ai.operation.name": "chat" if record.endpoint == "chat" else "text_completion",
        "gen_ai.request.n": sampling.n,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.usage.num_sequences": sampling.n,
        "gen_ai.latency.e2e": end - record.received_at,
        "gen_ai.response.finish_reasons": record.finish_reasons,
        **{name: value for name, value in optional.items() if value is not None},
    }
