"""A tiny model over the Triton kernels and a filled cache, given a step of one row: layer by layer, or as a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from quire.config.engine import CacheConfig, DeviceConfig
from quire.config.kv_cache import PLAIN, lay_out, stored_specs
from quire.config.memory import state_groups
from quire.config.model import ModelConfig, Quantization
from quire.kernels.cuda.row_phases import Phase
from quire.kernels.reference.row_program import ReferenceRowProgram
from quire.runtime.layers.builder import TORCH_DTYPES, LayerBuilder
from quire.runtime.layers.row_programs import RowKernel, RowRun
from quire.runtime.layers.step import ForwardStep, WindowStep
from quire.runtime.loading.weights import randomize_weights
from quire.runtime.models.base import BaseModel
from quire.runtime.models.build import build_model
from quire.runtime.worker.cache import KVCache
from tiny_models import DEVICE

ROWS, LINE = 3, 8  # of block tables


class CountedProgram(ReferenceRowProgram):
    """Counts its runs."""

    num_runs = 0

    def run(self, stream: Tensor, positions: Tensor, rows: Tensor, tables: Sequence[Tensor]) -> None:
        self.num_runs += 1
        super().run(stream, positions, rows, tables)


@dataclass
class ReferenceKernel:
    """Runs phases by the reference, on any device. Keeps the programs that it made."""

    made: list[CountedProgram] = field(default_factory=list)
    refuses: type | None = None  # phases of this type
    longest: int = 1 << 30  # of a program
    why_not_faster: str | None = None  # what `make` complains about

    def why_not(self, device: torch.device) -> str | None:
        return None

    def takes(self, phase: Phase) -> bool:
        return self.refuses is None or not isinstance(phase, self.refuses)

    def make(self, phases: Sequence[Phase], device: torch.device) -> RowRun:
        if self.why_not_faster is not None:
            raise ValueError(self.why_not_faster)
        self.made.append(CountedProgram(phases, device))
        self.made[-1].longest = self.longest
        return self.made[-1]


class NoKernel(ReferenceKernel):
    """Layers run one by one."""

    def why_not(self, device: torch.device) -> str | None:
        return "no kernel"


class RowBench:
    """Rows are anywhere in the blocks of a cache of random numbers; tables of windows name other blocks."""

    def __init__(
        self, config: ModelConfig, *, quantization: Quantization | None = None,
        kv_dtype: Literal["float32", "bfloat16", "float8", "int8", "int4"] | None = None, block_size: int = 4,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:  # fmt: skip
        config = replace(config, indexer=None)  # as on a GPU
        self.config, self._size = config, block_size
        device = DeviceConfig(DEVICE, dtype, kv_dtype or dtype, attention_backend="triton", quantization=quantization)
        builder = LayerBuilder(device, config.heads, block_size, config.local_heads)
        self.model = build_model(config, builder)
        assert isinstance(self.model, BaseModel)
        randomize_weights(self.model, 0)
        self.blocks, self.backend, self._width = self.model.blocks, builder.backend, config.hidden_size
        layout = lay_out(stored_specs(config.kv_specs, device.kv_dtype), split=True)
        num_blocks = ROWS * LINE * (1 + layout.num_window_blocks)
        groups = PLAIN if config.recurrent is None else state_groups(config, device.kv_dtype, block_size, 2)
        self.cache = KVCache(
            CacheConfig(block_size, num_blocks, groups=groups), config.heads, layout, TORCH_DTYPES[device.kv_dtype],
            torch.device(DEVICE), config.local_heads,
        )  # fmt: skip
        self._generator = torch.Generator().manual_seed(1)
        for layer in self.cache.layers:
            self._fill(layer, num_blocks)
        order = torch.randperm(num_blocks, generator=self._generator).int().view(-1, ROWS, LINE)
        self.tables = [order[source].contiguous().to(DEVICE) for source in layout.sources]
        self._filled = self.cache.blocks.clone()
        backend: Any = self.backend
        backend.reserve(self.cache.of_tables, ROWS)
        self.dtype = TORCH_DTYPES[dtype]

    def step(self, row: int, position: int, num_layers: int | None = None, **changes: Any) -> ForwardStep:
        """A step in which a row decodes; below 0: it is padding."""
        rows = torch.tensor([row], dtype=torch.int32, device=DEVICE)
        positions = torch.tensor([position], device=DEVICE)
        backend: Any = self.backend
        plan = backend.plan(rows, positions, (positions + 1) * (rows >= 0), self.tables[0], None)
        values: dict[str, Any] = {
            "token_ids": positions[:0], "positions": positions, "lengths": positions + 1, "max_length": position + 1,
            "slots": positions[:0], "caches": self.cache.layers, "attention": plan, "backend": backend,
            "num_layers": num_layers,
            "windows": tuple(WindowStep(positions[:0], plan.over(tables)) for tables in self.tables[1:]),
        }  # fmt: skip
        return ForwardStep(**(values | changes))

    def run(self, kernel: RowKernel, step: ForwardStep) -> tuple[Tensor, Tensor]:
        """The hidden states of a step over the cache as it was filled, and the memory of the cache afterwards."""
        self.blocks.run_rows_by(kernel)
        return self.go_on(step)

    def go_on(self, step: ForwardStep) -> tuple[Tensor, Tensor]:
        self.cache.blocks.copy_(self._filled)
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(1, self._width, generator=generator).to(DEVICE, self.dtype)
        hidden: Tensor = self.blocks(x, step)
        return hidden.clone(), self.cache.blocks.clone()

    def values(self) -> list[Tensor]:
        """The keys and values of all layers as they are read, one after the other."""
        from quire.kernels.reference.cache_quantize import dequantize_heads

        return [
            side.float() if scales is None else dequantize_heads(side, scales)
            for layer in self.cache.layers
            for side, scales in ((layer.key, layer.key_scales), (layer.value, layer.value_scales))
        ]

    def _fill(self, layer: Any, num_blocks: int) -> None:
        heads, dim = layer.key.shape[1], layer.dim
        numbers = [
            torch.randn(num_blocks, self._size, heads, dim, generator=self._generator).to(DEVICE) for _ in range(2)
        ]
        slots = torch.arange(num_blocks * layer.block_heads * self._size, device=DEVICE)
        own = slots.view(num_blocks, layer.block_heads, self._size)[:, :heads].transpose(1, 2)
        key, value = (each.flatten(0, 1) for each in numbers)
        layer.write(key, None if layer.is_latent else value, own.flatten())
