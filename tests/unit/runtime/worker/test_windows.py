"""Layers with a window in blocks of their own say what they say in one group, whatever is in the blocks they left."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from interpreter import HAS_TRITON
from quire.config.model import Heads
from quire.types.step import Chunk
from tiny_models import DEVICE, Bench, MemoryCheckpoint, engine_config, random_checkpoint, tiny_config
from window_bench import WindowBench, groups_of

WINDOW = 7
PATTERNS: dict[str, tuple[int | None, ...]] = {
    "gemma3": (WINDOW,) * 5 + (None,),  # one plane, five window blocks
    "alternating": (WINDOW, None, WINDOW, None),
    "two and a half": (
        WINDOW,
        None,
        5,
        WINDOW,
        3,
        WINDOW,
        None,
    ),  # two planes, three window blocks of which one is half full
}
FEW: dict[str, tuple[int | None, ...]] = {"1:1": (4, None), "2:1": (4, 3, None)}
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="no triton")


@cache
def checkpoint(pattern: str, dim: int = 16, softcap: float | None = None) -> MemoryCheckpoint:
    windows = (PATTERNS | FEW)[pattern]
    config = tiny_config(
        num_layers=len(windows), windows=windows, hidden_size=32, intermediate_size=48, heads=Heads(4, 2, dim),
        attention_softcap=softcap,
    )  # fmt: skip
    return random_checkpoint(config)


def drive(bench: Bench) -> None:
    """Prompts longer than the window in several chunks, rows of different lengths, a fork, a row that is used again."""
    long, short = [(5 * i) % 90 for i in range(23)], [3, 1, 4]
    bench.add(0, long)
    bench.add(1, short)
    bench.run(chunks=[Chunk(0, 0, 11), Chunk(1, 0, 3, (1,))])
    bench.run(decode=[1], chunks=[Chunk(0, 11, 1)])
    bench.run(decode=[1], chunks=[Chunk(0, 12, 11, (0,))])
    for _ in range(3):
        bench.run(decode=[0, 1])
    bench.add(2, bench.tokens[0], parent=0)
    bench.unshare_tail(2)
    bench.run(decode=[0, 1, 2])
    bench.release(1)
    bench.add(1, list(reversed(long)))
    bench.run(decode=[2, 0], chunks=[Chunk(1, 0, 23, (1,))])
    for _ in range(5):
        bench.run(decode=[0, 1, 2])


def drive_shortly(bench: Bench) -> None:
    """For an interpreter."""
    length = bench.size + 6
    bench.add(0, [(5 * i) % 90 for i in range(length)])
    bench.run(chunks=[Chunk(0, 0, length - 3)])
    bench.run(chunks=[Chunk(0, length - 3, 3, (0,))])
    bench.add(1, [3, 1])
    bench.run(decode=[0], chunks=[Chunk(1, 0, 2, (1,))])
    bench.add(2, bench.tokens[0], parent=0)
    bench.unshare_tail(2)
    for _ in range(2):
        bench.run(decode=[0, 1, 2])


def check_equal(
    pattern: str, backend: str, *, atol: float, drive: Any = drive, source: dict[str, Any] | None = None, **config: Any
) -> None:
    made = checkpoint(pattern, **source or {})
    plain = Bench(made, engine_config(**config), attention=backend)
    windowed = WindowBench(made, engine_config(groups=groups_of(made.config), **config), attention=backend)
    drive(plain)
    drive(windowed)
    assert windowed.num_taken_back > 0
    assert windowed.tokens == plain.tokens
    for row, seen in plain.sampler.seen.items():
        torch.testing.assert_close(torch.stack(windowed.sampler.seen[row]), torch.stack(seen), rtol=0, atol=atol)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("backend", ["reference", "gather", "native"])
def test_blocks_that_left_the_window_reach_no_result(backend: str, pattern: str, block_size: int) -> None:
    atol = 0.0 if backend == "native" else 1e-5
    check_equal(pattern, backend, atol=atol, block_size=block_size, num_blocks=512)


@needs_triton
@pytest.mark.parametrize(("pattern", "block_size"), [("1:1", 1), ("2:1", 4), ("1:1", 16)])
def test_nor_do_they_on_a_gpu(pattern: str, block_size: int) -> None:
    check_equal(pattern, "triton", atol=1e-5, drive=drive_shortly, block_size=block_size, num_blocks=512)


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="slow in an interpreter")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_nor_do_they_on_a_gpu_in_any_pattern(pattern: str, block_size: int) -> None:
    check_equal(pattern, "triton", atol=1e-5, block_size=block_size, num_blocks=512)


@pytest.mark.parametrize("backend", ["reference", "gather", "native"])
def test_nor_where_scores_are_capped(backend: str) -> None:
    check_equal("alternating", backend, atol=1e-5, source={"softcap": 3.0}, num_blocks=512)


def test_nor_in_bfloat16() -> None:
    config = {"dtype": "bfloat16", "block_size": 4, "num_blocks": 512}
    check_equal("alternating", "native", atol=0.0, source={"dim": 32}, **config)
