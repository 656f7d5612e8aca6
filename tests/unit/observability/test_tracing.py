from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quire.observability.metrics import ServerMetrics
from quire.observability.tracing import NoTracer, make_tracer
from quire.types.errors import ConfigError
from tests.unit.observability.records import ended


def test_without_an_endpoint_nothing_is_traced_or_imported() -> None:
    assert isinstance(make_tracer(None, "tiny"), NoTracer)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(ConfigError, match=r"\.\[trace\]"):
        make_tracer("http://127.0.0.1:4318/v1/traces", "tiny")


def test_spans_reach_a_collector_over_http() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name the library gives it
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        tracer = make_tracer(f"http://127.0.0.1:{server.server_address[1]}/v1/traces", "tiny")
        tracer.ended(ended(request_id="the-request"))
        tracer.close()
        server.shutdown()
        thread.join()
    ((path, body),) = received
    assert path == "/v1/traces"
    assert b"the-request" in body or body[:2] == b"\x1f\x8b"


def test_a_request_becomes_a_span_that_continues_its_callers_trace() -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from quire.observability.tracing import SpanTracer

    exporter = memory.InMemorySpanExporter()
    tracer = SpanTracer(exporter, "tiny")
    metrics = ServerMetrics("tiny", tracer=tracer)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    metrics.finished(ended(traceparent=f"00-{trace_id}-b7ad6b7169203331-01"))
    metrics.aborted(ended(finish_reasons=("error",), finished_at=None), "engine_down")
    metrics.close()
    first, second = exporter.get_finished_spans()
    assert f"{first.context.trace_id:032x}" == trace_id
    assert (first.end_time - first.start_time) / 1e9 == pytest.approx(2.0, abs=1e-3)
    assert first.attributes["gen_ai.request.id"] == "r1"
    assert first.attributes["gen_ai.usage.completion_tokens"] == 6
    assert first.attributes["gen_ai.latency.time_in_queue"] == pytest.approx(0.5)
    assert [event.name for event in first.events][:2] == ["queued", "admitted"]
    assert first.status.is_unset
    assert not second.status.is_ok
