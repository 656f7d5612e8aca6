"""The table of all metrics that the server exposes. Metric names and labels are part of the API and do not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.types.stats import STEP_SIZES

PREFIX = "quire:"
Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["edge", "engine"]  # "edge": counted by each edge and summed; "engine": reported by the engine

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128)
_DIRECTIONS = (
    "saved (device to host), loaded (host to device), stored (host to disk), fetched (disk to host), put (host to "
    "other engines), got (other engines to host)"
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `name` is the exposed name without the prefix and, for a counter, without the suffix `_total`."""

    name: str
    kind: Kind
    help: str
    source: Source = "edge"
    label: str | None = None  # its label besides model_name; two labels are separated by a space
    bounds: tuple[float, ...] = ()  # upper bounds of a histogram's buckets

    @property
    def exposed(self) -> str:
        return f"{PREFIX}{self.name}" + ("_total" if self.kind == "counter" else "")


METRICS: tuple[Metric, ...] = (
    Metric("num_requests_running", "gauge", "Requests that the engine is computing now.", "engine"),
    Metric(
        "num_requests_waiting",
        "gauge",
        "Requests that wait for the engine, queued in the server or in the engine.",
    ),
    Metric(
        "kv_cache_usage_perc",
        "gauge",
        "Share of the KV cache blocks in use, from 0 to 1.",
        "engine",
    ),
    Metric("kv_cache_capacity_tokens", "gauge", "Tokens that the KV cache on the device can hold.", "engine"),
    Metric(
        "kv_cache_waste_perc",
        "gauge",
        "Share of the token slots in used KV cache blocks that hold no token, from 0 to 1.",
        "engine",
    ),
    Metric(
        "engine_sleep_level",
        "gauge",
        "Sleep level of the engine: 0 awake, 1 asleep, 2 asleep and without weights.",
        "engine",
    ),
    Metric("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache.", "engine"),
    Metric("prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache.", "engine"),
    Metric("prefix_cache_evicted_blocks", "counter", "KV blocks that were evicted from the prefix cache.", "engine"),
    Metric("prefix_cache_pinned_blocks", "gauge", "KV blocks that pinned prefixes hold.", "engine"),
    Metric("prefix_cache_pinned_prefixes", "gauge", "Prefixes that are pinned in the prefix cache.", "engine"),
    Metric(
        "prefix_cache_tier_hits",
        "counter",
        "Prompt tokens found in the prefix cache, by the tier that held them: device, host, disk or remote.",
        "engine",
        "tier",
    ),
    Metric("cache_tier_used_blocks", "gauge", "KV blocks that a cache tier (host or disk) holds.", "engine", "tier"),
    Metric(
        "cache_tier_held_blocks",
        "gauge",
        "KV blocks in host memory that a preempted request left there or that are being copied.",
        "engine",
    ),
    Metric(
        "cache_tier_moved_blocks",
        "counter",
        f"KV blocks copied between cache tiers, by direction: {_DIRECTIONS}.",
        "engine",
        "way",
    ),
    Metric(
        "cache_tier_moved_bytes",
        "counter",
        f"Bytes of KV blocks copied between cache tiers, by direction: {_DIRECTIONS}.",
        "engine",
        "way",
    ),
    Metric(
        "cache_tier_evicted_blocks",
        "counter",
        "KV blocks that were evicted from a cache tier (host or disk).",
        "engine",
        "tier",
    ),
    Metric(
        "cache_tier_failures",
        "counter",
        "Copies of KV blocks between cache tiers that failed or were skipped, by reason.",
        "engine",
        "reason",
    ),
    Metric("lora_adapters", "gauge", "LoRA adapters that requests may name.", "engine"),
    Metric("lora_slots", "gauge", "Device slots for LoRA adapters.", "engine"),
    Metric("lora_slots_used", "gauge", "Device slots whose LoRA adapter running requests use.", "engine"),
    Metric("lora_requests_waiting", "gauge", "Requests that wait for a device slot for their LoRA adapter.", "engine"),
    Metric("lora_placements", "counter", "Copies of a LoRA adapter into a device slot.", "engine"),
    Metric(
        "lora_requests",
        "counter",
        "Requests accepted for a LoRA adapter since it was loaded, by its name; beyond 64 adapters: others.",
        "engine",
        "adapter",
    ),
    Metric("num_swaps", "counter", "Preemptions that copied the request's KV blocks to host memory.", "engine"),
    Metric("spec_decode_num_drafts", "counter", "Drafts that the model verified.", "engine"),
    Metric("spec_decode_num_draft_tokens", "counter", "Draft tokens that the model verified.", "engine"),
    Metric("spec_decode_num_accepted_tokens", "counter", "Draft tokens that the model accepted.", "engine"),
    Metric(
        "num_preemptions",
        "counter",
        "Preemptions: a running request lost its KV blocks to another request and had to wait.",
        "engine",
    ),
    Metric(
        "prompt_tokens",
        "counter",
        "Prompt tokens computed, including those computed again after a preemption.",
        "engine",
    ),
    Metric("generation_tokens", "counter", "Tokens generated by all requests.", "engine"),
    Metric("engine_steps", "counter", "Steps (forward passes) that the engine has run.", "engine"),
    Metric("engine_step_seconds", "counter", "Seconds that the engine has spent in steps.", "engine"),
    Metric("engine_up", "gauge", "1 while the engine accepts requests, else 0.", "engine"),
    Metric("engine_restarts", "counter", "Restarts of the engine process after it ended.", "engine"),
    Metric("request_success", "counter", "Requests that ended, by finish reason.", label="finished_reason"),
    Metric(
        "request_retries",
        "counter",
        "Requests submitted to the next engine because the engine died before anything of their answer was sent.",
    ),
    Metric(
        "quarantined_requests",
        "counter",
        "Requests that were ended or refused because the engine died twice while it ran the same request.",
    ),
    Metric("http_requests", "counter", "HTTP requests received, by endpoint.", label="endpoint"),
    Metric(
        "http_refusals",
        "counter",
        "HTTP requests answered with an error before they reached the engine, by status code.",
        label="code",
    ),
    Metric(
        "http_errors",
        "counter",
        "HTTP requests answered with a status of 400 or above, by status and the request field at fault.",
        label="status field",
    ),
    Metric(
        "time_to_first_token_seconds",
        "histogram",
        "Seconds from receiving a request to its first token.",
        bounds=SECONDS,
    ),
    Metric(
        "inter_token_latency_seconds", "histogram", "Seconds between two tokens of one streamed sample.", bounds=SECONDS
    ),
    Metric(
        "request_time_per_output_token_seconds",
        "histogram",
        "Seconds from first to last token of a request, divided by the number of tokens after the first.",
        bounds=SECONDS,
    ),
    Metric(
        "e2e_request_latency_seconds",
        "histogram",
        "Seconds from receiving a request to its last token.",
        bounds=SECONDS,
    ),
    Metric(
        "request_queue_time_seconds",
        "histogram",
        "Seconds from receiving a request until the engine admits it.",
        bounds=SECONDS,
    ),
    Metric(
        "request_prefill_time_seconds",
        "histogram",
        "Seconds from the admission of a request to its first token.",
        bounds=SECONDS,
    ),
    Metric(
        "request_decode_time_seconds", "histogram", "Seconds from a request's first token to its last.", bounds=SECONDS
    ),
    Metric(
        "request_inference_time_seconds",
        "histogram",
        "Seconds from the admission of a request to its last token.",
        bounds=SECONDS,
    ),
    Metric("request_prompt_tokens", "histogram", "Prompt tokens of a request.", bounds=TOKENS),
    Metric(
        "request_generation_tokens", "histogram", "Tokens generated by a request, over all its samples.", bounds=TOKENS
    ),
    Metric("request_params_n", "histogram", "Parameter n of a request: the number of samples.", bounds=SAMPLES),
    Metric("request_params_max_tokens", "histogram", "Parameter max_tokens of a request.", bounds=TOKENS),
    Metric(
        "iteration_tokens_total", "histogram", "Tokens computed in one step of the engine.", "engine", bounds=STEP_SIZES
    ),
)
VLLM_PREFIX = "vllm:"
VLLM_NAMES = frozenset(  # metrics that vLLM has under the same name, with the same meaning
    {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries",
        "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens", "request_success",
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_params_n", "request_params_max_tokens", "iteration_tokens_total",
        "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    }
)  # fmt: skip
FINISHED_REASONS = ("stop", "length", "repetition", "abort", "error")
