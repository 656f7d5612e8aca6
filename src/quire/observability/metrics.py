"""The server's metrics: counts requests and tokens, fetches the engine's stats, and renders the /metrics page."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from quire.config.server import MetricNames, ServerConfig
from quire.observability.counts import Counts, SharedCounts
from quire.observability.observed_request import ObservedRequest, phases
from quire.observability.prometheus import EngineMetrics, render
from quire.observability.tracing import NoTracer, Tracer, make_tracer
from quire.types.errors import EngineDead
from quire.types.stats import EngineStats

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # at least this long between two fetches of the engine's stats
SHARE_SECONDS = 1.0  # how often the counts are written for the other edges
_WORST_FIRST = ("error", "abort", "repetition", "length", "stop")


def server_metrics(config: ServerConfig, model_name: str, directory: str | None, edge: int) -> ServerMetrics:
    """Make the metrics and the tracer of one edge from the server's settings.

    Raises ConfigError if a trace endpoint is set and the packages of the `trace` extra are missing.
    """
    shared = None if directory is None else SharedCounts(Path(directory), edge)
    return ServerMetrics(model_name, shared, make_tracer(config.trace_endpoint, model_name), config.metrics_names)


class ServerMetrics:
    """Observes all requests of one edge: counts them, and passes finished and aborted ones to a tracer.

    Thread-safe. With `shared`, `start()` starts a thread that writes the counts to a file for the other edges;
    `close()` ends it.
    """

    def __init__(
        self,
        model_name: str,
        shared: SharedCounts | None = None,
        tracer: Tracer | None = None,
        names: MetricNames = "quire",
    ) -> None:
        self._model_name, self._shared, self._names = model_name, shared, names
        self._tracer = tracer or NoTracer()
        self._counts, self._lock = Counts(), threading.Lock()
        self._restarts = 0
        self._is_up = False
        self._stats: EngineStats | None = None
        self._asked_at = float("-inf")
        self._closed = threading.Event()
        self._sharing_thread = threading.Thread(target=self._share_counts, name="quire-metrics", daemon=True)

    def start(self) -> None:
        if self._shared is not None:
            with self._lock:
                self._shared.take_over(self._counts)
            self._sharing_thread.start()

    def close(self) -> None:
        """Write the last counts and send the last spans. Idempotent."""
        self._closed.set()
        if self._sharing_thread.is_alive():
            self._sharing_thread.join()
        self._tracer.close()

    # ----------------------------------------------------------------------------------- called as requests proceed
    def received(self, endpoint: str) -> None:
        with self._lock:
            self._counts.count("http_requests", endpoint)

    def refused(self, endpoint: str, status: int, code: str) -> None:  # noqa: ARG002 - the observer's signature
        with self._lock:
            if code == "quarantined":
                self._counts.count("quarantined_requests")
            self._counts.count("http_refusals", str(status))

    def http_error(self, status: int, field: str) -> None:
        with self._lock:
            self._counts.count("http_errors", f"{status} {field}")

    def queued(self, record: ObservedRequest) -> None:
        with self._lock:
            self._counts.gauges["num_requests_waiting"] += 1
            self._counts.observe("request_prompt_tokens", record.num_prompt_tokens)
            self._counts.observe("request_params_n", record.sampling.n)
            if record.sampling.max_tokens is not None:
                self._counts.observe("request_params_max_tokens", record.sampling.max_tokens)

    def submitted(self, record: ObservedRequest) -> None:  # noqa: ARG002
        with self._lock:
            self._counts.gauges["num_requests_waiting"] -= 1

    def resubmitted(self, record: ObservedRequest) -> None:  # noqa: ARG002
        with self._lock:
            self._counts.count("request_retries")
            self._counts.gauges["num_requests_waiting"] += 1

    def first_token(self, record: ObservedRequest) -> None:
        if record.first_token_at is not None:
            with self._lock:
                self._counts.observe("time_to_first_token_seconds", record.first_token_at - record.received_at)

    def tokens(self, num_tokens: int, intervals: Sequence[float]) -> None:  # noqa: ARG002
        if intervals:
            with self._lock:
                histogram = self._counts.histograms["inter_token_latency_seconds"]
                for interval in intervals:
                    histogram.observe(interval)

    def finished(self, record: ObservedRequest) -> None:
        reason = next((reason for reason in _WORST_FIRST if reason in record.finish_reasons), "stop")
        with self._lock:
            self._counts.count("request_success", reason)
            self._counts.observe("request_generation_tokens", record.num_output_tokens)
            self._observe_times(record)
        self._tracer.ended(record)

    def aborted(self, record: ObservedRequest, reason: str) -> None:
        with self._lock:
            if reason != "refused":  # a request that the engine refused was answered as a bad request
                is_error = reason in ("engine_down", "quarantined")
                self._counts.count("request_success", "error" if is_error else "abort")
            if reason == "quarantined":
                self._counts.count("quarantined_requests")
            if record.submitted_at is None:
                self._counts.gauges["num_requests_waiting"] -= 1
        self._tracer.ended(record)

    def engine_up(self, generation: int) -> None:
        self._restarts, self._is_up, self._asked_at = generation - 1, True, float("-inf")

    def engine_down(self) -> None:
        self._is_up, self._stats, self._asked_at = False, None, float("-inf")

    # ------------------------------------------------------------------------------------------- called for /metrics
    async def page(self, ask: Callable[[], Awaitable[EngineStats]]) -> bytes:
        """Return the text of all metrics. `ask` fetches the engine's stats; it is called at most once a second."""
        if self._is_up and time.monotonic() - self._asked_at >= POLL_SECONDS:
            self._asked_at = time.monotonic()
            with suppress(EngineDead):  # the engine is down, or busy with a long step: keep its last stats
                self._stats = await ask()
        total = Counts()
        with self._lock:
            total.add_snapshot(self._counts.snapshot(), gauges=True)
        if self._shared is not None:
            self._shared.add_others(total)
        return render(
            total, EngineMetrics(self._stats, self._restarts, is_up=self._is_up), self._model_name, self._names
        )

    # -------------------------------------------------------------------------------------------------------- private
    def _observe_times(self, record: ObservedRequest) -> None:
        end, counts = record.finished_at, self._counts
        if end is None:
            return
        counts.observe("e2e_request_latency_seconds", end - record.received_at)
        first = next((entry.at for entry in record.ledger if entry.kind == "first_token"), record.first_token_at)
        if first is not None:
            if not record.streamed:
                counts.observe("time_to_first_token_seconds", max(first - record.received_at, 0.0))
            num_samples = max(len(record.finish_reasons), 1)
            following = record.num_output_tokens - num_samples
            if following > 0:
                each = max(end - first, 0.0) * num_samples / following
                counts.observe("request_time_per_output_token_seconds", each)
        spent = phases(record.ledger, record.received_at, record.first_token_at, end)
        for name in ("queue", "prefill", "decode", "inference"):
            seconds: float | None = getattr(spent, name)
            if seconds is not None:
                counts.observe(f"request_{name}_time_seconds", seconds)

    def _share_counts(self) -> None:
        assert self._shared is not None
        written = ""
        while True:
            ended = self._closed.wait(SHARE_SECONDS)
            with self._lock:
                text = self._shared.encode(self._counts)
            if text != written:
                try:
                    self._shared.write(text)
                    written = text
                except OSError as error:
                    logger.warning("counts could not be shared: %s", error.strerror)
            if ended:
                return
