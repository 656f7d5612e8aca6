"""Times LoRA kernels with many adapters: python -m benchmarks.gpu.low_rank [--rows 64] [--adapters 64]

First the kernels alone, for each linear layer of an 8B model: both launches inside a CUDA graph over cold memory, with
several configurations, and the error against plain torch. Then the linear layers, norms and gates of whole blocks
(without attention), without adapters and with them, as an engine computes them. The floor is reading A and B of every
adapter once at the peak read bandwidth.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu.kernel_timing import READ_CEILING, relative_error
from quire.config.engine import DeviceConfig
from quire.config.model import Heads
from quire.kernels.reference.lora import add_low_rank
from quire.kernels.triton.compiling import compiling_only
from quire.kernels.triton.lora import LoraConfig, OutputBlocks, add_tiles
from quire.kernels.triton.measurement import graph_us
from quire.runtime.accelerator import dependent_rows
from quire.runtime.adapters.slots import parts_of
from quire.runtime.attention.branches import SideBranch
from quire.runtime.layers.adapted import ActiveAdapters, StackedAdapters, slot_tensors
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.step import AdaptedRows, AdapterStep, AdapterTiles, group_slots
from quire.runtime.layers.stream import Stream
from quire.runtime.loading.weights import randomize_weights
from quire.runtime.worker.adapters import tile_rows, tile_tokens

LAYERS = {
    "q, k, v": (4096, (4096, 1024, 1024)), "output": (4096, (4096,)), "gate, up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}  # fmt: skip
CONFIGS = (
    LoraConfig(inputs=1024, outputs=1024, numbers=64),
    LoraConfig(inputs=512, outputs=512, numbers=64),
    LoraConfig(inputs=512, outputs=512, numbers=32),
    LoraConfig(inputs=2048, outputs=2048, numbers=128),
)
COLD_BYTES = 160 << 20
NUM_BLOCKS, MODEL_BLOCKS = 4, 32  # blocks that are timed, and blocks of the model


class Sizes(NamedTuple):
    """The sizes of a model's blocks."""

    hidden: int = 4096
    heads: Heads = Heads(32, 8, 128)
    intermediate: int = 14336


class Block(nn.Module):
    """The linear layers of a decoder block, its norms and its gate."""

    def __init__(self, sizes: Sizes, build: LayerBuilder) -> None:
        super().__init__()
        self._read = sizes.heads.query_size
        self.input_layernorm = build.rms_norm("input_layernorm", sizes.hidden, 1e-5)
        self.qkv_proj = build.qkv_linear(sizes.hidden, sizes.heads, bias=False)
        self.o_proj = build.row_linear("o_proj", sizes.heads, sizes.hidden, bias=False)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", sizes.hidden, 1e-5)
        self.mlp = build.gated_mlp(sizes.hidden, sizes.intermediate, "silu", bias=False)

    def forward(self, stream: Stream) -> None:
        qkv = self.qkv_proj(self.input_layernorm(stream))
        stream.add(self.o_proj.later(qkv[:, : self._read]))  # queries stand for the attention output
        stream.add(self.mlp(self.post_attention_layernorm(stream)))


class Step:
    """Blocks with adapters, and one step's rows of them."""

    def __init__(self, sizes: Sizes, options: argparse.Namespace, device: torch.device, dtype: str) -> None:
        config = DeviceConfig(device=str(device), dtype=dtype, kv_dtype=dtype, attention_backend="triton")
        build = LayerBuilder(config, sizes.heads)
        self.blocks = nn.ModuleList(Block(sizes, build) for _ in range(options.blocks)).requires_grad_(False)
        randomize_weights(self.blocks, seed=1)
        self.active = ActiveAdapters()
        limits, self.num_bytes, dependent = (options.adapters, options.rank), 0, dependent_rows(device)
        side = SideBranch(device) if device.type == "cuda" else None
        for path, layer in self.blocks.named_modules():
            if isinstance(layer, Linear):
                parts, shape = parts_of(path, layer), (*limits, layer.num_inputs, layer.num_outputs)
                memory = slot_tensors(parts, shape, build.placement)
                for tensor in memory:
                    tensor.normal_(0, 0.01)
                    self.num_bytes += tensor.nbytes
                ranks = np.full((options.adapters, len(parts)), options.rank, dtype=np.int32)
                both = torch.from_numpy(ranks).to(device), ranks
                layer.adapters = StackedAdapters(parts, memory, self.active, both, dependent, side)
        slots = np.arange(options.rows) % options.adapters
        arrays = (torch.from_numpy(each).to(device) for each in tile_tokens(slots, tile_rows(options.rows)))
        self.tiled = AdaptedRows(tiles=AdapterTiles(*arrays))
        self.grouped = AdaptedRows(group_slots(slots, device))
        self.x = torch.randn(options.rows, sizes.hidden, device=device).to(build.placement.dtype)

    def run(self, rows: AdaptedRows | None) -> Tensor:
        """Run the blocks with the adapters of these rows: `tiled` with Triton kernels, `grouped` with plain torch;
        None: without adapters."""
        self.active.begin(None if rows is None else AdapterStep(rows, rows))
        stream = Stream(self.x.clone(), leaves_pending=True)
        for block in self.blocks:
            block(stream)
        found: Tensor = stream.settle()
        return found


