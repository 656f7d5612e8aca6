"""Tile sizes of the attention kernels by shape. Fixed tables, so nothing is searched for while requests wait."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.triton.launch import num_processors, power_of_two

MOST_ROWS = 128  # packed query rows of a unit
_REGISTERS = 65536  # of a processor


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """How split attention runs: `programs` are launched, each takes at least `least_tiles` tiles of `block_n` keys.

    To merge the parts of what was cut takes about as long as `merge_tiles` tiles.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs: int
    least_tiles: int
    merge_tiles: int = 1

    def most_registers(self, device: torch.device) -> int | None:
        """Of a thread, so that all programs run at once: shares are equal, and one that waits would double the time."""
        threads = 32 * self.warps * -(-self.programs // num_processors(device))
        return None if threads * 256 <= _REGISTERS else _REGISTERS // threads // 8 * 8


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How a tile of `block_m` packed query rows runs over tiles of `block_n` keys."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def split_config(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> SplitConfig:
    """For units of up to `rows` packed query rows over a cache of `dtype`; beyond MOST_ROWS a unit must be cut."""
    block_m = min(MOST_ROWS, max(16, power_of_two(rows)))
    wide, processors = power_of_two(dim), num_processors(device)
    if block_m < 64:  # bound by memory: several programs per processor keep its loads in flight
        block_n = min(128, 8192 // wide)
        per_processor = 3 if dtype.itemsize < 4 and block_m == 16 else 2
        stages = 4 if dtype.itemsize == 1 else 3
        return SplitConfig(block_m, block_n, 4, stages, per_processor * processors, 256 // block_n)
    per_processor = 2 if block_m == 64 and wide <= 128 else 1
    return SplitConfig(block_m, 64 if wide <= 128 else 32, block_m // 16, 3, per_processor * processors, 4)


def prefill_config(dim: int) -> PrefillConfig:
    """For prompt chunks."""
    return PrefillConfig(128, 32, 8, 3) if power_of_two(dim) > 128 else PrefillConfig(128, 64, 8, 3)
