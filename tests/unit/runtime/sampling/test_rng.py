from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.sampling.rng import Streams, stream_start, stream_starts
from tests.unit.runtime.sampling import naive
from tests.unit.runtime.sampling.bench import CPU


def uniform(seeds: list[int], num_outputs: list[int], sample_index: int = 0) -> Tensor:
    count = len(seeds)
    streams = Streams(count, CPU)
    for row, seed in enumerate(seeds):
        streams.put(row, seed, sample_index)
    return streams.uniform(torch.arange(count), torch.tensor(num_outputs))


def chi_square(numbers: Tensor, bins: int = 64) -> float:
    counts = torch.histc(numbers, bins, 0.0, 1.0)
    expected = len(numbers) / bins
    return float(((counts - expected) ** 2 / expected).sum())


UNLIKELY = 63 + 5 * (2 * 63) ** 0.5  # five sigma above the mean of chi-square with 63 degrees of freedom


def test_the_numbers_are_those_of_the_plain_definition() -> None:
    seeds = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 12345]
    counts = [0, 1, 7, 1_000, 2**20, 3]
    for sample_index in (0, 1, 16_383):
        expected = [naive.uniform(seed, sample_index, n) for seed, n in zip(seeds, counts, strict=True)]
        assert uniform(seeds, counts, sample_index).tolist() == expected


def test_streams_of_many_rows_start_where_those_of_single_rows_do() -> None:
    seeds = [0, 1, -1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 2**64 + 5, 12345]
    indices = [0, 1, 7, 16_383, 0, 2, 1, 3, 5]
    wanted = [stream_start(seed, index) for seed, index in zip(seeds, indices, strict=True)]
    assert stream_starts(seeds, indices).tolist() == wanted


def test_one_seed_gives_uniform_numbers_along_its_output() -> None:
    numbers = uniform([7] * 20_000, list(range(20_000)))
    assert chi_square(numbers) < UNLIKELY
    assert numbers.min() > 0.0
    assert numbers.max() < 1.0
    lagged = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
    assert abs(lagged) < 5 / len(numbers) ** 0.5


def test_neighbouring_seeds_give_uniform_unrelated_first_numbers() -> None:
    numbers = uniform(list(range(20_000)), [0] * 20_000)
    assert chi_square(numbers) < UNLIKELY
    lagged = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
    assert abs(lagged) < 5 / len(numbers) ** 0.5


def test_the_samples_of_one_request_have_unrelated_streams() -> None:
    first = uniform([7] * 5_000, list(range(5_000)), sample_index=0)
    second = uniform([7] * 5_000, list(range(5_000)), sample_index=1)
    assert not set(first.tolist()) & set(second.tolist())
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 5 / 5_000**0.5
