from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config.arguments import EngineArguments
from quire.config.server import ModelSource, ServerConfig
from quire.observability.counts import SharedCounts
from quire.observability.metric_table import METRICS
from quire.observability.metrics import ServerMetrics, server_metrics
from quire.serving.dispatch.observer import Observer
from quire.types.adapters import AdapterStats
from quire.types.errors import EngineDead
from quire.types.sampling import SamplingParams
from quire.types.stats import STEP_SIZES, BlockStats, EngineStats, TierStats
from tests.unit.observability.records import ended

NAMES = [
    "quire:cache_tier_evicted_blocks_total",
    "quire:cache_tier_failures_total",
    "quire:cache_tier_held_blocks",
    "quire:cache_tier_moved_blocks_total",
    "quire:cache_tier_moved_bytes_total",
    "quire:cache_tier_used_blocks",
    "quire:e2e_request_latency_seconds",
    "quire:engine_restarts_total",
    "quire:engine_sleep_level",
    "quire:engine_step_seconds_total",
    "quire:engine_steps_total",
    "quire:engine_up",
    "quire:generation_tokens_total",
    "quire:http_errors_total",
    "quire:http_refusals_total",
    "quire:http_requests_total",
    "quire:inter_token_latency_seconds",
    "quire:iteration_tokens_total",
    "quire:kv_cache_capacity_tokens",
    "quire:kv_cache_usage_perc",
    "quire:kv_cache_waste_perc",
    "quire:lora_adapters",
    "quire:lora_placements_total",
    "quire:lora_requests_total",
    "quire:lora_requests_waiting",
    "quire:lora_slots",
    "quire:lora_slots_used",
    "quire:num_preemptions_total",
    "quire:num_requests_running",
    "quire:num_requests_waiting",
    "quire:num_swaps_total",
    "quire:prefix_cache_evicted_blocks_total",
    "quire:prefix_cache_hits_total",
    "quire:prefix_cache_pinned_blocks",
    "quire:prefix_cache_pinned_prefixes",
    "quire:prefix_cache_queries_total",
    "quire:prefix_cache_tier_hits_total",
    "quire:prompt_tokens_total",
    "quire:quarantined_requests_total",
    "quire:request_decode_time_seconds",
    "quire:request_generation_tokens",
    "quire:request_inference_time_seconds",
    "quire:request_params_max_tokens",
    "quire:request_params_n",
    "quire:request_prefill_time_seconds",
    "quire:request_prompt_tokens",
    "quire:request_queue_time_seconds",
    "quire:request_retries_total",
    "quire:request_success_total",
    "quire:request_time_per_output_token_seconds",
    "quire:spec_decode_num_accepted_tokens_total",
    "quire:spec_decode_num_draft_tokens_total",
    "quire:spec_decode_num_drafts_total",
    "quire:time_to_first_token_seconds",
]


def stats(**changes: object) -> EngineStats:
    values: dict[str, object] = {
        "steps": 10,
        "running": 3,
        "waiting": 2,
        "finished": 4,
        "preemptions": 1,
        "prompt_tokens": 50,
        "output_tokens": 40,
        "step_seconds": 0.5,
        "blocks": BlockStats(total=8, used=2, shared=0, free=6, slots_used=24, slots_allocated=32, block_size=16),
        "computed_tokens": 90,
        "steps_by_size": (8, 0, 2) + (0,) * (len(STEP_SIZES) - 2),
        "prefix_queries": 70,
        "prefix_hits": 20,
        "drafts": 3,
        "drafted_tokens": 12,
        "accepted_tokens": 9,
        **changes,
    }
    return EngineStats(**values)  # type: ignore[arg-type]


async def answer() -> EngineStats:
    return stats()