def measure_blocks(options: argparse.Namespace) -> None:
    step = Step(Sizes(), options, torch.device("cuda"), "bfloat16")
    floor = step.num_bytes / options.blocks / READ_CEILING * 1e6
    without, us = (_us(partial(step.run, rows)) / options.blocks for rows in (None, step.tiled))
    more, error = us - without, relative_error(step.run(step.tiled), step.run(step.grouped))
    print(
        f"a block without adapters: {without:.1f} us; with them: {us:.1f} us ({100 * without / us:.1f} % of the "
        f"throughput), {more:.1f} us more; A and B at the ceiling: {floor:.1f} us ({100 * floor / more:.0f} % of it); "
        f"{MODEL_BLOCKS} blocks: {MODEL_BLOCKS * more / 1e3:.2f} ms more; err {error:.1e}",
        flush=True,
    )


def _us(run: Callable[[], Tensor]) -> float:
    with compiling_only():
        run()
    return graph_us([run])


def measure_kernels(name: str, options: argparse.Namespace) -> None:
    """Measure both launches alone."""
    cuda, (inputs, parts) = torch.device("cuda"), LAYERS[name]
    ends = np.cumsum(parts).tolist()
    runs = [[(end - size, end)] for size, end in zip(parts, ends, strict=True)]
    slots, rank = np.arange(options.rows) % options.adapters, options.rank
    order, tiles, _ = (torch.from_numpy(each).to(cuda) for each in tile_tokens(slots, tile_rows(options.rows)))
    ranks = torch.full((options.adapters, len(parts)), rank, dtype=torch.int32, device=cuda)
    size = 2 * options.adapters * rank * (inputs * len(parts) + sum(parts))
    a = [torch.randn(options.adapters, len(parts) * rank, inputs, device=cuda).bfloat16() * 0.01]
    b = [(torch.randn(options.adapters, rank, sum(parts), device=cuda).bfloat16() * 0.01).transpose(1, 2)]
    for _ in range(-(-COLD_BYTES // size) - 1):
        a.append(a[0].clone())
        b.append(b[0].clone())  # keeps the strides
    x = torch.randn(options.rows, inputs, device=cuda).bfloat16()
    wanted = torch.zeros(options.rows, sum(parts), device=cuda)
    groups = [(slot, torch.from_numpy(np.flatnonzero(slots == slot)).to(cuda)) for slot in range(options.adapters)]
    add_low_rank(wanted, x.float(), a[0].float(), b[0].float(), groups, ranks.tolist(), runs)
    floor = size / READ_CEILING * 1e6
    print(f"{name}: {size / 1e6:.1f} MB, {floor:.1f} us at the ceiling")
    for config in CONFIGS:
        blocks, found = OutputBlocks.of(runs, rank, cuda, config.outputs), torch.zeros_like(wanted, dtype=x.dtype)
        rows = (ranks, order, tiles, blocks)
        add_tiles(found, x, a[0], b[0], *rows, config=config)
        error, out = relative_error(found, wanted), torch.randn_like(found)
        pairs = zip(a, b, strict=True)
        us = graph_us([partial(add_tiles, out, x, *pair, *rows, config=config, dependent=True) for pair in pairs])
        print(f"  {tuple(config)!s:28s} {us:6.2f} us ({100 * floor / us:3.0f} %), err {error:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16, help="a multiple of 16")
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help="decoder blocks that are timed together")
    options = parser.parse_args()
    for name in LAYERS:
        measure_kernels(name, options)
    measure_blocks(options)


if __name__ == "__main__":
    main()
