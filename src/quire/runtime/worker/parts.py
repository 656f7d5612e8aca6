"""Builds the components of a worker for its device and attention backend: rows, cache, batch builder, forward pass and
graphs. Worker.__init__ calls `make_parts`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from quire.config.attention_memory import scratch_tokens
from quire.config.engine import EngineConfig, row_buckets, token_buckets
from quire.config.kv_cache import lay_out, stored_specs
from quire.config.model import ModelConfig
from quire.runtime.device import torch_device
from quire.runtime.layers.builder import TORCH_DTYPES
from quire.runtime.layers.received import ReceivedStream
from quire.runtime.models.build import Model
from quire.runtime.parallel.group import RankGroup
from quire.runtime.parallel.ranks import Ranks
from quire.runtime.parallel.vocabulary import Vocabulary
from quire.runtime.standby.memory import add_cache
from quire.runtime.worker.adapters import RowAdapters
from quire.runtime.worker.batch import BatchBuilder, tables_of
from quire.runtime.worker.cache import KVCache
from quire.runtime.worker.host_batch import HostBatchBuilder
from quire.runtime.worker.images import ImageRows
from quire.runtime.worker.rows import Rows
from quire.runtime.worker.runner import Batches, Forward, Graphs, NoGraphs, PlainForward, RowSampler
from quire.runtime.worker.states import RowStates
from quire.runtime.worker.virtual_batch import VirtualBatchBuilder
from quire.runtime.worker.virtual_cache import VirtualCache
from quire.runtime.worker.virtual_rows import VirtualRows
from quire.runtime.worker.warmup import NOTHING_LEFT, WarmupLeft

RowShape = tuple[int, int, int, torch.device, int, int]  # the arguments of Rows


class Preparing(Protocol):
    """Warms up a worker; `prepare` in prepare.py, with its arguments bound."""

    def __call__(self, seconds: float) -> WarmupLeft:
        """Compile kernels and capture graphs for about `seconds`, so that the first requests need not wait for that.
        Changes no row and no block."""


def nothing_to_prepare(seconds: float) -> WarmupLeft:  # noqa: ARG001
    """Do nothing: no kernel is compiled and no graph is captured here."""
    return NOTHING_LEFT


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The components of a worker that `make_parts` builds for its device and attention backend."""

    rows: Rows
    cache: KVCache
    batches: Batches
    forward: Forward
    graphs: Graphs
    prepare: Preparing = nothing_to_prepare
    states: RowStates | None = None  # of models with recurrent layers
    images: ImageRows | None = None  # of models that take images


def make_parts(
    model: Model,
    backend: Any,
    sampler: RowSampler,
    model_config: ModelConfig,
    config: EngineConfig,
    ranks: Ranks,
    vocabulary: Vocabulary | None,
    *,
    cache: KVCache | None = None,
    adapters: RowAdapters | None = None,
) -> WorkerParts:
    """Build the components of a worker. Allocates all rows and, unless `cache` is given, the KV cache. `model_config`
    is that of this rank."""
    device = torch_device(config.device.device)
    capacity = config.scheduler.max_model_len + 1  # one more for the last token of a sequence of full length
    num_windows = config.cache.groups.num_window_blocks
    row_shape = (
        config.scheduler.num_rows,
        capacity,
        config.cache.block_size,
        device,
        num_windows,
        config.cache.num_blocks,
    )
    if cache is None:
        cache = _make_cache(backend, model_config, config, row_shape)
        add_cache(cache.blocks)
    if backend.kernels == "triton":
        return _device_parts(
            model, backend, sampler, row_shape, cache, model_config, config, ranks, vocabulary, adapters
        )
    if isinstance(cache, VirtualCache):
        virtual = VirtualRows(*row_shape[:4], cache.ranges)
        images = _make_images(model, model_config, config, virtual, ())
        mapped = VirtualBatchBuilder(virtual, cache, backend, _with_axes(images), adapters)
        return WorkerParts(virtual, cache, mapped, PlainForward(model), NoGraphs(), images=images)
    if backend.kernels == "native":
        model.trace(cache.layers)
    rows = Rows(*row_shape)
    states = _make_states(cache, rows)
    images = _make_images(model, model_config, config, rows, tables_of(rows, cache))
    make_builder = HostBatchBuilder if device.type == "cpu" else BatchBuilder
    batches = make_builder(rows, cache, backend, states, _with_axes(images), adapters)
    return WorkerParts(rows, cache, batches, PlainForward(model), NoGraphs(), states=states, images=images)


def _make_states(cache: KVCache, rows: Rows) -> RowStates | None:
    return RowStates(cache.states, rows.num_rows, rows.uploader) if cache.states else None


def _with_axes(images: ImageRows | None) -> ImageRows | None:
    """Return what steps need to know of images to place tokens; None if these have plain positions."""
    return images if images is not None and images.has_axes else None


def _make_images(
    model: Model, model_config: ModelConfig, config: EngineConfig, rows: Rows, tables: tuple[torch.Tensor, ...]
) -> ImageRows | None:
    tower, vision, limits = model.tower, model_config.vision, config.scheduler.images
    if tower is None or vision is None:
        return None
    own = tower if model_config.is_first_stage else None
    return ImageRows(own, vision, rows.num_rows, limits, rows.device, rows.uploader, tables, rows.block_size)


