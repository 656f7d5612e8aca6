"""Tile sizes of the attention kernels by shape. Fixed tables, so no autotuning happens while requests wait."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quire.kernels.triton.launch import num_processors, power_of_two, shared_memory

MOST_ROWS = 128  # limit of packed query rows per unit
_REGISTERS = 65536  # 32-bit registers of a multiprocessor


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """Launch parameters of split (flash-decoding) attention: `programs` are launched, and each takes at least
    `least_tiles` tiles of `block_n` keys.

    Merging the parts of a cut (unit, head) pair costs about as much as `merge_tiles` tiles. `swap_ab`: operands are
    swapped, with keys as rows and queries as columns, so that `block_m` may be 8.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs: int
    least_tiles: int
    merge_tiles: int = 1
    swap_ab: bool = False

    def most_registers(self, device: torch.device) -> int | None:
        """Return the limit of registers per thread with which all programs fit on the device at once, or None for no
        limit. Programs have equal shares, so a second wave would double the time."""
        threads = 32 * self.warps * -(-self.programs // num_processors(device))
        return None if threads * 256 <= _REGISTERS else _REGISTERS // threads // 8 * 8


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch parameters of prefill attention: tiles of `block_m` packed query rows loop over tiles of `block_n` keys,
    with at most `registers` registers per thread."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class _DecodeConfig:
    """Launch parameters of decode attention for steps with at most `pairs` (row, kv head) pairs per multiprocessor."""

    pairs: float
    keys: int  # keys per tile at head size 128
    warps: int
    stages: int
    per_processor: int  # programs per multiprocessor
    least_keys: int = 256  # lower bound of keys per program
    swap_ab: bool = True


_ALL = math.inf
# Tuned on an H200 for rows of different lengths, some hundred to two thousand tokens, with 8 kv heads, on the uneven
# shapes of `python -m benchmarks.gpu.kernels_attention --tune`.
_DecodeConfigs = dict[int, tuple[_DecodeConfig, ...]]  # by the bytes of a cached element
_DECODE_CONFIGS: _DecodeConfigs = {  # at most 8 query heads per kv head
    1: (_DecodeConfig(0.25, 64, 1, 3, 5, 64), _DecodeConfig(8, 64, 1, 3, 4), _DecodeConfig(_ALL, 64, 1, 2, 8)),
    2: (_DecodeConfig(0.25, 64, 2, 3, 3, 64, swap_ab=False), _DecodeConfig(_ALL, 32, 1, 4, 4)),
    4: (_DecodeConfig(_ALL, 64, 4, 3, 2, swap_ab=False),),
}
_LARGE_GROUP_CONFIGS: _DecodeConfigs = {  # 9 to 16 query heads per kv head
    1: (_DecodeConfig(_ALL, 64, 2, 3, 5),),
    2: (_DecodeConfig(0.25, 64, 2, 3, 3, 64, swap_ab=False), _DecodeConfig(_ALL, 32, 1, 3, 6)),
    4: (_DecodeConfig(_ALL, 64, 4, 3, 2, swap_ab=False),),
}
_INTEGER_CONFIGS = (_DecodeConfig(_ALL, 64, 4, 3, 2, swap_ab=False),)  # int8 and int4 caches
_LARGEST = 256  # head size beyond which keys and values of a tile fill shared memory
_ROOMY_BYTES = 200 << 10  # bytes of shared memory with which prefill of larger heads uses tiles of 32 keys
_LEAST_SWAP_AB = 32  # head size; the K dimension of a gemm over half of a smaller head would be too small


def split_config(
    rows: int, dim: int, dtype: torch.dtype, device: torch.device, pairs: int | None = None
) -> SplitConfig:
    """Return the config for units of up to `rows` packed query rows over a cache of `dtype`. Units of more than
    MOST_ROWS rows must be cut.

    `pairs` is the largest number of (unit, kv head) pairs in a step; by default unlimited.
    """
    block_m = min(MOST_ROWS, max(16, power_of_two(rows)))
    wide, processors = power_of_two(dim), num_processors(device)
    if wide > _LARGEST:
        return _large_config(block_m, dtype, processors)
    if block_m == 16:  # decode is bound by memory bandwidth: keep enough loads in flight and avoid cuts
        each = math.inf if pairs is None else pairs / processors
        config = next(config for config in _decode_configs(rows, dtype) if each <= config.pairs)
        block_n = max(16, min(256, config.keys * 128 // wide))
        swap_ab = config.swap_ab and wide >= _LEAST_SWAP_AB
        block_m = 8 if rows <= 8 and swap_ab else 16
        stages = config.stages if wide <= 128 else min(3, config.stages)
        programs, least = config.per_processor * processors, max(1, config.least_keys // block_n)
        return SplitConfig(block_m, block_n, config.warps, stages, programs, least, swap_ab=swap_ab)
    if block_m == 32:
        block_n = min(128, 8192 // wide)
        return SplitConfig(block_m, block_n, 4, 4 if dtype.itemsize == 1 else 3, 2 * processors, 256 // block_n)
    per_processor = 2 if block_m == 64 and wide <= 128 else 1
    return SplitConfig(block_m, 64 if wide <= 128 else 32, block_m // 16, 3, per_processor * processors, 4)


def _large_config(block_m: int, dtype: torch.dtype, processors: int) -> SplitConfig:
    """Return the config for heads larger than 256, limited by shared memory as the compiler reports it."""
    if block_m == 16:
        block_n = 16 if dtype.itemsize == 4 else 32
        return SplitConfig(block_m, block_n, 4, 2, 2 * processors, 256 // block_n)
    return SplitConfig(block_m, 16, 8, 1 if dtype.itemsize == 4 else 2, processors, 4)


def decode_configs(
    heads: tuple[int, int], dim: int, dtype: torch.dtype, device: torch.device, max_rows: int
) -> tuple[tuple[int, SplitConfig], ...]:
    """Return every config that steps of up to `max_rows` decode rows use, with the largest number of rows each is for,
    in ascending order."""
    query, kv = heads
    limits = {max_rows}
    for config in _decode_configs(query // kv, dtype)[:-1]:
        limits.add(min(max_rows, int(config.pairs * num_processors(device)) // kv))
    found = [(limit, split_config(query // kv, dim, dtype, device, limit * kv)) for limit in sorted(limits) if limit]
    return tuple(found)


def _decode_configs(rows: int, dtype: torch.dtype) -> tuple[_DecodeConfig, ...]:
    if not dtype.is_floating_point:
        return _INTEGER_CONFIGS
    return (_DECODE_CONFIGS if rows <= 8 else _LARGE_GROUP_CONFIGS)[dtype.itemsize]


def prefill_config(dim: int, dtype: torch.dtype, device: torch.device) -> PrefillConfig:
    """Return the config for prompt chunks over a cache of `dtype`. Small tiles of keys waste little work at the
    diagonal of short prompts."""
    if power_of_two(dim) > _LARGEST:
        block_m = 32 if dtype.itemsize == 4 else 64
        return PrefillConfig(block_m, 32 if dtype.itemsize == 2 and shared_memory(device) >= _ROOMY_BYTES else 16, 8, 2)
    return PrefillConfig(128, 32, 8, 3) if power_of_two(dim) > 128 else PrefillConfig(128, 32, 8, 4, 128)
