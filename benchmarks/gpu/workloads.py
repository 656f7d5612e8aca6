"""Seeded request sets of the GPU benchmarks: the same prompts and lengths in every run and for every engine."""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY = 10_000  # prompts use ids below this, which every model has
LONG_CONTEXT = 32_768  # context length that the longest prompts need


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of token ids, the number of tokens of each answer, and the sampling."""

    prompts: list[list[int]]
    outputs: list[int]
    temperature: float = 0.0
    n: int = 1
    beam_width: int = 0  # above 0: beam search with this many beams

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return self.n * sum(self.outputs)


def nano(repeat: int) -> Workload:
    """Return 256 requests with 100 to 1024 prompt and output tokens, at temperature 0.6."""
    rng = random.Random(0)
    prompts = []
    for _ in range(256):
        length = rng.randint(100, 1024)
        prompts.append([rng.randint(0, VOCABULARY) + repeat for _ in range(length)])
    return Workload(prompts, [rng.randint(100, 1024) for _ in range(256)], temperature=0.6)


def chat512(repeat: int) -> Workload:
    """Return 512 requests with chat-like lengths."""
    return chat(512, seed=1, shift=100 * repeat)


def chat(count: int, seed: int, shift: int) -> Workload:
    """Return requests with log-normal lengths, similar to chats; `shift` is added to every id."""
    rng = random.Random(seed)
    prompts, outputs = [], []
    for _ in range(count):
        length = min(2048, max(8, int(rng.lognormvariate(4.9, 1.0))))
        outputs.append(min(1024, max(8, int(rng.lognormvariate(5.0, 0.8)))))
        prompts.append([rng.randint(10, VOCABULARY) + shift for _ in range(length)])
    return Workload(prompts, outputs)


def arrivals(count: int, rate: float | None) -> list[float]:
    """Return the seconds at which requests are sent: at random times, `rate` per second; None: one every 2 ms, which
    exceeds any server's capacity."""
    if rate is None:
        return [0.002 * (place + 1) for place in range(count)]
    rng, now, moments = random.Random(9), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        moments.append(now)
    return moments


def prefill(repeat: int) -> Workload:
    """Return 64 prompts of 2048 tokens, with one output token each."""
    return Workload(_random_prompts(64, 2048, 50 + repeat), [1] * 64)


def shared(repeat: int) -> Workload:
    """Return 256 requests with one common prefix of 2048 tokens, 128 further prompt tokens each, and 64 output
    tokens."""
    rng = random.Random(20 + repeat)
    prefix = [rng.randint(10, VOCABULARY) for _ in range(2048)]
    return Workload([prefix + [rng.randint(10, VOCABULARY) for _ in range(128)] for _ in range(256)], [64] * 256)


def n8(repeat: int) -> Workload:
    """Return 64 prompts of 512 tokens, eight samples of 128 tokens each, at temperature 1."""
    return Workload(_random_prompts(64, 512, 60 + repeat), [128] * 64, temperature=1.0, n=8)


def beam(repeat: int) -> Workload:
    """Return 32 prompts of 256 tokens, for the best of four beams, 64 tokens long."""
    return Workload(_random_prompts(32, 256, 70 + repeat), [64] * 32, beam_width=4)


def burst(repeat: int) -> Workload:
    """Return 1,500 short requests that arrive at once: 20 to 200 prompt tokens, 1 to 8 output tokens."""
    rng = random.Random(80 + repeat)
    prompts = [[rng.randint(10, 9_000) for _ in range(rng.randint(20, 200))] for _ in range(1_500)]
    return Workload(prompts, [rng.randint(1, 8) for _ in prompts])


def long(repeat: int) -> Workload:
    """Return 8 prompts of 32,508 tokens, with 256 output tokens each."""
    return Workload(_random_prompts(8, LONG_CONTEXT - 260, 90 + repeat), [256] * 8)


def batch1(repeat: int, outputs: int) -> Workload:
    """Return one request of 128 tokens."""
    return Workload([[7 + repeat] * 128], [outputs])


def staircase(steps: list[int]) -> Workload:
    """Return requests that end so that every number of rows in `steps`, decreasing, decodes for two steps."""
    outputs = []
    for place, rows in enumerate(steps):
        ending = rows - (steps[place + 1] if place + 1 < len(steps) else 0)
        outputs += [2 + 2 * place] * ending
    return Workload([[11, 12, 13, 14]] * len(outputs), outputs)


def _random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(10, 9_000) for _ in range(length)] for _ in range(count)]
