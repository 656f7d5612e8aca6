"""Tiny random models of any family as transformers makes and saves them, and what Quire makes of the saved files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.runtime.loading.gguf.checkpoint import GgufCheckpoint
from quire.runtime.loading.hf.checkpoint import HfCheckpoint
from quire.types.step import Chunk
from tiny_models import Bench, engine_config, greedy_reference

BACKENDS = ("reference", "gather", "auto", "triton")
COMMON = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 3], [40, 4, 30, 20])


def hf_checkpoint(folder: Path, hf_config: Any, seed: int = 0) -> torch.nn.Module:
    """Save a random model (biases and norms too) in `folder`; returns it as transformers has it."""
    import transformers

    hf_config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            mean = float(value.float().mean().round()) if "norm" in name else 0.0  # one, or less it: zero
            value.normal_(mean, 0.2, generator=generator)
    model.save_pretrained(folder)
    return model


def logits_of(
    path: Path, prompts: Sequence[Sequence[int]], count: int, *, attention: str = "auto", chunk: int = 5
) -> list[Tensor]:
    """The logits [count, vocab] of greedy tokens after each prompt: prompts come in chunks, then all decode at once."""
    checkpoint = GgufCheckpoint(path) if path.suffix == ".gguf" else HfCheckpoint(path)
    bench = Bench(checkpoint, engine_config(max_len=128), attention=attention)  # type: ignore[arg-type]
    for row, prompt in enumerate(prompts):
        bench.add(row, list(prompt))
        for start in range(0, len(prompt), chunk):
            some = min(chunk, len(prompt) - start)
            bench.run(chunks=[Chunk(row, start, some, (row,) if start + some == len(prompt) else ())])
    for _ in range(count - 1):
        bench.run(decode=sorted(bench.tokens, key=lambda row: -len(bench.tokens[row])))
    checkpoint.close()
    return [torch.stack(bench.sampler.seen[row]) for row in range(len(prompts))]


def check_parity(folder: Path, model: torch.nn.Module, attention: str, *, count: int = 6, chunk: int = 5) -> None:
    """Logits, and so tokens, are those of transformers, in chunks and decoded."""
    if attention == "triton":
        pytest.importorskip("triton")
    found = logits_of(folder, PROMPTS, count, attention=attention, chunk=chunk)
    for prompt, logits in zip(PROMPTS, found, strict=True):
        _, expected = greedy_reference(model, prompt, count)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-4)
