"""Times the low-rank changes of many adapters alone: python -m benchmarks.gpu.low_rank [--rows 64] [--adapters 64]

For each linear layer of an 8B model: A and B of every adapter read once at the read ceiling, the time of both launches
inside a CUDA graph over cold memory with K split one way and another, and the error against plain torch.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.kernel_timing import READ_CEILING, relative_error
from quire.kernels.reference.lora import add_low_rank
from quire.kernels.triton.gauge import graph_us
from quire.kernels.triton.lora import OutputBlocks, add_tiles
from quire.kernels.triton.lora_few import add_few_tiles
from quire.runtime.worker.adapters import tile_rows, tile_tokens

CUDA = torch.device("cuda")
LAYERS = {
    "q, k, v": (4096, (4096, 1024, 1024)), "output": (4096, (4096,)), "gate, up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}  # fmt: skip
SPLITS = (512, 1024, 2048)
COLD_BYTES = 160 << 20


def measure(name: str, options: argparse.Namespace) -> float:
    """Microseconds of the way in use."""
    inputs, parts = LAYERS[name]
    ends = np.cumsum(parts).tolist()
    runs = [[(end - size, end)] for size, end in zip(parts, ends, strict=True)]
    slots, rank = np.arange(options.rows) % options.adapters, options.rank
    most = tile_rows(options.rows)
    order, tiles = (torch.from_numpy(each).to(CUDA) for each in tile_tokens(slots, most, None))
    ranks = torch.full((options.adapters, len(parts)), rank, dtype=torch.int32, device=CUDA)
    size = 2 * options.adapters * rank * (inputs * len(parts) + sum(parts))
    a = [torch.randn(options.adapters, len(parts) * rank, inputs, device=CUDA).bfloat16() * 0.01]
    b = [torch.randn(options.adapters, sum(parts), rank, device=CUDA).bfloat16() * 0.01]
    for _ in range(-(-COLD_BYTES // size) - 1):
        a.append(a[0].clone())
        b.append(b[0].clone())
    x = torch.randn(options.rows, inputs, device=CUDA).bfloat16()
    out, blocks = torch.randn(options.rows, sum(parts), device=CUDA).bfloat16(), OutputBlocks.of(runs, CUDA)
    wanted = torch.zeros(out.shape, device=CUDA)
    groups = [(slot, torch.from_numpy(np.flatnonzero(slots == slot)).to(CUDA)) for slot in range(options.adapters)]
    add_low_rank(wanted, x.float(), a[0].float(), b[0].float(), groups, ranks.tolist(), runs)
    found = torch.zeros_like(out)
    add_tiles(found, x, a[0], b[0], ranks, order, tiles, most, blocks, dependent=True)
    error = relative_error(found, wanted)
    print(f"{name}: {size / 1e6:.1f} MB, {size / READ_CEILING * 1e6:.1f} us at the ceiling, err {error:.1e}")
    pairs = list(zip(a, b, strict=True))
    for split in SPLITS:
        calls = [
            partial(
                add_few_tiles, out, x, *pair, ranks, order, tiles, blocks.wide, are_aligned=blocks.are_aligned,
                split_inputs=split, dependent=True,
            )
            for pair in pairs
        ]  # fmt: skip
        print(f"  {split} inputs a program: {graph_us(calls):.2f} us", flush=True)
    tiled = partial(add_tiles, out, x)
    us = graph_us([partial(tiled, *pair, ranks, order, tiles, most, blocks, dependent=True) for pair in pairs])
    many = tuple(torch.from_numpy(each).to(CUDA) for each in tile_tokens(slots, 64, None))
    dots = graph_us([partial(tiled, *pair, ranks, *many, 64, blocks, dependent=True) for pair in pairs])
    print(f"  as chosen: {us:.2f} us ({100 * size / us * 1e6 / READ_CEILING:.0f} %), by tensor cores {dots:.2f} us")
    return us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    total = sum(measure(name, options) for name in LAYERS)
    print(f"32 layers: {32 * total / 1e3:.2f} ms")


if __name__ == "__main__":
    main()
