"""Every metric the server shows, in one table. Names are part of the API: a dashboard somewhere depends on each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.types.stats import STEP_SIZES

PREFIX = "quire:"
Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["edge", "engine"]  # counted by the HTTP edges and added up, or told by the engine

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, without the prefix; counters are exposed with `_total` behind their name."""

    name: str
    kind: Kind
    help: str
    source: Source = "edge"
    label: str | None = None  # besides model_name
    bounds: tuple[float, ...] = ()  # upper bounds of a histogram's buckets

    @property
    def exposed(self) -> str:
        return f"{PREFIX}{self.name}" + ("_total" if self.kind == "counter" else "")


METRICS: tuple[Metric, ...] = (
    Metric("num_requests_running", "gauge", "Requests in the running batch.", "engine"),
    Metric("num_requests_waiting", "gauge", "Requests that wait, in the server's waiting room or in the engine."),
    Metric("kv_cache_usage_perc", "gauge", "Share of the KV cache's blocks in use; 1 is all.", "engine"),
    Metric("kv_cache_waste_perc", "gauge", "Share of the slots in blocks in use that hold no token.", "engine"),
    Metric("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache.", "engine"),
    Metric("prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache.", "engine"),
    Metric("prefix_cache_evicted_blocks", "counter", "Cached blocks that were given away.", "engine"),
    Metric("prefix_cache_pinned_blocks", "gauge", "Blocks held for resident prefixes.", "engine"),
    Metric("prefix_cache_pinned_prefixes", "gauge", "Prefixes that stay resident.", "engine"),
    Metric("prefix_cache_tier_hits", "counter", "Those tokens, by where they were found.", "engine", "tier"),
    Metric("cache_tier_used_blocks", "gauge", "Blocks that host memory and disk hold now.", "engine", "tier"),
    Metric("cache_tier_held_blocks", "gauge", "Host blocks that a request parked or that are being moved.", "engine"),
    Metric("cache_tier_moved_blocks", "counter", "Blocks that were moved between the tiers, by way.", "engine", "way"),
    Metric("cache_tier_moved_bytes", "counter", "Their bytes.", "engine", "way"),
    Metric("cache_tier_evicted_blocks", "counter", "Blocks that host memory and disk gave away.", "engine", "tier"),
    Metric("cache_tier_failures", "counter", "What a tier could not do, by reason.", "engine", "reason"),
    Metric("num_swaps", "counter", "Preemptions that moved blocks to host memory.", "engine"),
    Metric("spec_decode_num_drafts", "counter", "Drafts that were verified.", "engine"),
    Metric("spec_decode_num_draft_tokens", "counter", "Tokens guessed ahead and verified.", "engine"),
    Metric("spec_decode_num_accepted_tokens", "counter", "Those that turned out right.", "engine"),
    Metric("num_preemptions", "counter", "Times a running request lost its blocks to another.", "engine"),
    Metric("prompt_tokens", "counter", "Prompt tokens computed, recomputation included.", "engine"),
    Metric("generation_tokens", "counter", "Tokens generated.", "engine"),
    Metric("engine_steps", "counter", "Forward passes of the engine.", "engine"),
    Metric("engine_step_seconds", "counter", "Seconds spent in them.", "engine"),
    Metric("engine_up", "gauge", "1 while the engine takes requests, else 0.", "engine"),
    Metric("engine_restarts", "counter", "Times the engine was started again after it ended.", "engine"),
    Metric("request_success", "counter", "Requests that ended, by how.", label="finished_reason"),
    Metric("http_requests", "counter", "Requests whose head was read, by endpoint.", label="endpoint"),
    Metric("http_refusals", "counter", "Requests answered with an error before they ran, by status.", label="code"),
    Metric("time_to_first_token_seconds", "histogram", "Receipt to first token.", bounds=SECONDS),
    Metric("inter_token_latency_seconds", "histogram", "Between two tokens of one sample.", bounds=SECONDS),
    Metric(
        "request_time_per_output_token_seconds",
        "histogram",
        "First token to last, by the tokens after the first; per request.",
        bounds=SECONDS,
    ),
    Metric("e2e_request_latency_seconds", "histogram", "Receipt to the last token.", bounds=SECONDS),
    Metric("request_queue_time_seconds", "histogram", "Receipt to the start of the prompt.", bounds=SECONDS),
    Metric("request_prefill_time_seconds", "histogram", "Start of the prompt to first token.", bounds=SECONDS),
    Metric("request_decode_time_seconds", "histogram", "First token to the last.", bounds=SECONDS),
    Metric("request_inference_time_seconds", "histogram", "Start of the prompt to the last token.", bounds=SECONDS),
    Metric("request_prompt_tokens", "histogram", "Tokens of a request's prompt.", bounds=TOKENS),
    Metric("request_generation_tokens", "histogram", "Tokens a request generated, all samples.", bounds=TOKENS),
    Metric("request_params_n", "histogram", "Samples asked for.", bounds=SAMPLES),
    Metric("request_params_max_tokens", "histogram", "max_tokens asked for.", bounds=TOKENS),
    Metric("iteration_tokens_total", "histogram", "Tokens computed in one step.", "engine", bounds=STEP_SIZES),
)
FINISHED_REASONS = ("stop", "length", "repetition", "abort", "error")
