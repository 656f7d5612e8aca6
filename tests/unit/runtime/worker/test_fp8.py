"""Float8 weights and a float8 cache: the same in every backend, and close to the unquantized model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.config.model import Heads
from quire.types.step import Chunk
from tiny_models import Bench, MemoryCheckpoint, engine_config, random_checkpoint, tiny_config

SMALL = {"hidden_size": 32, "intermediate_size": 48, "heads": Heads(4, 2, 16)}


@cache
def checkpoint(architecture: str = "qwen3") -> MemoryCheckpoint:
    tied = architecture == "qwen3"
    return random_checkpoint(tiny_config(architecture, num_layers=1, tie_word_embeddings=tied, **SMALL))


def config(quantization: str | None, kv_dtype: str) -> EngineConfig:
    usual = engine_config()
    device = replace(usual.device, quantization=quantization, kv_dtype=kv_dtype)  # type: ignore[arg-type]
    return replace(usual, device=device)


def logits(bench: Bench) -> torch.Tensor:
    """Of the same tokens always: prompts in chunks, rows that fork, and steps of one, a few and several rows."""
    forced = iter(range(3, 90))

    def run(decode: tuple[int, ...] = (), chunks: tuple[Chunk, ...] = ()) -> None:
        for row in bench.run(decode, chunks):
            bench.tokens[row][-1] = next(forced)
            bench.worker.rows.tokens[row, len(bench.tokens[row]) - 1] = bench.tokens[row][-1]

    bench.add(0, [5, 6, 7])
    bench.add(1, list(range(20, 31)))
    run(chunks=(Chunk(0, 0, 3, (0,)), Chunk(1, 0, 6)))
    run((0,), (Chunk(1, 6, 5, (1,)),))
    run((1,))
    bench.add(3, bench.tokens[1], parent=1)
    bench.unshare_tail(3)
    for _ in range(2):
        run((3, 1, 0))
    return torch.stack([line for row in sorted(bench.sampler.seen) for line in bench.sampler.seen[row]])


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The root mean square of the difference, as a share of the spread of the logits."""
    return float((found - wanted).pow(2).mean().sqrt() / wanted.std())


@pytest.mark.parametrize(
    ("quantization", "kv_dtype", "near"),
    [
        ("fp8", "float32", 0.2),
        (None, "float8", 0.2),
        (None, "int8", 0.05),
        (None, "int4", 0.2),
        ("fp8", "float8", 0.25),
    ],
)
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2"])
def test_logits_stay_near_those_of_the_unquantized_model(
    architecture: str, quantization: str | None, kv_dtype: str, near: float
) -> None:
    source = checkpoint(architecture)
    wanted = logits(Bench(source, config(None, "float32"), attention="reference"))
    found = logits(Bench(source, config(quantization, kv_dtype), attention="reference"))
    assert 1e-4 < error(found, wanted) < near


@pytest.mark.parametrize("attention", ["auto", "gather"])
@pytest.mark.parametrize("kv_dtype", ["float8", "int8", "int4"])
def test_a_quantized_cache_is_read_the_same_by_every_backend(kv_dtype: str, attention: str) -> None:
    wanted = logits(Bench(checkpoint(), config(None, kv_dtype), attention="reference"))
    found = logits(Bench(checkpoint(), config(None, kv_dtype), attention=attention))
    assert error(found, wanted) < (1e-5 if attention == "gather" else 1e-2)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # padding rows hold whatever was there before
@pytest.mark.parametrize(
    ("architecture", "quantization", "kv_dtype", "few"),
    [
        ("qwen3", None, "float8", 64),
        ("qwen3", None, "int8", 64),
        ("qwen3", None, "int4", 64),
        ("qwen3", "fp8", "float8", 64),
        ("qwen2", "fp8", "float32", 1),
        ("qwen2", "fp8", "float32", 2),
    ],
)
def test_triton_gives_the_logits_of_the_reference(
    architecture: str,
    quantization: str | None,
    kv_dtype: str,
    few: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    import triton_cases  # noqa: F401  float8 as hardware rounds it
    from quire.runtime.layers import skinny_fp8

    monkeypatch.setattr(skinny_fp8, "own_rows", lambda *_: few)
    source = checkpoint(architecture)
    wanted = logits(Bench(source, config(quantization, kv_dtype), attention="reference"))
    found = logits(Bench(source, config(quantization, kv_dtype), attention="triton"))
    assert error(found, wanted) < (1e-2 if quantization is None else 0.1)
    plain = logits(Bench(source, config(None, "float32"), attention="reference"))
    assert error(found, plain) < 0.25


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("attention", ["auto", "gather", "triton"])
@pytest.mark.parametrize("kv_dtype", ["float8", "int8", "int4"])
def test_only_the_row_whose_keys_are_nan_fails(kv_dtype: str, attention: str) -> None:
    if attention == "triton":
        pytest.importorskip("triton")
        import triton_cases  # noqa: F401  float8 as hardware rounds it
    clean = checkpoint("qwen2")
    name = next(each for each in clean.tensors if "embed" in each)
    bad = clean.tensors[name].clone()
    bad[50] = float("nan")
    harmed = MemoryCheckpoint(clean.config, {**clean.tensors, name: bad})
    seen = []
    for source in (clean, harmed):
        bench = Bench(source, config(None, kv_dtype), attention=attention)
        bench.add(0, [5, 6, 7])
        bench.add(1, [9, 50, 8])
        bench.run((), (Chunk(0, 0, 3, (0,)), Chunk(1, 0, 3, (1,))))
        bench.run((0,))
        seen.append(bench.sampler.seen)
    assert torch.stack(seen[0][1]).isfinite().all()
    assert torch.stack(seen[1][1]).isnan().any()
    torch.testing.assert_close(torch.stack(seen[1][0]), torch.stack(seen[0][0]))
