"""With a model: wherever its keys and values have been meanwhile, a request is answered with the same tokens and
logprobs: to the bit with our own CPU kernels. Elsewhere the last bits of a gemm depend on the rows beside it.
QUIRE_TEST_WHOLE=1 asks a thousand requests."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from disk_bench import keep_pace
from promises import tolerance
from quire.config.tiers import PreemptionName, TierConfig, TierWrite
from quire.engine.core import EngineCore
from quire.kernels.native.loader import why_not_native
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.resolve import ModelFiles
from quire.types.output import Finished
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.stats import EngineStats
from tiny_models import VOCAB, engine_config, tiny_config

BLOCK, ROWS = 4, 6
NUM_REQUESTS = 170 if os.environ.get("QUIRE_TEST_WHOLE") == "1" else 10  # in each of six tests
WITHOUT_KERNELS = 0.0 if why_not_native(torch.float32, torch.device("cpu")) is None else 4e-6
TOLERANCE = tolerance(cpu=WITHOUT_KERNELS, gpu=4e-6)
FLOAT8_TOLERANCE = tolerance(cpu=WITHOUT_KERNELS, gpu=4e-3)  # GPUs multiply keys and values in float8 as float16
LARGE, SMALL = 400, 30  # blocks
SHORT, LONG = 9, 40  # tokens of the longest answer


def make_core(
    num_blocks: int, tiers: TierConfig, *, caching: bool, preemption: PreemptionName = "auto", tied: bool = False,
    kv_dtype: str | None = None,
) -> EngineCore:  # fmt: skip
    """`tied`: the head is the embedding table, which has a gemm of its own."""
    config = engine_config(block_size=BLOCK, num_blocks=num_blocks, rows=ROWS, kv_dtype=kv_dtype)
    config = replace(
        config,
        cache=replace(config.cache, enable_prefix_caching=caching, tiers=tiers, namespace="00"),
        scheduler=replace(config.scheduler, max_num_batched_tokens=64, max_num_seqs=ROWS, preemption=preemption),
    )
    files = ModelFiles("tiny", Path("nowhere"), "hf")
    executor = SingleExecutor(files, tiny_config(tie_word_embeddings=tied), config, load_format="dummy", progress=None)
    if tiers.disk_path:
        assert executor._worker is not None
        keep_pace(executor._worker.tiers)
    return EngineCore(executor, config.cache, config.scheduler, VOCAB)


def requests(longest: int) -> list[Submit]:
    """Prompts of which some begin alike, greedy and sampled, some with several samples."""
    rng = random.Random(3)
    stems = [[rng.randrange(VOCAB) for _ in range(21)] for _ in range(max(NUM_REQUESTS // 4, 3))]
    asked = []
    for number in range(NUM_REQUESTS):
        prompt = rng.choice(stems)[: rng.randint(9, 21)] + [rng.randrange(4) for _ in range(rng.randint(0, 3))]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            max_tokens=rng.randint(2, longest),
            n=rng.choice([1, 1, 2]),
            seed=number,
            logprobs=2,
        )
        asked.append(Submit(f"r{number}", tuple(prompt), sampling, TokenRules()))
    return asked


def run(core: EngineCore, asked: list[Submit], *, together: bool) -> dict[str, Finished]:
    finished: dict[str, Finished] = {}
    for request in asked:
        core.submit(request)
        while core.has_work and not together:
            finished |= {each.request_id: each for each in core.step().finished}
    while core.has_work:
        finished |= {each.request_id: each for each in core.step().finished}
        core.check()
    core.check()
    return finished


@cache
def cold(longest: int, *, tied: bool = False, kv_dtype: str | None = None) -> dict[str, Finished]:
    """Each alone, with nothing cached."""
    core = make_core(LARGE, TierConfig(), caching=False, tied=tied, kv_dtype=kv_dtype)
    try:
        return run(core, requests(longest), together=False)
    finally:
        core.close()


def check(found: dict[str, Finished], wanted: dict[str, Finished], kv_dtype: str | None = None) -> None:
    tolerance = FLOAT8_TOLERANCE if kv_dtype == "float8" else TOLERANCE
    assert found.keys() == wanted.keys()
    for name, message in wanted.items():
        assert found[name].error is None
        for one, other in zip(found[name].samples, message.samples, strict=True):
            assert one.token_ids == other.token_ids, name
            for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
                np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=tolerance, rtol=0)


def ask_twice(num_blocks: int, tiers: TierConfig, *, tied: bool = False, kv_dtype: str | None = None) -> EngineStats:
    """One after the other, twice; every answer is checked."""
    core = make_core(num_blocks, tiers, caching=True, tied=tied, kv_dtype=kv_dtype)
    for _ in range(2):
        check(run(core, requests(SHORT), together=False), cold(SHORT, tied=tied, kv_dtype=kv_dtype), kv_dtype)
    stats = core.stats()
    core.close()
    return stats


@pytest.mark.parametrize("tied", [False, True])
def test_a_hit_says_what_a_miss_says(*, tied: bool) -> None:
    assert ask_twice(LARGE, TierConfig(), tied=tied).prefix_hits > 0


def test_a_prompt_that_was_evicted_is_answered_as_before() -> None:
    assert ask_twice(SMALL, TierConfig()).evicted_blocks > 0


@pytest.mark.parametrize("write", ["back", "through"])
def test_a_prompt_that_comes_back_from_host_memory_is_answered_as_before(write: TierWrite) -> None:
    assert ask_twice(SMALL, TierConfig(LARGE, write=write)).host_hits > 0


@pytest.mark.parametrize(("caching", "tied"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_preempted_request_is_answered_as_before(preemption: PreemptionName, *, caching: bool, tied: bool) -> None:
    asked = requests(LONG)
    core = make_core(SMALL, TierConfig(LARGE), caching=caching, preemption=preemption, tied=tied)
    check(run(core, asked, together=True), cold(LONG, tied=tied))
    stats = core.stats()
    assert stats.preemptions > 0
    assert (stats.swaps > 0) == (preemption == "swap")
    core.close()


QUANTIZED = ("float8", "int8", "int4")


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_blocks_of_a_quantized_cache_take_their_scales_to_hits_and_host_memory(kv_dtype: str) -> None:
    assert ask_twice(LARGE, TierConfig(), kv_dtype=kv_dtype).prefix_hits > 0
    assert ask_twice(SMALL, TierConfig(LARGE), kv_dtype=kv_dtype).host_hits > 0
    plain, found = (next(iter(cold(SHORT, kv_dtype=each).values())).samples[0] for each in (None, kv_dtype))
    assert any((a.logprobs != b.logprobs).any() for a, b in zip(plain.logprobs, found.logprobs, strict=False))


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_a_preempted_request_of_a_quantized_cache_is_swapped_with_its_scales(kv_dtype: str) -> None:
    core = make_core(SMALL, TierConfig(LARGE), caching=False, preemption="swap", kv_dtype=kv_dtype)
    check(run(core, requests(LONG), together=True), cold(LONG, kv_dtype=kv_dtype), kv_dtype)
    assert core.stats().swaps > 0
    core.close()


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_a_quantized_block_comes_back_from_disk(kv_dtype: str, tmp_path: Path) -> None:
    tiers, wanted = TierConfig(LARGE, str(tmp_path / "cache"), 4 * LARGE, "through"), cold(SHORT, kv_dtype=kv_dtype)
    first = make_core(LARGE, tiers, caching=True, kv_dtype=kv_dtype)
    check(run(first, requests(SHORT), together=False), wanted, kv_dtype)
    first.close()
    again = make_core(LARGE, tiers, caching=True, kv_dtype=kv_dtype)
    check(run(again, requests(SHORT), together=False), wanted, kv_dtype)
    assert again.stats().disk_hits > 0
    again.close()


def test_a_prompt_that_comes_back_from_disk_after_a_restart_is_answered_as_before(tmp_path: Path) -> None:
    asked = requests(SHORT)
    tiers = TierConfig(LARGE, str(tmp_path / "cache"), 4 * LARGE, "through")
    first = make_core(LARGE, tiers, caching=True)
    check(run(first, asked, together=False), cold(SHORT))
    first.close()
    again = make_core(LARGE, tiers, caching=True)
    check(run(again, asked, together=False), cold(SHORT))
    assert again.stats().disk_hits > 0
    again.close()


def _flip(folder: Path) -> None:
    for file in folder.iterdir():
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


def _truncate(folder: Path) -> None:
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:-5])


def _delete(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize(("harm", "reason"), [(_flip, "corrupt"), (_truncate, "corrupt"), (_delete, "missing")])
def test_files_that_were_harmed_cost_no_request_and_are_counted(
    harm: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    asked, folder = requests(SHORT), tmp_path / "cache"
    tiers = TierConfig(LARGE, str(folder), 4 * LARGE, "through")
    first = make_core(LARGE, tiers, caching=True)
    run(first, asked, together=False)
    first.close()
    again = make_core(LARGE, tiers, caching=True)
    again.step()
    assert again.stats().tiers.disk_used > 0  # it has seen what is there
    harm(folder)
    check(run(again, asked, together=False), cold(SHORT))
    stats = again.stats()
    assert stats.disk_hits == 0
    assert stats.tiers.failures[reason] > 0
    again.close()


def test_a_folder_that_is_gone_costs_no_request_and_is_counted(tmp_path: Path) -> None:
    asked, folder = requests(SHORT), tmp_path / "cache"
    core = make_core(LARGE, TierConfig(LARGE, str(folder), 4 * LARGE, "through"), caching=True)
    run(core, asked[:2], together=False)
    while folder.exists():  # somebody may be writing there
        shutil.rmtree(folder, ignore_errors=True)
    check(run(core, asked, together=False), cold(SHORT))
    assert sum(core.stats().tiers.failures.values()) > 0
    core.close()
