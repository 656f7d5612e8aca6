"""Layers with a window give the same results with window blocks as in one group, whatever lies outside the window."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from interpreter import HAS_TRITON
from quire.config.kv_cache import PLAIN
from quire.config.model import Heads, Rope
from quire.runtime.sampling.make import make_sampler
from quire.runtime.worker.rows import Rows
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Chunk, Ints, NewRow
from tiny_models import DEVICE, VOCAB, Bench, MemoryCheckpoint, engine_config, random_checkpoint, tiny_config
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
    "all": (WINDOW, 5),
}
FEW: dict[str, tuple[int | None, ...]] = {"1:1": (4, None), "2:1": (4, 3, None), "2:0": (4, 3)}
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="for CPUs")
BACKENDS = ["reference", "gather", pytest.param("native", marks=on_cpu)]
DYNAMIC = Rope(kind="dynamic", scaling=(("factor", 2.0),), max_position=8)
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="no triton")


@cache
def checkpoint(pattern: str, dim: int = 16, softcap: float | None = None, rope: Rope | None = None) -> MemoryCheckpoint:
    windows = (PATTERNS | FEW)[pattern]
    config = tiny_config(
        num_layers=len(windows), windows=windows, hidden_size=32, intermediate_size=48, heads=Heads(4, 2, dim),
        attention_softcap=softcap, rope=rope or Rope(),
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
    verify(bench, 1)
    for _ in range(5):
        bench.run(decode=[0, 1, 2])


def verify(bench: Bench, row: int) -> None:
    """A draft of which the first token is taken and the others are not."""
    length = len(bench.tokens[row])
    bench.write(row, length, [7, 8, 9, 10])
    bench.run(chunks=[Chunk(row, length - 1, 5, (row,), 5)])
    bench.write(row, length, [7, 11])


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
@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_outside_the_window_do_not_change_results(backend: str, pattern: str, block_size: int) -> None:
    atol = 0.0 if backend == "native" else 1e-5
    check_equal(pattern, backend, atol=atol, block_size=block_size, num_blocks=512)


@needs_triton
@pytest.mark.parametrize(("pattern", "block_size"), [("1:1", 1), ("2:1", 4), ("1:1", 16), ("2:0", 4)])
def test_blocks_outside_the_window_do_not_change_results_on_a_gpu(pattern: str, block_size: int) -> None:
    check_equal(pattern, "triton", atol=1e-5, drive=drive_shortly, block_size=block_size, num_blocks=512)


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="slow in an interpreter")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_blocks_outside_the_window_do_not_change_results_on_a_gpu_with_any_layer_pattern(
    pattern: str, block_size: int
) -> None:
    check_equal(pattern, "triton", atol=1e-5, block_size=block_size, num_blocks=512)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_outside_the_window_do_not_change_capped_scores(backend: str) -> None:
    check_equal("alternating", backend, atol=1e-5, source={"softcap": 3.0}, num_blocks=512)


@on_cpu
def test_blocks_outside_the_window_do_not_change_results_in_bfloat16() -> None:
    config = {"dtype": "bfloat16", "block_size": 4, "num_blocks": 512}
    check_equal("alternating", "native", atol=0.0, source={"dim": 32}, **config)


@needs_triton
def test_blocks_outside_the_window_do_not_change_results_layer_by_layer() -> None:
    """Angles that depend on the length of a sequence are not known to the kernel that writes keys."""
    check_equal("1:1", "triton", atol=1e-5, drive=drive_shortly, source={"rope": DYNAMIC}, num_blocks=64)


@needs_triton
@pytest.mark.parametrize("pattern", ["1:1", "2:0"])
def test_blocks_outside_the_window_do_not_change_captured_steps(pattern: str) -> None:
    made, tokens = checkpoint(pattern), []
    for groups in (PLAIN, groups_of(made.config)):
        sampler = make_sampler(8, VOCAB, torch.device(DEVICE), "triton")
        config, kind = engine_config(num_blocks=64, groups=groups), Bench if groups is PLAIN else WindowBench
        bench = kind(made, config, attention="triton", sampler=sampler)
        bench.add(0, [(5 * i) % 90 for i in range(9)])
        bench.run(chunks=[Chunk(0, 0, 9, (0,))])
        for _ in range(3):
            bench.run(decode=[0])
        assert bench.worker._graphs._graphs
        tokens.append(bench.tokens[0])
    assert tokens[0] == tokens[1]


def test_a_row_finds_window_blocks_of_earlier_plans_and_of_its_own() -> None:
    rows = Rows(2, 20, 4, torch.device(DEVICE), 2, 32)
    rows.assign_windows(ints(5, 3), ints(10, 11, 12, 13))
    rows.assign_windows(ints(7), ints(14, 15))
    rows.place([NewRow(1, ints(1, 2), 2, (3, 7), SamplingParams(), TokenRules(), 0, 0)])
    rows.grant(ints(1, 1), ints(2, 0), ints(5, 5))
    rows.check()
    assert [table[1, :3].tolist() for table in rows.window_tables] == [[10, 14, 10], [11, 15, 11]]
    rows.assign_windows(ints(5), ints(20, 21))  # rows keep what they were given
    assert rows.window_tables[0][1, 0] == 10


def test_window_blocks_are_refused_without_a_window_group() -> None:
    with pytest.raises(AssertionError, match="without a window group"):
        Rows(2, 20, 4, torch.device(DEVICE)).assign_windows(ints(5), ints(10))


def ints(*numbers: int) -> Ints:
    return np.array(numbers, dtype=np.int32)
