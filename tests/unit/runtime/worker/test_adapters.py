"""Rows with LoRA adapters: tiles, graphs, slots that are used again, and adapters that cannot be read."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from adapter_files import SMALL, make_adapter, merged
from interpreter import HAS_TRITON
from quire.config.adapter_memory import adapter_memory, padded_rank
from quire.config.model import Heads
from quire.kernels.native import low_rank
from quire.runtime.sampling.make import make_sampler
from quire.runtime.worker import forward_graphs
from quire.runtime.worker.adapters import tile_tokens
from quire.types.step import Chunk
from tiny_models import (
    VOCAB,
    Bench,
    GreedySampler,
    MemoryCheckpoint,
    checkpoint_of,
    engine_config,
    tiny_config,
    transformers_model,
)

ROWS = 6
PROMPTS = [[5, 9, 2, 11, 7], [4, 4, 17], [30, 12, 8, 1], [6, 61]]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="no triton")
TINY = tiny_config("qwen3", num_layers=2, hidden_size=32, intermediate_size=32, heads=Heads(2, 1, 16))


@cache
def model() -> torch.nn.Module:
    return transformers_model(TINY)


def checkpoint() -> MemoryCheckpoint:
    return checkpoint_of(model(), TINY)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [make_adapter(tmp_path / str(seed), model(), seed=seed, rank=4 + seed) for seed in range(4)]


def greedy(attention: str, **config: object) -> Bench:
    return Bench(checkpoint(), engine_config(rows=ROWS, max_len=64, adapters=SMALL, **config), attention=attention)  # type: ignore[arg-type]


def sampling(attention: str) -> Bench:
    """With the sampler of an executor, so that Triton decodes by graphs."""
    config = engine_config(rows=ROWS, num_blocks=64, max_len=64, adapters=SMALL)
    kernels = "triton" if attention == "triton" else "torch"
    sampler = make_sampler(ROWS, VOCAB, torch.device(config.device.device), kernels)
    return Bench(checkpoint(), config, attention=attention, sampler=sampler)


def prefill(bench: Bench, slots: dict[int, int]) -> None:
    for row, slot in slots.items():
        bench.add(row, PROMPTS[row], adapter=slot)
    bench.run(chunks=[Chunk(row, 0, len(PROMPTS[row]), (row,)) for row in slots])


def assert_same(first: Bench, second: Bench) -> None:
    assert first.tokens == second.tokens
    for row, seen in first.sampler.seen.items():
        torch.testing.assert_close(torch.stack(second.sampler.seen[row]), torch.stack(seen), rtol=1e-3, atol=1e-3)


def test_tiles_hold_every_row_of_an_adapter_once_and_of_no_other() -> None:
    rng = random.Random(0)
    for _ in range(200):
        slots = np.array([rng.randrange(-1, 5) for _ in range(rng.randrange(1, 70))])
        most = rng.choice((2, 16))
        order, tiles, padded = tile_tokens(slots, most, room=(80, 6 + 80 // most))
        assert padded.tolist() == [*slots, *[-1] * (80 - len(slots))]
        found = [(slot, int(row)) for slot, first, count in tiles for row in order[first : first + count]]
        assert found == sorted((slot, row) for row, slot in enumerate(padded.tolist()))
        assert tiles[:, 2].max() <= most


@needs_triton
def test_graphs_follow_rows_whose_adapters_change(folders: list[Path]) -> None:
    plain, triton = sampling("reference"), sampling("triton")
    for made in (plain, triton):
        made.put_adapter(0, folders[0])
        made.put_adapter(1, folders[1])
        prefill(made, {0: 0, 1: -1, 2: 1})
        made.run(decode=[0, 1, 2])
        made.run(decode=[1, 2, 0])
        made.run(decode=[1])  # without adapters: another graph
        made.release(2)
        made.put_adapter(1, folders[2])
        prefill(made, {3: 1})
        made.run(decode=[1, 3, 0])
        made.release(3)
        prefill(made, {3: 0})  # the same row with another adapter
        made.run(decode=[1, 3, 0])
        made.run(decode=[1, 3, 0])
    assert triton.tokens == plain.tokens
    kinds = {kind.adapters for kind in triton.worker._graphs._graphs}  # type: ignore[attr-defined]
    assert kinds == {True, False}


@needs_triton
def test_steps_with_chunks_and_adapters_run_by_graphs(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_graphs, "EAGER_RUNS", 0)
    plain, triton = greedy("reference"), greedy("triton")
    for made in (plain, triton):
        made.put_adapter(2, folders[3])
        prefill(made, {0: 2, 1: -1})
        made.add(2, PROMPTS[2], adapter=2)
        made.run(decode=[1, 0], chunks=[Chunk(2, 0, 4, (2,))])
        made.add(3, PROMPTS[3])
        made.run(decode=[1], chunks=[Chunk(3, 0, 2, (3,))])
    assert_same(plain, triton)
    assert {shape.adapters for shape in triton.worker._runner._forward._graphs} == {True, False}  # type: ignore[attr-defined]


@needs_triton
def test_eager_steps_keep_only_the_adapters_of_the_wanted_tokens(folders: list[Path]) -> None:
    plain, config = greedy("reference"), engine_config(rows=ROWS, max_len=64, adapters=SMALL)
    eager = replace(config, device=replace(config.device, enforce_eager=True))
    triton = Bench(checkpoint(), eager, attention="triton", sampler=GreedySampler())
    for made in (plain, triton):
        made.put_adapter(0, folders[0])
        made.put_adapter(2, folders[1])
        prefill(made, {0: 2, 1: -1, 2: 0})
        made.run(decode=[1, 2])
    assert_same(plain, triton)


@pytest.mark.parametrize("attention", ["reference", pytest.param("triton", marks=needs_triton)])
def test_a_slot_holds_the_adapter_that_was_put_there_last(attention: str, folders: list[Path]) -> None:
    fresh, used = greedy(attention), greedy(attention)
    used.put_adapter(0, folders[3])  # a larger rank
    prefill(used, {0: 0})
    used.release(0)
    for made in (fresh, used):
        made.put_adapter(0, folders[0])
        prefill(made, {0: 0, 1: -1})
        made.run(decode=[0, 1])
    assert fresh.tokens == used.tokens
    assert torch.equal(torch.stack(fresh.sampler.seen[0]), torch.stack(used.sampler.seen[0]))


@pytest.mark.parametrize("attention", ["reference", "auto", pytest.param("triton", marks=needs_triton)])
def test_an_adapter_of_the_head_changes_prompt_logprobs_and_samples_of_several_rounds(
    attention: str, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path, model(), rank=5, only=lambda name: name == "lm_head")
    bench = greedy(attention)
    bench.worker._runner._num_samples = 3  # of the four
    bench.put_adapter(1, folder)
    models = [merged(model(), folder), model(), merged(model(), folder), model()]
    for row, prompt in enumerate(PROMPTS):
        bench.add(row, prompt, adapter=(1, -1, 1, -1)[row], prompt_logprobs=0)
    bench.run(chunks=[Chunk(row, 0, len(prompt), (row,)) for row, prompt in enumerate(PROMPTS)])
    for row, (prompt, wanted) in enumerate(zip(PROMPTS, models, strict=True)):
        with torch.no_grad():
            logits = wanted(torch.tensor([prompt], device=wanted.device)).logits[0].cpu()
        expected = logits.log_softmax(1)[range(len(prompt) - 1), prompt[1:]]
        (table,) = bench.prompt_tables(row)
        torch.testing.assert_close(torch.from_numpy(table.logprobs), expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(bench.sampler.seen[row][0], logits[-1], rtol=1e-3, atol=1e-3)


def test_loading_and_unloading_adapters_under_traffic_never_changes_other_rows(folders: list[Path]) -> None:
    """Every row must give the tokens that it gives alone, whatever was loaded, put into slots and forgotten since."""
    alone: dict[int, list[int]] = {}
    for number in range(-1, len(folders)):
        made = greedy("auto")
        if number >= 0:
            made.put_adapter(0, folders[number])
        prefill(made, {0: min(number, 0)})
        for _ in range(3):
            made.run(decode=[0])
        alone[number] = made.tokens[0]
    assert len(set(map(tuple, alone.values()))) == len(alone)  # every adapter shows
    bench, rng = greedy("auto"), random.Random(0)
    adapters = bench.worker.adapters
    assert adapters is not None
    live: dict[int, tuple[int, int]] = {}  # by row: its adapter and slot
    done = 0
    for _ in range(150):
        free = [slot for slot in range(SMALL.slots) if slot not in {slot for _, slot in live.values()}]
        chunks = []
        row = next((row for row in range(4) if row not in live), None)
        if row is not None and (free or rng.random() < 0.3):
            number = rng.randrange(-1, len(folders)) if free else -1
            slot = rng.choice(free) if number >= 0 else -1
            digest = bench.put_adapter(slot, folders[number]) if number >= 0 else ""
            live[row] = (number, slot)
            bench.add(row, PROMPTS[0], adapter=slot)
            chunks = [Chunk(row, 0, len(PROMPTS[0]), (row,))]
        bench.run(decode=[other for other in live if other != row], chunks=chunks)
        if chunks and number >= 0 and rng.random() < 0.5:
            adapters.store.forget(digest)  # the slot has it
        for row in [row for row in live if len(bench.tokens[row]) == len(alone[-1])]:
            number, _ = live.pop(row)
            assert bench.tokens[row] == alone[number], number
            bench.release(row)
            done += 1
    assert done > 100
    assert adapters.store.num_held <= SMALL.host_adapters


def test_adapters_work_with_quantized_weights(folders: list[Path]) -> None:
    quantized = greedy("auto", quantization="int8")
    plain = greedy("auto", quantization="int8")
    quantized.put_adapter(0, folders[0])
    prefill(quantized, {0: 0, 1: -1})
    prefill(plain, {0: -1, 1: -1})
    merged = greedy("auto")
    merged.put_adapter(0, folders[0])
    prefill(merged, {0: 0})
    found, base, wanted = (made.sampler.seen[0][0] for made in (quantized, plain, merged))
    assert (found - wanted).norm() < 0.1 * (base - wanted).norm()
    torch.testing.assert_close(quantized.sampler.seen[1][0], plain.sampler.seen[1][0])


def test_an_adapter_that_cannot_be_read_fails_only_its_rows(folders: list[Path]) -> None:
    bench, whole = greedy("auto"), greedy("auto")
    adapters = bench.worker.adapters
    assert adapters is not None
    for made in (bench, whole):
        made.put_adapter(0, folders[0])
    digest = bench.put_adapter(1, folders[1])
    adapters.store.forget(digest)
    prefill(bench, {0: 0, 1: 1, 2: -1})
    prefill(whole, {0: 0, 2: -1})
    (failure,) = bench.result.failures
    assert failure.row == 1
    assert "is not loaded" in failure.reason
    for row in (0, 2):
        torch.testing.assert_close(bench.sampler.seen[row][0], whole.sampler.seen[row][0])
    bench.release(1)
    bench.put_adapter(1, folders[1])  # it can be read by now
    prefill(bench, {3: 1})
    assert not bench.result.failures


def test_a_row_that_fails_for_another_reason_is_computed_with_its_adapter(folders: list[Path]) -> None:
    """Rows of the same adapter may go on from its blocks."""
    config = engine_config(rows=ROWS, max_len=64, adapters=SMALL)
    bench, whole = Bench(checkpoint(), config, sampler=GreedySampler(broken=[13])), greedy("auto")
    for made, seed in ((bench, 13), (whole, 0)):
        made.put_adapter(0, folders[0])
        made.add(0, PROMPTS[0], adapter=0, seed=seed)
        made.run(chunks=[Chunk(0, 0, 4)])
        made.add(1, PROMPTS[0], parent=0, adapter=0)
        made.run(chunks=[Chunk(1, 4, 1, (1,))])
        if made is bench:
            assert not made.result.failures
    torch.testing.assert_close(bench.sampler.seen[1][0], whole.sampler.seen[1][0])


def test_a_row_with_an_adapter_fails_where_there_are_no_slots() -> None:
    bench = Bench(checkpoint(), engine_config(rows=ROWS, max_len=64))
    prefill(bench, {0: 0, 1: -1})
    (failure,) = bench.result.failures
    assert failure.row == 0
    assert "no slots for adapters" in failure.reason


def test_the_memory_plan_counts_the_memory_of_adapter_slots() -> None:
    bench = greedy("reference")
    assert bench.worker.adapters is not None
    layers = bench.worker.adapters.slots.layers
    held = sum(tensor.nbytes for layer in layers for tensor in (layer.a, layer.b))  # type: ignore[attr-defined]
    planned = adapter_memory(TINY, SMALL, 4, max_tokens=0)
    assert held <= planned < 1.05 * held  # compiled kernels pad the outputs of the head
    assert adapter_memory(TINY, None, 4, max_tokens=8) == 0


@pytest.mark.parametrize("rank", [16, 48, 80])
def test_the_memory_plan_counts_ranks_as_tile_units_pad_them(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "has_tile_units", lambda: True)
    held = 0
    adapters = greedy("reference").worker.adapters
    assert adapters is not None
    for layer in adapters.slots.layers:
        outputs = [part.outputs for part in layer.parts]
        slots = low_rank.LowRankSlots(SMALL.slots, padded_rank(rank), layer.num_inputs, outputs, torch.bfloat16)
        held += slots.num_slots * slots.slot_bytes
    assert adapter_memory(TINY, replace(SMALL, max_rank=rank), 2, max_tokens=0, tiled=True) == held
