"""What a worker is made of, for the kernels its attention backend runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.runtime.layers.builder import TORCH_DTYPES
from quire.runtime.models.registry import Model
from quire.runtime.worker.batch import BatchBuilder
from quire.runtime.worker.cache import KVCache
from quire.runtime.worker.rows import Rows
from quire.runtime.worker.runner import Batches, RowSampler, StepOutput
from quire.types.step import StepPlan


class Graphs(Protocol):
    """Steps that are captured."""

    def takes(self, plan: StepPlan) -> bool:
        """Whether this step can run by a graph."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Run it, rows updated."""


class NoGraphs:
    """Nothing is captured."""

    def takes(self, plan: StepPlan) -> bool:  # noqa: ARG002
        return False

    def run(self, plan: StepPlan) -> StepOutput:
        raise AssertionError(f"step {plan.step} was not taken")


@dataclass(frozen=True, slots=True)
class Parts:
    rows: Rows
    cache: KVCache
    batches: Batches
    graphs: Graphs


def make_parts(
    model: Model, backend: Any, sampler: RowSampler, model_config: ModelConfig, config: EngineConfig
) -> Parts:
    """Allocates the KV cache and all rows."""
    device = torch.device(config.device.device)
    capacity = config.scheduler.max_model_len + 1  # the token that ends a full sequence is kept too
    row_shape = (config.scheduler.num_rows, capacity, config.cache.block_size, device)
    kv_dtype = TORCH_DTYPES[config.device.kv_dtype]
    cache_shape = (config.cache, model_config.heads, model_config.num_layers, kv_dtype, device)
    if backend.kernels != "triton":
        rows, cache = Rows(*row_shape), KVCache(*cache_shape)
        return Parts(rows, cache, BatchBuilder(rows, cache, backend), NoGraphs())
    from quire.runtime.worker.device_batch import DeviceBatchBuilder
    from quire.runtime.worker.device_cache import DeviceCache
    from quire.runtime.worker.device_rows import DeviceRows

    device_rows, device_cache = DeviceRows(*row_shape), DeviceCache(*cache_shape)
    backend.reserve(device_cache.layers[0], config.scheduler.num_rows)
    batches = DeviceBatchBuilder(device_rows, device_cache, backend, plain=model.fused is None)
    graphs = _make_graphs(model, backend, sampler, device_rows, device_cache, config)
    return Parts(device_rows, device_cache, batches, graphs)


def _make_graphs(
    model: Model, backend: Any, sampler: RowSampler, rows: Any, cache: KVCache, config: EngineConfig
) -> Graphs:
    from quire.runtime.models.triton_stack import TritonStack
    from quire.runtime.sampling.sampler import Sampler
    from quire.runtime.sampling.triton_choice import TritonChoice
    from quire.runtime.worker.capture import CudaCapture, NoCapture
    from quire.runtime.worker.graphs import DecodeGraphs

    stack = model.fused
    if config.device.enforce_eager or not isinstance(stack, TritonStack) or not isinstance(sampler, Sampler):
        return NoGraphs()
    if not isinstance(sampler.choice, TritonChoice):
        return NoGraphs()
    capture = CudaCapture(rows.device) if rows.device.type == "cuda" else NoCapture()
    return DecodeGraphs(model, stack, rows, cache, backend, sampler, sampler.choice, capture)
