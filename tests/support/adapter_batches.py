"""Batches of rows with LoRA adapters, and without, held against the models that the adapters are merged into."""

from __future__ import annotations

import random

import torch

from family_models import VOCAB
from quire.types.step import Chunk
from tiny_models import Bench, greedy_reference

NUM_DECODED = 3


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def check_batch(bench: Bench, models: list[torch.nn.Module], slots: list[int], atol: float = 5e-4) -> None:
    """Row i uses slots[i] and must compute what models[i] does. The first prompt comes in two chunks."""
    prompts = [prompt_of(length, seed) for seed, length in enumerate((9, 4, 6, 3)[: len(models)])]
    for row, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
        bench.add(row, prompt, adapter=slot)
    bench.run(chunks=[Chunk(0, 0, 5)])
    rest = [Chunk(row, 0, len(prompt), (row,)) for row, prompt in enumerate(prompts) if row]
    bench.run(chunks=[Chunk(0, 5, len(prompts[0]) - 5, (0,)), *rest])
    for _ in range(NUM_DECODED - 1):
        bench.run(decode=list(range(len(prompts))))
    for row, (prompt, model) in enumerate(zip(prompts, models, strict=True)):
        wanted, logits = greedy_reference(model, prompt, NUM_DECODED)
        torch.testing.assert_close(torch.stack(bench.sampler.seen[row]), logits, rtol=1e-3, atol=atol)
        assert bench.tokens[row][len(prompt) :] == wanted
