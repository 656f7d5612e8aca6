"""Times the low-rank changes of many adapters: python -m benchmarks.gpu.low_rank [--rows 64] [--adapters 64]

First the kernels alone, for each linear layer of an 8B model: both launches inside a CUDA graph over cold memory, by
each way to cut them into programs, and the error against plain torch. Then the linear layers, norms and gates of whole
blocks, without attention: without adapters, and with them computed after the product, around it and beside it. The
floor is A and B of every adapter, read once at the read ceiling.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu import low_rank_before
from benchmarks.gpu.kernel_timing import READ_CEILING, relative_error
from quire.config.engine import DeviceConfig
from quire.config.model import Heads
from quire.kernels.reference.lora import add_low_rank
from quire.kernels.triton import lora, lora_few
from quire.kernels.triton.compiling import compiling_only
from quire.kernels.triton.gauge import graph_us
from quire.kernels.triton.lora import OutputBlocks
from quire.kernels.triton.lora_few import FewConfig, add_few_tiles
from quire.runtime.accelerator import dependent_rows
from quire.runtime.adapters.slots import parts_of
from quire.runtime.attention.branches import SideBranch
from quire.runtime.layers import adapted
from quire.runtime.layers.adapted import ActiveAdapters, StackedAdapters, slot_tensors
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.ops import TritonOps
from quire.runtime.layers.step import AdaptedRows, AdapterStep, AdapterTiles
from quire.runtime.layers.stream import Stream
from quire.runtime.loading.weights import randomize_weights
from quire.runtime.worker.adapters import tile_rows, tile_tokens

LAYERS = {
    "q, k, v": (4096, (4096, 1024, 1024)), "output": (4096, (4096,)), "gate, up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}  # fmt: skip
CONFIGS = (
    FewConfig(1024, 1024, 64, None),
    FewConfig(1024, 1024, 64, 80),
    FewConfig(512, 512, 64, 96),
    FewConfig(512, 512, 32, 64),
)
COLD_BYTES = 160 << 20
NUM_BLOCKS, MODEL_BLOCKS = 4, 32  # that are timed, and those of the model


class Sizes(NamedTuple):
    """Of a model's blocks."""

    hidden: int = 4096
    heads: Heads = Heads(32, 8, 128)
    intermediate: int = 14336


class Way(NamedTuple):
    """How a step computes what adapters change."""

    name: str
    way: str  # see `adapted.WAY`
    config: FewConfig = lora_few.CONFIG
    is_old: bool = False  # by the kernels of `low_rank_before`, among norms and gates that wait for all before them
    is_first: bool = True  # the side stream gets free multiprocessors first


WAYS = (
    Way("as before", "after", is_old=True),
    *(Way(way, way) for way in ("after", "before", "around", "beside")),
    Way("beside, no priority", "beside", is_first=False),
    *(Way(f"beside, {tuple(config)}", "beside", config) for config in CONFIGS if config != lora_few.CONFIG),
)


class Block(nn.Module):
    """The linear layers of a decoder's block, its norms and its gate."""

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
        stream.add(self.o_proj.later(qkv[:, : self._read]))  # queries in place of what they read
        stream.add(self.mlp(self.post_attention_layernorm(stream)))


class Step:
    """Blocks with adapters, and one step's rows of them."""

    def __init__(self, sizes: Sizes, options: argparse.Namespace, device: torch.device, dtype: str) -> None:
        config = DeviceConfig(device=str(device), dtype=dtype, kv_dtype=dtype, attention_backend="triton")
        build = LayerBuilder(config, sizes.heads)
        self._ops, self.placement = build._ops, build.placement
        self.blocks = nn.ModuleList(Block(sizes, build) for _ in range(options.blocks)).requires_grad_(False)
        randomize_weights(self.blocks, seed=1)
        self.active, self._rank = ActiveAdapters(), options.rank
        limits, self.num_bytes = (options.adapters, options.rank), 0
        self._memory: dict[str, tuple[Tensor, Tensor]] = {}
        for path, layer in self.blocks.named_modules():
            if isinstance(layer, Linear):
                shape = (*limits, layer.num_inputs, layer.num_outputs)
                self._memory[path] = slot_tensors(parts_of(path, layer), shape, self.placement)
                for tensor in self._memory[path]:
                    tensor.normal_(0, 0.01)
                    self.num_bytes += tensor.nbytes
        slots = np.arange(options.rows) % options.adapters
        arrays = (torch.from_numpy(each).to(device) for each in tile_tokens(slots, tile_rows(options.rows)))
        tiles = AdapterTiles(tile_rows(options.rows), *arrays)
        self._rows = AdapterStep(AdaptedRows(tiles=tiles), AdaptedRows(tiles=tiles))
        self.x = torch.randn(options.rows, sizes.hidden, device=device).to(self.placement.dtype)

    @contextmanager
    def by(self, way: Way) -> Iterator[None]:
        """Inside, adapters are computed in this way."""
        before = adapted.WAY, lora_few.CONFIG, lora.add_few_tiles
        dependent = dependent_rows(self.x.device)
        adapted.WAY, lora_few.CONFIG = way.way, way.config
        if way.is_old:
            lora.add_few_tiles = low_rank_before.add_few_tiles
        if isinstance(self._ops, TritonOps):
            self._ops._dependent_rows = sys.maxsize if way.is_old else dependent
        self._attach(way, dependent)
        try:
            yield
        finally:
            adapted.WAY, lora_few.CONFIG, lora.add_few_tiles = before

    def _attach(self, way: Way, dependent: int) -> None:
        side = None
        if self.x.is_cuda:
            side = SideBranch(self.x.device)
            side._stream = side._stream if way.is_first else torch.cuda.Stream(self.x.device)
        for path, layer in self.blocks.named_modules():
            if isinstance(layer, Linear):
                parts, memory = parts_of(path, layer), self._memory[path]
                ranks = np.full((len(memory[0]), len(parts)), self._rank, dtype=np.int32)
                on_device = torch.from_numpy(ranks).to(self.x.device)
                layer.adapters = StackedAdapters(parts, memory, self.active, (on_device, ranks), dependent, side)

    def run(self, *, adapts: bool = True) -> Tensor:
        self.active.begin(self._rows if adapts else None)
        stream = Stream(self.x.clone(), leaves_pending=True)
        for block in self.blocks:
            block(stream)
        found: Tensor = stream.settle()
        return found


