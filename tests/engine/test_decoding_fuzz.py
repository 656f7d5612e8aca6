"""Random mixes of every way to decode, in one engine, with faults in any call that serves one request alone: each whole
answer is the one that its request gets alone, no request is harmed by another's fault, every owner agrees after every
step, and nothing is left behind. QUIRE_TEST_SEEDS sets how many mixes are tried (`make soak`)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock

import pytest

from fuzz_faults import SITES
from fuzz_mix import MEETS, Mix
from quire.engine.decoding import mask_table
from quire.engine.decoding.mask_table import MaskTable

pytest.importorskip("llguidance")
SEEDS = int(os.environ.get("QUIRE_TEST_SEEDS", "120"))
SHARDS = 20


@cache
def play(seed: int, *, is_grouped: bool = False, micro_batches: int = 1) -> Counter[str]:
    """Run a mix; and if it leaves files, once more, after a restart."""
    try:
        mix = Mix(seed, is_grouped=is_grouped, micro_batches=micro_batches)
        with mock.patch.object(mask_table, "FEW", mix.least_batch), counted_masks() as masks:
            mix.run()
            met = mix.exercised()
            if mix.engine.tiers.files:
                files, salts = mix.engine.tiers.files, mix.salts
                again = Mix(seed, files, salts, is_grouped=is_grouped, micro_batches=micro_batches)
                again.run()
                met.update(again.exercised())
            met.update(masks)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    return met


@contextmanager
def counted_masks() -> Iterator[Counter[str]]:
    """How often masks are computed alone, and in a batch."""
    met: Counter[str] = Counter()
    compute_all, compute_alone = MaskTable._compute_all, MaskTable._compute_alone

    def count_all(self: MaskTable, *arguments: object) -> None:
        met["masks in a batch"] += 1
        compute_all(self, *arguments)  # type: ignore[arg-type]

    def count_alone(self: MaskTable, *arguments: object) -> None:
        met["masks alone"] += 1
        compute_alone(self, *arguments)  # type: ignore[arg-type]

    with mock.patch.multiple(MaskTable, _compute_all=count_all, _compute_alone=count_alone):
        yield met


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_answer_of_a_random_mix_is_the_one_its_request_gets_alone(shard: int) -> None:
    seeds = range(shard, SEEDS, SHARDS)
    met = sum(map(play, seeds), Counter())
    assert met["answers compared"] >= len(seeds) // 2  # some mixes have a cache that nothing of theirs fits into


@pytest.mark.parametrize("shard", range(SHARDS))
def test_so_it_is_where_layers_have_windows_or_states(shard: int) -> None:
    seeds = range(shard, SEEDS, SHARDS)
    met = sum([play(seed, is_grouped=True) for seed in seeds], Counter())
    assert met["answers compared"] >= len(seeds) // 2


@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("shard", range(SHARDS // 4))
def test_so_it_is_with_micro_batches(shard: int, micro_batches: int) -> None:
    """They are preempted, aborted, forked, swapped and drafted for one another's blocks."""
    seeds = range(shard, SEEDS // 2, SHARDS // 4)
    met = sum([play(seed, is_grouped=seed % 2 == 1, micro_batches=micro_batches) for seed in seeds], Counter())
    assert met["answers compared"] >= len(seeds) // 2


def test_random_mixes_meet_every_way_to_decode_and_to_make_room() -> None:
    met = sum(map(play, range(100)), Counter())
    missed = [what for what in MEETS if not met[what]]
    assert not missed, met
    assert sum(met[site] > 0 for site in SITES) > 0.7 * len(SITES), met
