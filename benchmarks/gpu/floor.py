"""The least time one H200 can take: every weight and live KV byte read once a step, or the matrix work, if longer."""

from __future__ import annotations

from benchmarks.gpu.models import BenchModel
from benchmarks.gpu.workloads import Workload

BANDWIDTH = 4.3e12  # bytes a second that a step can count on
MATRIX_RATE = 790e12  # bf16 operations a second
BYTES = 2  # of a number


def prefill_seconds(model: BenchModel, work: Workload) -> float:
    """All prompts once, causal attention included; the head only where a token is sampled."""
    products = 2 * model.layer_parameters * work.num_prompt_tokens + 2 * model.head_parameters * len(work.prompts)
    attention = sum(2 * model.attention_width * len(prompt) ** 2 for prompt in work.prompts)
    return (products + attention) / MATRIX_RATE


def step_seconds(model: BenchModel, rows: int, cached_tokens: int) -> float:
    """One decode step of `rows` sequences that hold `cached_tokens` together."""
    weights = model.layer_parameters + model.head_parameters
    matrix = max(weights * BYTES / BANDWIDTH, 2 * weights * rows / MATRIX_RATE)
    return matrix + cached_tokens * model.kv_numbers * BYTES / BANDWIDTH


def decode_seconds(model: BenchModel, work: Workload) -> float:
    """All steps after the first token, every sequence in each until it ends. Shared prefixes count once per row."""
    lengths = [(len(prompt), count) for prompt, count in zip(work.prompts, work.outputs, strict=True)]
    total = 0.0
    for step in range(1, max(work.outputs)):
        live = [prompt + step for prompt, count in lengths if count > step for _ in range(work.n)]
        total += step_seconds(model, len(live), sum(live))
    return total


def total_seconds(model: BenchModel, work: Workload) -> float:
    return prefill_seconds(model, work) + decode_seconds(model, work)