def measure_blocks(options: argparse.Namespace, ways: Sequence[Way]) -> None:
    step = Step(Sizes(), options, torch.device("cuda"), "bfloat16")
    floor = step.num_bytes / options.blocks / READ_CEILING * 1e6
    with step.by(ways[0]):
        without = _us(partial(step.run, adapts=False)) / options.blocks
    print(f"a block without adapters: {without:.1f} us; A and B at the ceiling: {floor:.1f} us")
    wanted = None
    for way in ways:
        with step.by(way):
            us = _us(step.run) / options.blocks
            found = step.run()
        wanted = found if wanted is None else wanted
        more, error = us - without, relative_error(found, wanted)
        print(
            f"  {way.name:28s} {us:7.1f} us, {more:5.1f} more ({100 * floor / more:3.0f} % of it the floor), "
            f"{MODEL_BLOCKS} blocks {MODEL_BLOCKS * more / 1e3:.2f} ms more, {100 * without / us:.1f} % of the "
            f"throughput, differs by {error:.1e}",
            flush=True,
        )


def _us(run: partial[Tensor] | object) -> float:
    with compiling_only():
        run()  # type: ignore[operator]
    return graph_us([run])  # type: ignore[list-item]


def measure_kernels(name: str, options: argparse.Namespace) -> None:
    """Both launches alone."""
    cuda, (inputs, parts) = torch.device("cuda"), LAYERS[name]
    ends = np.cumsum(parts).tolist()
    runs = [[(end - size, end)] for size, end in zip(parts, ends, strict=True)]
    slots, rank = np.arange(options.rows) % options.adapters, options.rank
    order, tiles, _ = (torch.from_numpy(each).to(cuda) for each in tile_tokens(slots, tile_rows(options.rows)))
    ranks = torch.full((options.adapters, len(parts)), rank, dtype=torch.int32, device=cuda)
    size = 2 * options.adapters * rank * (inputs * len(parts) + sum(parts))
    a = [torch.randn(options.adapters, len(parts) * rank, inputs, device=cuda).bfloat16() * 0.01]
    b = [torch.randn(options.adapters, sum(parts), rank, device=cuda).bfloat16() * 0.01]
    for _ in range(-(-COLD_BYTES // size) - 1):
        a.append(a[0].clone())
        b.append(b[0].clone())
    x = torch.randn(options.rows, inputs, device=cuda).bfloat16()
    wanted = torch.zeros(options.rows, sum(parts), device=cuda)
    groups = [(slot, torch.from_numpy(np.flatnonzero(slots == slot)).to(cuda)) for slot in range(options.adapters)]
    add_low_rank(wanted, x.float(), a[0].float(), b[0].float(), groups, ranks.tolist(), runs)
    floor = size / READ_CEILING * 1e6
    print(f"{name}: {size / 1e6:.1f} MB, {floor:.1f} us at the ceiling")
    named = {str(tuple(config)): partial(add_few_tiles, config=config) for config in CONFIGS}
    for label, add in {"as before": low_rank_before.add_few_tiles, **named}.items():
        wide = 1024 if label == "as before" else add.keywords["config"].outputs  # type: ignore[union-attr]
        blocks, found = OutputBlocks.of(runs, cuda, wide), torch.zeros_like(wanted, dtype=x.dtype)
        rest = (ranks, order, tiles, blocks.wide)
        flags = {"are_aligned": blocks.are_aligned, "dependent": True}
        add(found, x, a[0], b[0], *rest, **flags)  # type: ignore[operator]
        error, out = relative_error(found, wanted), torch.randn_like(found)
        us = graph_us([partial(add, out, x, *pair, *rest, **flags) for pair in zip(a, b, strict=True)])  # type: ignore[call-overload]
        print(f"  {label:28s} {us:6.2f} us ({100 * floor / us:3.0f} %), err {error:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16, help="a multiple of 16")
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help="decoder blocks that are timed together")
    options = parser.parse_args()
    for name in LAYERS:
        measure_kernels(name, options)
    measure_blocks(options, WAYS)


if __name__ == "__main__":
    main()