def _make_cache(backend: Any, model_config: ModelConfig, config: EngineConfig, row_shape: RowShape) -> KVCache:
    make = KVCache
    if backend.kernels == "triton":
        from quire.runtime.worker.device_cache import DeviceCache

        make = DeviceCache
    kv_dtype, device = TORCH_DTYPES[config.device.kv_dtype], torch_device(config.device.device)
    cache, heads = config.cache, model_config.heads
    if cache.layout == "virtual":
        num_rows, capacity, block_size, *_ = row_shape
        shape = (num_rows, -(-capacity // block_size))
        return VirtualCache(cache, heads, len(model_config.kv_specs), kv_dtype, device, shape)
    specs = stored_specs(model_config.kv_specs, config.device.kv_dtype)
    layout = lay_out(specs, split=cache.groups.window is not None)
    return make(cache, heads, layout, kv_dtype, device, model_config.local_heads)


def _device_parts(
    model: Model,
    backend: Any,
    sampler: RowSampler,
    row_shape: RowShape,
    cache: KVCache,
    model_config: ModelConfig,
    config: EngineConfig,
    ranks: Ranks,
    vocabulary: Vocabulary | None,
    adapters: RowAdapters | None,
) -> WorkerParts:
    from quire.runtime.worker.capture import CudaCapture, NoCapture
    from quire.runtime.worker.decode_graphs import DecodeGraphs
    from quire.runtime.worker.device_batch import DeviceBatchBuilder
    from quire.runtime.worker.device_parts import DeviceParts
    from quire.runtime.worker.device_rows import DeviceRows
    from quire.runtime.worker.forward_graphs import ForwardGraphs
    from quire.runtime.worker.prepare import prepare
    from quire.runtime.worker.shared_prefixes import SharedPrefixes
    from quire.runtime.worker.short_graphs import AllGraphs, ShortGraphs
    from quire.runtime.worker.stage_graphs import HiddenGraphs

    rows, scheduler = DeviceRows(*row_shape), config.scheduler
    most = scheduler.num_rows if config.speculation is None else scheduler.num_samples  # decode attention tokens
    backend.reserve(cache.of_tables, most, scratch_tokens(model_config, config))
    states = _make_states(cache, rows)
    images = _make_images(model, model_config, config, rows, tables_of(rows, cache))
    placed = _with_axes(images)
    shared = DeviceParts(rows, cache, backend, SharedPrefixes(rows, backend), states, placed, adapters)
    on_gpu, group = rows.device.type == "cuda", ranks.tensor
    is_captured, is_stage = model.is_static and (group.in_graphs or not on_gpu), ranks.place.config.pipeline > 1
    if config.device.enforce_eager or not is_captured:
        batches = DeviceBatchBuilder(shared, (), plain=not model.is_static)
        return WorkerParts(rows, cache, batches, PlainForward(model), NoGraphs(), states=states, images=images)
    model.reserve(rows.capacity)
    buckets = token_buckets(model_config, config)
    if isinstance(model.embedding, ReceivedStream):
        model.embedding.reserve(max(*buckets, *row_buckets(rows.spare)), rows.device)
    capture = CudaCapture(rows.device, alone=group.size == 1, is_stage=is_stage) if on_gpu else NoCapture()
    batches = DeviceBatchBuilder(shared, buckets, plain=False)
    choice, forward = _device_choice(sampler), ForwardGraphs(model, capture)
    graphs: DecodeGraphs | HiddenGraphs
    if not ranks.place.is_last_stage:
        graphs = HiddenGraphs(model, shared, capture)
    elif choice is None:
        return WorkerParts(rows, cache, batches, forward, NoGraphs(), states=states, images=images)
    else:
        has_programs = placed is None and not is_stage
        graphs = DecodeGraphs(model, shared, *choice, capture, vocabulary, has_programs=has_programs)
    agree, alone = partial(_agree, group, rows.device), group.size == 1 and not is_stage
    ready = partial(prepare, batches, forward, graphs, agree, alone=alone, shared=shared.shared)
    has_short = config.speculation is not None and states is None and placed is None and not is_stage
    if not has_short or not isinstance(graphs, DecodeGraphs) or choice is None:
        return WorkerParts(rows, cache, batches, forward, graphs, ready, states, images)
    short = ShortGraphs(model, shared, *choice, capture, vocabulary, most=most)
    both = AllGraphs(graphs, short)
    return WorkerParts(rows, cache, batches, forward, both, partial(ready, short=short), images=images)


def _agree(group: RankGroup, device: torch.device, answer: bool) -> bool:
    """Return the first rank's `answer` on all ranks of a group."""
    return answer if group.size == 1 else bool(group.broadcast(torch.tensor([int(answer)], device=device), 0))


def _device_choice(sampler: RowSampler) -> tuple[Any, Any] | None:
    """Return the sampler and its Triton choice, or None if sampling does not run on the device alone."""
    from quire.runtime.sampling.sampler import Sampler
    from quire.runtime.sampling.triton_choice import TritonChoice

    return (
        (sampler, sampler.choice) if isinstance(sampler, Sampler) and isinstance(sampler.choice, TritonChoice) else None
    )