def page(metrics: ServerMetrics, ask: Callable[[], Awaitable[EngineStats]] = answer) -> dict[str, float]:
    """Every sample on the page by its name and labels besides the model's."""
    found = {}
    for family in text_string_to_metric_families(asyncio.run(metrics.page(ask)).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            found[sample.name + "".join(f"{{{value}}}" for value in labels.values())] = sample.value
    return found


def test_the_names_are_these_and_no_others() -> None:
    assert sorted(metric.exposed for metric in METRICS) == NAMES


def test_every_metric_is_shown_from_the_start() -> None:
    found = page(ServerMetrics("tiny"))
    for metric in METRICS:
        name = metric.exposed + ("_count" if metric.kind == "histogram" else "")
        is_open = metric.label in ("code", "endpoint", "status field")
        assert is_open or any(key.startswith(name) for key in found), name
    assert found["quire:request_success_total{stop}"] == 0
    assert found["quire:prefix_cache_hits_total"] == 0
    assert found["quire:engine_up"] == 0


def test_metrics_come_under_vllms_names_where_asked() -> None:
    common = (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
        "generation_tokens_total", "request_success_total{stop}", "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
    )  # fmt: skip
    own, foreign = page(ServerMetrics("tiny")), page(ServerMetrics("tiny", names="vllm"))
    assert not [name for name in own if name.startswith("vllm:")]
    assert all(name.startswith("vllm:") for name in foreign)
    for name in common:
        base, brace, label = name.partition("{")
        assert f"vllm:{base}{{0}}{brace}{label}" in foreign, name
    assert set(page(ServerMetrics("tiny", names="both"))) == {*own, *foreign}


def test_every_call_of_the_desk_is_taken_as_the_protocol_names_it() -> None:
    calls = {name: list(inspect.signature(call).parameters) for name, call in vars(Observer).items() if name[0] != "_"}
    assert {"received", "refused", "finished", "aborted"} <= set(calls)
    assert {name: list(inspect.signature(getattr(ServerMetrics, name)).parameters) for name in calls} == calls


def test_a_request_is_counted_with_its_times_from_receipt_to_end() -> None:
    metrics = ServerMetrics("tiny")
    record = ended()
    metrics.received("chat")
    metrics.queued(record)
    assert page(metrics)["quire:num_requests_waiting"] == 1
    metrics.submitted(record)
    metrics.first_token(record)
    metrics.tokens(3, [0.004, 0.02])
    metrics.finished(record)
    found = page(metrics)
    assert found["quire:num_requests_waiting"] == 0
    assert found["quire:http_requests_total{chat}"] == 1
    assert found["quire:request_success_total{length}"] == 1
    sums = {
        "time_to_first_token_seconds": 0.75,
        "inter_token_latency_seconds": 0.024,
        "request_time_per_output_token_seconds": 0.25,
        "e2e_request_latency_seconds": 2.0,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 0.25,
        "request_decode_time_seconds": 1.25,
        "request_inference_time_seconds": 1.5,
        "request_prompt_tokens": 12,
        "request_generation_tokens": 6,
        "request_params_n": 1,
        "request_params_max_tokens": 32,
    }
    for name, total in sums.items():
        assert found[f"quire:{name}_sum"] == pytest.approx(total), name
        assert found[f"quire:{name}_count"] == (2 if name == "inter_token_latency_seconds" else 1), name
    assert found["quire:inter_token_latency_seconds_bucket{0.005}"] == 1
    assert found["quire:inter_token_latency_seconds_bucket{0.02}"] == 2
    assert found["quire:time_to_first_token_seconds_bucket{0.75}"] == 1
    assert found["quire:time_to_first_token_seconds_bucket{0.5}"] == 0


def test_an_answer_without_a_stream_has_its_first_token_from_the_ledger() -> None:
    metrics = ServerMetrics("tiny")
    metrics.finished(ended(streamed=False, first_token_at=None))
    assert page(metrics)["quire:time_to_first_token_seconds_sum"] == pytest.approx(0.75)


def test_samples_that_run_beside_each_other_do_not_shorten_the_time_per_token() -> None:
    metrics = ServerMetrics("tiny")
    record = ended(sampling=SamplingParams(n=2, max_tokens=32), finish_reasons=("stop", "length"), num_output_tokens=12)
    metrics.finished(record)
    found = page(metrics)
    assert found["quire:request_time_per_output_token_seconds_sum"] == pytest.approx(0.25)
    assert found["quire:request_success_total{length}"] == 1
    assert found["quire:request_success_total{stop}"] == 0


def test_refusals_and_aborts_are_counted_by_what_they_were() -> None:
    metrics = ServerMetrics("tiny")
    for status in (400, 429, 429):
        metrics.refused("chat", status, "code")
    waiting = ended(submitted_at=None, finished_at=None, ledger=(), finish_reasons=())
    metrics.queued(waiting)
    metrics.aborted(waiting, "client")
    metrics.aborted(ended(), "engine_down")
    found = page(metrics)
    assert (found["quire:http_refusals_total{400}"], found["quire:http_refusals_total{429}"]) == (1, 2)
    assert (found["quire:request_success_total{abort}"], found["quire:request_success_total{error}"]) == (1, 1)
    assert found["quire:num_requests_waiting"] == 0


def test_the_engine_is_asked_once_a_second_at_most_and_shown_as_it_answers() -> None:
    metrics, asked = ServerMetrics("tiny"), []

    async def ask() -> EngineStats:
        asked.append(1)
        return stats()

    metrics.engine_up(generation=3)
    page(metrics, ask)
    found = page(metrics, ask)
    assert len(asked) == 1
    assert (found["quire:engine_up"], found["quire:engine_restarts_total"]) == (1, 2)
    assert (found["quire:num_requests_running"], found["quire:num_requests_waiting"]) == (3, 2)
    assert found["quire:kv_cache_capacity_tokens"] == 8 * 16
    assert (found["quire:kv_cache_usage_perc"], found["quire:kv_cache_waste_perc"]) == (0.25, 0.25)
    assert (found["quire:prompt_tokens_total"], found["quire:generation_tokens_total"]) == (50, 40)
    assert (found["quire:prefix_cache_queries_total"], found["quire:prefix_cache_hits_total"]) == (70, 20)
    drafts = [found[f"quire:spec_decode_num_{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens")]
    assert drafts == [3, 12, 9]
    assert (found["quire:iteration_tokens_total_sum"], found["quire:iteration_tokens_total_count"]) == (90, 10)
    assert found["quire:iteration_tokens_total_bucket{2.0}"] == 8
    assert found["quire:iteration_tokens_total_bucket{4.0}"] == 10


def test_what_the_tiers_hold_move_and_fail_at_is_shown_by_label() -> None:
    tiers = TierStats(
        host_used=5,
        host_held=2,
        disk_used=9,
        saved=7,
        loaded=4,
        stored=3,
        fetched=2,
        host_evicted=1,
        failures={"io": 6},
        block_bytes=10,
    )
    adapters = AdapterStats(loaded=9, slots=4, slots_used=3, waiting=2, placements=7, requests={"a b": 5, "c": 1})
    metrics = ServerMetrics("tiny")
    metrics.engine_up(1)

    async def ask() -> EngineStats:
        return stats(
            adapters=adapters, tiers=tiers, host_hits=5, disk_hits=3, swaps=2, evicted_blocks=8, pinned_prefixes=4
        )

    found = page(metrics, ask)
    hits = [found[f"quire:prefix_cache_tier_hits_total{{{tier}}}"] for tier in ("device", "host", "disk")]
    assert hits == [12, 5, 3]
    assert (found["quire:cache_tier_used_blocks{disk}"], found["quire:cache_tier_held_blocks"]) == (9, 2)
    assert found["quire:prefix_cache_pinned_prefixes"] == 4
    assert (found["quire:lora_slots_used"], found["quire:lora_requests_waiting"]) == (3, 2)
    assert found["quire:lora_requests_total{a b}"] == 5
    assert found["quire:cache_tier_moved_blocks_total{loaded}"] == 4
    assert found["quire:cache_tier_moved_bytes_total{saved}"] == 70
    evicted = {name: count for name, count in found.items() if name.startswith("quire:cache_tier_evicted_blocks")}
    assert evicted == {
        "quire:cache_tier_evicted_blocks_total{host}": 1,
        "quire:cache_tier_evicted_blocks_total{disk}": 0,
    }
    assert found["quire:prefix_cache_evicted_blocks_total"] == 8
    failures = [found[f"quire:cache_tier_failures_total{{{reason}}}"] for reason in ("io", "corrupt")]
    assert failures == [6, 0]
    assert found["quire:num_swaps_total"] == 2


def test_an_engine_that_is_down_is_shown_as_down() -> None:
    metrics = ServerMetrics("tiny")

    async def fail() -> EngineStats:
        raise EngineDead("no answer")

    metrics.engine_up(1)
    assert page(metrics)["quire:engine_up"] == 1
    metrics.engine_down()
    found = page(metrics, fail)
    assert (found["quire:engine_up"], found["quire:num_requests_running"]) == (0, 0)


def test_an_engine_in_a_long_step_keeps_its_last_numbers() -> None:
    metrics, is_busy = ServerMetrics("tiny"), False

    async def ask() -> EngineStats:
        if is_busy:
            raise EngineDead("the engine did not answer within 1 s")
        return stats()

    metrics.engine_up(1)
    first = page(metrics, ask)
    is_busy, metrics._asked_at = True, float("-inf")
    assert page(metrics, ask) == first
    assert first["quire:generation_tokens_total"] == 40


def test_any_edge_shows_what_all_edges_counted(tmp_path: Path) -> None:
    edges = [ServerMetrics("tiny", SharedCounts(tmp_path, number)) for number in (1, 2, 3)]
    for edge in edges:
        edge.start()
        edge.finished(ended())
    edges[0].queued(ended())
    for edge in edges[:2]:
        edge.close()  # writes its counts; its process lives on
    found = page(edges[2])
    assert found["quire:request_success_total{length}"] == 3
    assert found["quire:e2e_request_latency_seconds_sum"] == pytest.approx(6.0)
    assert found["quire:num_requests_waiting"] == 1
    edges[2].close()


def test_counts_of_an_edge_that_died_are_kept_but_not_what_it_had_waiting(tmp_path: Path) -> None:
    dead = SharedCounts(tmp_path, 1)
    first = ServerMetrics("tiny", dead)
    first.start()
    first.queued(ended())
    first.finished(ended())
    first.close()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    own = tmp_path / "counts-1.json"
    text = own.read_text()
    own.write_text(text.replace(text[text.index('"pid"') :].split(",")[0], f'"pid": {gone.pid}'))
    watching = ServerMetrics("tiny", SharedCounts(tmp_path, 2))
    heir = ServerMetrics("tiny", SharedCounts(tmp_path, 3))
    assert page(watching)["quire:request_success_total{length}"] == 1
    heir.start()
    assert not own.exists()
    found = page(heir)
    assert (found["quire:request_success_total{length}"], found["quire:num_requests_waiting"]) == (1, 0)
    heir.close()
    assert page(watching)["quire:request_success_total{length}"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counts-3.json"]


def test_counting_from_several_threads_loses_nothing() -> None:
    metrics = ServerMetrics("tiny")

    def count() -> None:
        for _ in range(2_000):
            metrics.tokens(2, [0.01, 0.02])

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert page(metrics)["quire:inter_token_latency_seconds_count"] == 16_000


def test_the_metrics_of_a_configured_server_need_nothing_more(tmp_path: Path) -> None:
    config = ServerConfig(source=ModelSource(model="m"), engine=EngineArguments())
    metrics = server_metrics(config, "tiny", str(tmp_path), edge=1)
    metrics.start()
    metrics.close()
    metrics.close()
    assert (tmp_path / "counts-1.json").exists()


def test_errors_are_counted_by_status_and_field() -> None:
    metrics = ServerMetrics("tiny")
    metrics.http_error(401, "")
    metrics.http_error(400, "temperature")
    metrics.http_error(400, "temperature")
    text = asyncio.run(metrics.page(_no_stats)).decode()
    assert 'quire:http_errors_total{field="temperature",model_name="tiny",status="400"} 2.0' in text
    assert 'quire:http_errors_total{field="",model_name="tiny",status="401"} 1.0' in text


async def _no_stats() -> EngineStats:
    raise EngineDead("down")
