"""The worker with Triton kernels gives the tokens and logits of the reference."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("triton")

from quire.config.model import Heads
from quire.runtime.layers import skinny
from quire.types.step import Chunk
from tiny_models import Bench, MemoryCheckpoint, engine_config, random_checkpoint, tiny_config

SMALL = {"hidden_size": 32, "intermediate_size": 48, "heads": Heads(4, 2, 16)}


@cache
def checkpoint(architecture: str, biased: bool = False, num_layers: int = 1) -> MemoryCheckpoint:
    biases = {"o_bias": True, "mlp_bias": True} if biased else {"tie_word_embeddings": True}
    return random_checkpoint(tiny_config(architecture, num_layers=num_layers, **SMALL, **biases))


def drive(bench: Bench) -> dict[int, list[int]]:
    """Chunks beside decodes, one row and several, a fork with a copied tail, a reused row."""
    bench.add(0, [5, 6, 7])
    bench.add(1, list(range(11)))
    bench.run(chunks=[Chunk(0, 0, 3, (0,)), Chunk(1, 0, 6)])
    bench.run(decode=[0], chunks=[Chunk(1, 6, 5, (1,))])
    bench.run(decode=[1])
    bench.run(decode=[1, 0])
    bench.add(3, bench.tokens[1], parent=1)
    bench.unshare_tail(3)
    bench.run(decode=[0, 3, 1])
    bench.release(0)
    bench.add(0, [9, 8])
    bench.run(decode=[3, 1], chunks=[Chunk(0, 0, 2, (0,))])
    bench.run(decode=[3, 0, 1])
    return bench.tokens


@pytest.mark.parametrize(
    ("architecture", "biased", "layers", "few"),
    [("qwen3", False, 2, 2), ("qwen2", True, 1, 32), ("llama", False, 1, 0)],
)
def test_mixed_steps_give_the_tokens_and_logits_of_the_reference(
    architecture: str, biased: bool, layers: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skinny, "own_rows", lambda *_shape: few)
    source = checkpoint(architecture, biased, layers)
    plain = Bench(source, engine_config(), attention="reference")
    triton = Bench(source, engine_config(), attention="triton")
    assert drive(triton) == drive(plain)
    for row, seen in plain.sampler.seen.items():
        torch.testing.assert_close(torch.stack(triton.sampler.seen[row]), torch.stack(seen), rtol=1e-4, atol=1e-4)


def test_freed_blocks_and_unwritten_slots_are_never_read() -> None:
    bench = Bench(checkpoint("llama"), engine_config(num_blocks=8, rows=2), attention="triton")
    for layer in bench.worker.cache.layers:
        layer.key.fill_(float("nan"))
        layer.value.fill_(float("nan"))
    bench.add(0, [1, 2, 3, 4, 5])
    bench.run(chunks=[Chunk(0, 0, 5, (0,))])
    bench.run(decode=[0])
    assert all(line.isfinite().all() for line in bench.sampler.seen[0])
