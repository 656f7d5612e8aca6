"""The least time one H200 can take: every weight and live KV byte read once a step, or the matrix work, if longer."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.models import BenchModel
from benchmarks.gpu.workloads import Workload

BANDWIDTH = 4.3e12  # bytes a second that a step can count on
BF16_RATE, FP8_RATE = 790e12, 1400e12  # operations a second
HEAD_BYTES = 2  # of a weight of the head, which is never quantized


@dataclass(frozen=True, slots=True)
class Precision:
    """How wide the layers' weights and the cached numbers are, in bytes."""

    weight_bytes: int = 2
    kv_bytes: int = 2

    @classmethod
    def of(cls, quantization: str | None, kv_cache_dtype: str) -> Precision:
        """By the names of the engine's settings."""
        return cls(2 if quantization is None else 1, 2 if kv_cache_dtype == "auto" else 1)

    @property
    def rate(self) -> float:
        """Of the layers' products."""
        return FP8_RATE if self.weight_bytes == 1 else BF16_RATE


BF16 = Precision()


def prefill_seconds(model: BenchModel, work: Workload, precision: Precision = BF16) -> float:
    """All prompts once, causal attention included; the head only where a token is sampled."""
    products = 2 * model.layer_parameters * work.num_prompt_tokens
    head = 2 * model.head_parameters * len(work.prompts)
    attention = sum(2 * model.attention_width * len(prompt) ** 2 for prompt in work.prompts)
    return products / precision.rate + (head + attention) / BF16_RATE


def step_seconds(model: BenchModel, rows: int, cached_tokens: int, precision: Precision = BF16) -> float:
    """One decode step of `rows` sequences that hold `cached_tokens` together."""
    weights, head = model.layer_parameters, model.head_parameters
    read = (model.read_parameters(rows) * precision.weight_bytes + head * HEAD_BYTES) / BANDWIDTH
    matrix = 2 * rows * (weights / precision.rate + head / BF16_RATE)
    return max(read, matrix) + cached_tokens * model.kv_numbers * precision.kv_bytes / BANDWIDTH


def decode_seconds(model: BenchModel, work: Workload, precision: Precision = BF16) -> float:
    """All steps after the first token, every sequence in each until it ends. Shared prefixes count once per row."""
    lengths = [(len(prompt), count) for prompt, count in zip(work.prompts, work.outputs, strict=True)]
    total = 0.0
    for step in range(1, max(work.outputs)):
        live = [prompt + step for prompt, count in lengths if count > step for _ in range(work.n)]
        total += step_seconds(model, len(live), sum(live), precision)
    return total


def total_seconds(model: BenchModel, work: Workload, precision: Precision = BF16) -> float:
    return prefill_seconds(model, work, precision) + decode_seconds(model, work, precision)
