"""The least time that one H200 can take: every weight and live KV byte read once per step, or the time of the gemms,
whichever is longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.models import BenchModel
from benchmarks.gpu.workloads import Workload

BANDWIDTH = 4.3e12  # bytes per second that a step can achieve
BF16_RATE, FP8_RATE = 790e12, 1400e12  # operations per second; int8 counts as fp8
# Bytes per weight of the layers, scales of groups included.
WEIGHT_BYTES = {None: 2, "fp8": 1, "int8": 1, "int4": 0.5 + 2 / 128}
# Bytes per element; int4 with a scale and an offset.
KV_BYTES = {"auto": 2, "fp8": 1, "fp8_e4m3": 1, "int8": 1, "int4": 0.5 + 4 / 32}
HEAD_BYTES = 2  # bytes per weight of the head, which is never quantized


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a weight of the layers, and of an element in the KV cache."""

    weight_bytes: float = 2
    kv_bytes: float = 2

    @classmethod
    def of(cls, quantization: str | None, kv_cache_dtype: str) -> Precision:
        """Return the precision for the engine's settings."""
        return cls(WEIGHT_BYTES[quantization], KV_BYTES[kv_cache_dtype])

    @property
    def rate(self) -> float:
        """Operations per second of the layers' gemms."""
        return FP8_RATE if self.weight_bytes == 1 else BF16_RATE


BF16 = Precision()


def prefill_seconds(model: BenchModel, work: Workload, precision: Precision = BF16) -> float:
    """Return the seconds to compute all prompts once, including causal attention; the head only where a token is
    sampled."""
    products = 2 * model.layer_parameters * work.num_prompt_tokens
    head = 2 * model.head_parameters * len(work.prompts)
    pairs = sum(
        layers * _pairs_seen(len(prompt), window) for window, layers in model.windows.items() for prompt in work.prompts
    )
    attention = 4 * model.attention_width / model.windows.total() * pairs
    return products / precision.rate + (head + attention) / BF16_RATE


def step_seconds(model: BenchModel, rows: int, cached_tokens: int, precision: Precision = BF16) -> float:
    """Return the seconds of one decode step of `rows` sequences of equal length, with `cached_tokens` tokens in
    total."""
    return _step_seconds(model, [cached_tokens / rows] * rows, precision)


def _step_seconds(model: BenchModel, lengths: Sequence[float], precision: Precision) -> float:
    """Return the seconds of one decode step of sequences with these lengths. Layers with a window read at most the
    window."""
    rows, weights, head = len(lengths), model.layer_parameters, model.head_parameters
    read = (model.read_bytes(rows, precision.weight_bytes) + head * HEAD_BYTES) / BANDWIDTH
    matrix = 2 * rows * (weights / precision.rate + head / BF16_RATE)
    seen = sum(layers * _tokens_seen(lengths, window) for window, layers in model.windows.items())
    numbers = seen * model.kv_numbers / model.windows.total()
    return max(read, matrix) + numbers * precision.kv_bytes / BANDWIDTH


def decode_seconds(model: BenchModel, work: Workload, precision: Precision = BF16) -> float:
    """Return the seconds of all steps after the first token; every sequence is in each step until it ends. Shared
    prefixes count once per row."""
    lengths = [(len(prompt), count) for prompt, count in zip(work.prompts, work.outputs, strict=True)]
    total = 0.0
    for step in range(1, max(work.outputs)):
        live = [prompt + step for prompt, count in lengths if count > step for _ in range(work.n)]
        total += _step_seconds(model, live, precision)
    return total


def _tokens_seen(lengths: Sequence[float], window: int | None) -> float:
    """Return how many tokens the next tokens of sequences of these lengths see in one layer."""
    return sum(lengths) if window is None else sum(min(length, window) for length in lengths)


def _pairs_seen(length: int, window: int | None) -> float:
    """Return the pairs of a token and a token that it sees in one layer."""
    unseen = 0 if window is None else max(length - window, 0)
    return (length**2 - unseen**2) / 2


def total_seconds(model: BenchModel, work: Workload, precision: Precision = BF16) -> float:
    return prefill_seconds(model, work, precision) + decode_seconds(model, work, precision)
