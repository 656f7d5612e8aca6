"""Alternative configurations of the attention kernels, from which the tables of attention_config are chosen.

A case is named "shape: configuration"; the first configuration of a shape is the one in use.
"""

from __future__ import annotations

import torch

from benchmarks.gpu.attention_cases import DEVICE, DTYPES, HEADS, Case
from quire.kernels.triton.attention_cascade import UNIT_ROWS
from quire.kernels.triton.attention_config import PrefillConfig, SplitConfig, prefill_config, split_config
from quire.kernels.triton.launch import num_processors

Rows = tuple[tuple[int, int], ...]

# Keys per tile, warps, stages, programs per multiprocessor, cost of a merge in tiles.
WHOLE = {  # all warps share a tile
    "bf16": (
        (64, 4, 3, 3, 1),
        (128, 4, 3, 1, 2),
        (32, 4, 4, 4, 2),
        (64, 4, 4, 2, 2),
        (32, 2, 3, 6, 1),
        (32, 2, 3, 6, 3),
        (64, 2, 3, 3, 1),
    ),
    "fp8": ((64, 4, 3, 3, 1), (64, 4, 3, 3, 3), (128, 4, 3, 2, 1), (128, 4, 3, 2, 3), (32, 4, 5, 4, 2)),
}
SWAP_AB = {  # swapped operands, by one warp: keys as rows, eight queries as columns
    "bf16": ((32, 3, 6, 1), (32, 4, 4, 1), (32, 2, 6, 1), (64, 3, 3, 1), (64, 2, 4, 1), (16, 4, 8, 1), (32, 3, 6, 3)),
    "fp8": ((64, 3, 6, 1), (64, 4, 4, 1), (64, 2, 8, 1), (32, 3, 10, 1), (128, 3, 3, 1), (64, 3, 6, 3)),
}  # keys, stages, programs per multiprocessor, merge
PREFILL = (  # packed rows, keys, warps, stages, registers per thread
    (128, 64, 8, 2, None), (128, 128, 8, 2, None), (64, 64, 4, 3, None), (64, 64, 4, 2, None), (128, 64, 8, 2, 128),
    (128, 32, 4, 3, None), (128, 32, 8, 4, 128), (64, 128, 4, 2, None),
)  # fmt: skip
# ..., programs per multiprocessor.
CASCADE = ((32, 64, 4, 3, 2), (64, 64, 4, 2, 2), (64, 128, 4, 2, 1), (128, 64, 8, 3, 1))


def decodes(rows: int, context: int) -> Rows:
    return tuple((context - 1, 1) for _ in range(rows))


def skewed(rows: int) -> Rows:
    """Return a few long sequences among many short ones."""
    return tuple((16383 if row % 16 == 0 else 100 + 37 * (row % 11), 1) for row in range(rows))


def uneven(rows: int) -> Rows:
    """Return sequences of mixed lengths, from some hundred to two thousand tokens."""
    return tuple((200 + 613 * row % 1800, 1) for row in range(rows))


DECODE_SHAPES = {
    "1x8192": decodes(1, 8192), "4x2048": decodes(4, 2048), "16x1024": decodes(16, 1024), "16x4096": decodes(16, 4096),
    "32x1024": decodes(32, 1024), "64x1024": decodes(64, 1024), "128x1024": decodes(128, 1024),
    "256x1024": decodes(256, 1024), "8 uneven": uneven(8), "32 uneven": uneven(32), "128 uneven": uneven(128),
    "512 short": tuple((99 + 613 * row % 400, 1) for row in range(512)),
    "16 uneven": uneven(16), "64 uneven": uneven(64), "256 uneven": uneven(256),
    "64 skewed": skewed(64),
}  # fmt: skip
PREFILL_SHAPES: dict[str, Rows] = {
    "64x128": ((0, 128),) * 64, "16x512": ((0, 512),) * 16, "4x2048": ((0, 2048),) * 4, "1x8192": ((0, 8192),),
    "2048 after 6144": ((6144, 2048),),
}  # fmt: skip


def tuning_cases() -> list[Case]:
    return [*_decode_cases(), *_prefill_cases(), *_cascade_cases()]


def _decode_cases() -> list[Case]:
    processors, cases = num_processors(DEVICE), []
    for dtype, whole in WHOLE.items():
        ways = [
            SplitConfig(16, n, warps, stages, each * processors, 256 // n, merge)
            for n, warps, stages, each, merge in whole
        ]
        for n, stages, each, merge in SWAP_AB[dtype]:
            ways.append(SplitConfig(8, n, 1, stages, each * processors, 256 // n, merge, swap_ab=True))
        for shape, rows in DECODE_SHAPES.items():
            used = split_config(4, 128, DTYPES[dtype], DEVICE, len(rows) * HEADS["8B"][1])
            for config in [used, *(way for way in ways if way != used)]:
                cases.append(
                    Case(f"decode {dtype} {shape}: {_named(config)}", "decode", rows, dtype=dtype, split=config)
                )
    return cases


def _prefill_cases() -> list[Case]:
    used, cases = prefill_config(128, torch.bfloat16, DEVICE), []
    ways = [used, *(PrefillConfig(*way) for way in PREFILL if PrefillConfig(*way) != used)]
    for shape, rows in PREFILL_SHAPES.items():
        for way in ways:
            name = (
                f"rows {way.block_m} keys {way.block_n} warps {way.warps} stages {way.stages} registers {way.registers}"
            )
            cases.append(Case(f"prefill {shape}: {name}", "prefill", rows, tile=way))
    return cases


def _cascade_cases() -> list[Case]:
    processors, cases = num_processors(DEVICE), []
    used = split_config(UNIT_ROWS, 128, torch.bfloat16, DEVICE)
    ways = [SplitConfig(m, n, warps, stages, each * processors, 4) for m, n, warps, stages, each in CASCADE]
    for groups, group, prefix, suffix in ((1, 256, 2048, 160), (64, 8, 512, 64)):
        rows = decodes(groups * group, prefix + suffix)
        for model, heads in HEADS.items():
            for config in [used, *(way for way in ways if way != used)]:
                name = f"cascade {model} {groups}x{group}: unit {config.block_m} {_named(config)}"
                cases.append(Case(name, "cascade", rows, heads, group=group, prefix=prefix, split=config))
    return cases


def _named(config: SplitConfig) -> str:
    each = config.programs // num_processors(DEVICE)
    kind = " swap_ab" if config.swap_ab else ""
    return f"keys {config.block_n} warps {config.warps} stages {config.stages} x{each} merge {config.merge_tiles}{kind}"


def show_best(rows: list[dict[str, object]]) -> None:
    """Print the three fastest configurations for each shape, and the time of the one in use."""
    ways: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        shape, way = str(row["case"]).split(": ")
        ways.setdefault(shape, []).append((float(str(row["us"])), way))
    for shape, found in ways.items():
        print(f"best of {shape}; in use {found[0][0]:.1f} us by {found[0][1]}")
        for us, way in sorted(found)[:3]:
            print(f"    {us:8.1f} us by {way}")
