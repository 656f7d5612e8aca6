"""Builds models, and asks their layers what weights they have."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from torch import Tensor

from quire.config.adapter_memory import OUTPUT_STEP
from quire.config.engine import DeviceConfig
from quire.config.model import DTYPE_BYTES, INT4_GROUP, ModelConfig, WeightCounts
from quire.config.parallel import ParallelConfig
from quire.kernels.native.weights import LinearWeights
from quire.runtime.attention.backend import LayerCache
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.modules import TiedHead, TokenTable
from quire.runtime.layers.stacked_experts import ExpertLinear
from quire.runtime.layers.step import AdaptedRows, ForwardStep
from quire.runtime.layers.vision import VisionTower
from quire.runtime.layers.weights import weight_layers
from quire.runtime.models.base import BaseEncoder, BaseModel
from quire.runtime.models.registry import find_family
from quire.runtime.models.stages import keep_stage
from quire.runtime.parallel.group import ONE_RANK, OneRank
from quire.runtime.parallel.ranks import ALONE, Ranks


class Model(Protocol):
    """What the runner needs of a model."""

    @property
    def embedding(self) -> TokenTable: ...

    @property
    def tower(self) -> VisionTower | None:
        """What makes vectors of images; None: the model takes none."""

    def __call__(self, step: ForwardStep, vectors: Tensor | None = None) -> Tensor:
        """Hidden states of the tokens in `step.wanted` [positions, hidden], of all tokens if that is None; fills the
        step's slots of every layer's cache. `vectors`: the embedded tokens, where they are known already."""

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states after the last norm: [n, hidden] -> [n, hidden]."""

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """[n, hidden] -> [n, vocab], where rows use these LoRA adapters."""

    def head_logits(self, states: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """[n, hidden] after the last norm -> [n, vocab]."""

    @property
    def native_head(self) -> LinearWeights | None:
        """The weight of the head as the compiled kernels read it; None where logits are more than products with it."""

    @property
    def classifies(self) -> bool:
        """Whether it has a head for labels."""

    def classify(self, states: Tensor) -> Tensor:
        """[n, hidden] after the last norm -> [n, labels]."""

    @property
    def is_static(self) -> bool:
        """Whether a step depends on nothing of its tokens but positions and lengths that the device knows, so that it
        can be captured."""

    @property
    def num_varied(self) -> int:
        """How many of the first layers launch every kernel that all layers do."""

    def reserve(self, max_length: int) -> None:
        """Make what sequences of this length need, so that it stays where it is from now on."""

    def trace(self, caches: tuple[LayerCache, ...], num_layers: int | None = None) -> None:
        """Write down the program of the first layers, for the compiled CPU kernels and caches like these."""

    def trace_row(self, caches: tuple[LayerCache, ...], num_layers: int | None = None) -> int | None:
        """Make the kernel by which steps of one row run through the first layers over these caches, on a GPU that has
        it. Call it after `reserve`, and before such steps are captured. Returns up to how many tokens a row is run by
        it; None: there is none."""


def build_model(config: ModelConfig, builder: LayerBuilder) -> BaseModel:
    """Layers without weights yet: fill them with load_weights or randomize_weights."""
    model = _build(config, builder)
    assert isinstance(model, BaseModel), config.architecture
    if config.stage is not None or builder.ranks.place.config.expert:
        own = {name for _, parts in weight_layers(model) for name in parts}
        model.elsewhere = frozenset(describe_weights(config)) - own
    return model


def build_encoder(config: ModelConfig, builder: LayerBuilder) -> BaseEncoder:
    """The same for a family of encoders."""
    model = _build(config, builder)
    assert isinstance(model, BaseEncoder), config.architecture
    return model


def describe_weights(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a model, of all its stages, and their shapes, as its layers say; nothing is allocated."""
    return dict(_describe(replace(config, stage=None)).shapes)


def count_copies(config: ModelConfig) -> dict[str, int]:
    """How often the layers hold each tensor that they can hold quantized, as it is stored; nothing is allocated."""
    return dict(_describe(config).copies)


def count_weights(config: ModelConfig) -> ModelConfig:
    """Return the config with the number of weights that the model's layers hold, as they say; nothing is
    allocated."""
    return replace(config, weights=_describe(config).weights)


class _Description(NamedTuple):
    """What the layers of a model say of its tensors."""

    weights: WeightCounts
    shapes: dict[str, tuple[int, ...]]
    copies: dict[str, int]  # of tensors that layers can hold quantized


def _describe(config: ModelConfig) -> _Description:
    return _describe_uncounted(replace(config, weights=WeightCounts(), rank_weights=None))


@lru_cache(maxsize=2)  # a model that is loaded is described several times
def _describe_uncounted(config: ModelConfig) -> _Description:
    model = _outline(config)
    layers = [(layer, *item) for layer, parts in weight_layers(model) for item in parts.items()]
    shapes = {name: layer.part_shape(part) for layer, name, part in layers}
    copies = {name: layer.copies(part) for layer, name, part in layers if not layer.expands}
    return _Description(_count(model), shapes, copies)


def count_rank_weights(config: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """Return the config with the number of weights that a rank holds, of each kind as many as the rank that holds most
    of it."""
    if parallel.tensor == 1:
        return config
    groups = [_Outlined(rank, parallel.tensor) for rank in range(parallel.tensor)]
    ranks = [Ranks(parallel.place(group.index), group, ONE_RANK) for group in groups]
    counts = [astuple(_count(_outline(config, each))) for each in ranks]
    return replace(config, rank_weights=WeightCounts(*map(max, zip(*counts, strict=True))))


class _Outlined(OneRank):
    """The group of a rank that computes nothing."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size


def _count(model: BaseModel | BaseEncoder) -> WeightCounts:
    inside = {id(layer) for blocks in model.modules() if isinstance(blocks, Blocks) for layer in blocks.modules()}
    parameters = in_blocks = outputs = int4_parameters = int4_bytes = plain = 0
    for layer, parts in weight_layers(model):
        shapes = [layer.held_shape(part) for part in parts.values() for _ in range(layer.copies(part))]
        parameters += sum(map(math.prod, shapes))
        if layer.shrinks and id(layer) in inside:
            matrices = [shape for shape in shapes if len(shape) == 2]
            in_blocks += sum(map(math.prod, matrices))
            outputs += layer.num_outputs if isinstance(layer, Linear) else sum(shape[0] for shape in matrices)
            for shape in matrices:
                held, num_bytes = _count_int4(
                    math.prod(shape), layer.num_inputs if isinstance(layer, Linear) else shape[1]
                )
                int4_parameters, int4_bytes = int4_parameters + held, int4_bytes + num_bytes
        elif isinstance(layer, Linear):
            plain += sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    return WeightCounts(parameters, in_blocks, outputs, *_count_adapted(model), int4_parameters, int4_bytes, plain)


def _count_int4(size: int, num_inputs: int) -> tuple[int, int]:
    """The weights and bytes of an int4 matrix on a GPU, where groups have two halves each: those of 16 are held in
    bytes, smaller ones are expanded and not counted."""
    group = math.gcd(num_inputs, INT4_GROUP)
    if group % 16:
        return 0, 0
    return size, (size // 2 if group % 32 == 0 else size) + size // group * 2 * DTYPE_BYTES["float16"]


def _count_adapted(model: BaseModel | BaseEncoder) -> tuple[int, int, int]:
    """What `WeightCounts` says of the layers that adapters may change."""
    if not isinstance(model, BaseModel):
        return 0, 0, 0
    layers, products = model.adapted_layers().values(), model.adapted_experts().values()
    of_experts = sum(len(product.experts) * _adapted_width(product.first) for product in products)
    return sum(map(_adapted_width, layers)), max((layer.num_parts for layer in layers), default=0), of_experts


def _adapted_width(layer: Linear | TiedHead | ExpertLinear) -> int:
    """The inputs of all its matrices and the outputs. Compiled kernels cut outputs into panels."""
    return layer.num_parts * layer.num_inputs + -(-layer.num_outputs // OUTPUT_STEP) * OUTPUT_STEP


def _build(config: ModelConfig, builder: LayerBuilder) -> BaseModel | BaseEncoder:
    model: BaseModel | BaseEncoder = find_family(config.architecture).build(config, builder).requires_grad_(False)
    if config.stage is not None:
        assert isinstance(model, BaseModel), "encoders have no stages"
        keep_stage(model, config, builder.dtype)
    return model


def _outline(config: ModelConfig, ranks: Ranks = ALONE) -> BaseModel | BaseEncoder:
    """The model without memory, or what a rank has of it."""
    device = DeviceConfig(device="meta", dtype="float32", kv_dtype="float32", attention_backend="reference")
    return _build(config, LayerBuilder(device, config.heads, local_heads=config.local_heads, ranks=ranks))
