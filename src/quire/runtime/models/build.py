"""Builds models, and counts their weights without allocating them."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from quire.config.adapter_memory import OUTPUT_STEP
from quire.config.engine import DeviceConfig
from quire.config.model import DTYPE_BYTES, INT4_GROUP, ModelConfig
from quire.config.parallel import ParallelConfig
from quire.config.weight_counts import WeightCounts
from quire.kernels.native.weights import LinearWeights
from quire.runtime.attention.backend import LayerCache
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.draft_tokens import DraftTokens
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
    """The interface of a model that the runner uses."""

    @property
    def embedding(self) -> TokenTable: ...

    @property
    def tower(self) -> VisionTower | None:
        """The vision tower, or None if the model takes no images."""

    def __call__(self, step: ForwardStep, vectors: Tensor | None = None) -> Tensor:
        """Return the hidden states of the tokens in `step.wanted` [wanted, hidden] (None: of all tokens). Side effect:
        writes the step's slots of every layer's cache. `vectors`: the token embeddings if they are known already."""

    def normed(self, hidden: Tensor) -> Tensor:
        """Apply the final norm: [n, hidden] -> [n, hidden]."""

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Apply final norm and output head: [n, hidden] -> [n, vocab]. `adapted`: the LoRA adapters of the rows."""

    def head_logits(self, states: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Apply the output head to normed states: [n, hidden] -> [n, vocab]."""

    @property
    def draft_tokens(self) -> DraftTokens | None:
        """The target's tokens, if this is a draft head with a smaller vocabulary. If ranks share the head, its logits
        are those of its own tokens."""

    @property
    def native_head(self) -> LinearWeights | None:
        """The output head's weight for the compiled kernels, or None if logits need more than one gemm with it."""

    @property
    def classifies(self) -> bool:
        """Whether the model has a classification head."""

    def classify(self, states: Tensor) -> Tensor:
        """Apply the classification head to normed states: [n, hidden] -> [n, labels]."""

    @property
    def is_static(self) -> bool:
        """Whether a step depends only on tokens, positions and lengths in device memory, so that it can be captured as
        a graph."""

    @property
    def num_varied(self) -> int:
        """How many of the first layers together launch every kernel that the model uses."""

    def reserve(self, max_length: int) -> None:
        """Allocate the tables that sequences of this length need, so that their addresses are stable from now on."""

    def trace(self, caches: tuple[LayerCache, ...], num_layers: int | None = None) -> None:
        """Trace the program of the first `num_layers` layers for the compiled CPU kernels and caches of this layout."""

    def trace_row(self, caches: tuple[LayerCache, ...], num_layers: int | None = None) -> int | None:
        """Trace the row kernel of the first `num_layers` layers for these caches, on a GPU that supports it. Call it
        after `reserve` and before steps of one row are captured. Returns the longest context in tokens for which the
        row kernel is faster, or None if there is none."""


def build_model(config: ModelConfig, builder: LayerBuilder) -> BaseModel:
    """Build a decoder without weights; fill it with load_weights or randomize_weights."""
    model = _build(config, builder)
    assert isinstance(model, BaseModel), config.architecture
    if config.stage is not None or builder.ranks.place.config.expert:
        own = {name for _, parts in weight_layers(model) for name in parts}
        model.elsewhere = frozenset(describe_weights(config)) - own
    return model


def build_encoder(config: ModelConfig, builder: LayerBuilder) -> BaseEncoder:
    """Build an encoder without weights."""
    model = _build(config, builder)
    assert isinstance(model, BaseEncoder), config.architecture
    return model


def describe_weights(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the checkpoint tensors of all pipeline stages with their shapes, as the layers declare them. Allocates
    nothing."""
    return dict(_describe(replace(config, stage=None)).shapes)


def count_copies(config: ModelConfig) -> dict[str, int]:
    """Return how many times the layers hold each tensor that they can keep quantized. Allocates nothing."""
    return dict(_describe(config).copies)


def count_weights(config: ModelConfig) -> ModelConfig:
    """Return the config with the number of weights that the model's layers hold. Allocates nothing."""
    return replace(config, weights=_describe(config).weights)


def without_vision(config: ModelConfig) -> ModelConfig:
    """Return the config of the model without its vision tower. Allocates nothing."""
    rope = replace(config.rope, sections=())  # text has the same position on all axes
    return count_weights(replace(config, vision=None, rope=rope))


class _Description(NamedTuple):
    """The tensors that a model's layers declare."""

    weights: WeightCounts
    shapes: dict[str, tuple[int, ...]]
    copies: dict[str, int]  # for tensors that layers can keep quantized


def _describe(config: ModelConfig) -> _Description:
    return _describe_uncounted(replace(config, weights=WeightCounts(), rank_weights=None))


@lru_cache(maxsize=2)  # loading a model needs it several times
def _describe_uncounted(config: ModelConfig) -> _Description:
    model = _outline(config)
    layers = [(layer, *item) for layer, parts in weight_layers(model) for item in parts.items()]
    shapes = {name: layer.part_shape(part) for layer, name, part in layers}
    copies = {name: layer.copies(part) for layer, name, part in layers if not layer.is_always_dequantized}
    return _Description(_count(model), shapes, copies)


def count_rank_weights(config: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """Return the config with `rank_weights`: for each kind of weight, the largest number that any rank holds."""
    if parallel.tensor == 1:
        return config
    groups = [_Outlined(rank, parallel.tensor) for rank in range(parallel.tensor)]
    ranks = [Ranks(parallel.place(group.index), group, ONE_RANK) for group in groups]
    counts = [astuple(_count(_outline(config, each))) for each in ranks]
    return replace(config, rank_weights=WeightCounts(*map(max, zip(*counts, strict=True))))


class _Outlined(OneRank):
    """A rank's position in a group that never communicates."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size


def _count(model: BaseModel | BaseEncoder) -> WeightCounts:
    inside = {id(layer) for blocks in model.modules() if isinstance(blocks, Blocks) for layer in blocks.modules()}
    seeing = model.tower if isinstance(model, BaseModel) else None
    in_tower = {id(layer) for layer in seeing.modules()} if isinstance(seeing, nn.Module) else set()
    parameters = in_blocks = outputs = int4_parameters = int4_bytes = plain = tower = 0
    for layer, parts in weight_layers(model):
        shapes = [layer.held_shape(part) for part in parts.values() for _ in range(layer.copies(part))]
        size = sum(map(math.prod, shapes))
        parameters += size
        tower += size if id(layer) in in_tower else 0
        if layer.is_quantizable and id(layer) in inside:
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
    return WeightCounts(
        parameters, in_blocks, outputs, *_count_adapted(model), int4_parameters, int4_bytes, plain, tower
    )


def _count_int4(size: int, num_inputs: int) -> tuple[int, int]:
    """Return the number of weights and bytes of a matrix quantized to int4 on a GPU, where a group has two float16
    factors. Groups of 16 are held in bytes; smaller ones are dequantized and not counted."""
    group = math.gcd(num_inputs, INT4_GROUP)
    if group % 16:
        return 0, 0
    return size, (size // 2 if group % 32 == 0 else size) + size // group * 2 * DTYPE_BYTES["float16"]


def _count_adapted(model: BaseModel | BaseEncoder) -> tuple[int, int, int]:
    """Return the fields of `WeightCounts` about layers that LoRA adapters may change."""
    if not isinstance(model, BaseModel):
        return 0, 0, 0
    layers, gemms = model.adapted_layers().values(), model.adapted_experts().values()
    of_experts = sum(len(gemm.experts) * _adapted_width(gemm.first) for gemm in gemms)
    return sum(map(_adapted_width, layers)), max((layer.num_parts for layer in layers), default=0), of_experts


def _adapted_width(layer: Linear | TiedHead | ExpertLinear) -> int:
    """Return the inputs of all matrices plus the outputs, rounded up because the compiled kernels cut outputs into
    panels."""
    return layer.num_parts * layer.num_inputs + -(-layer.num_outputs // OUTPUT_STEP) * OUTPUT_STEP


def _build(config: ModelConfig, builder: LayerBuilder) -> BaseModel | BaseEncoder:
    model: BaseModel | BaseEncoder = find_family(config.architecture).build(config, builder).requires_grad_(False)
    if config.stage is not None:
        assert isinstance(model, BaseModel), "encoders have no stages"
        keep_stage(model, config, builder.dtype)
    return model


def _outline(config: ModelConfig, ranks: Ranks = ALONE) -> BaseModel | BaseEncoder:
    """Build the model on the meta device, or one rank's share of it."""
    device = DeviceConfig(device="meta", dtype="float32", kv_dtype="float32", attention_backend="reference")
    return _build(config, LayerBuilder(device, config.heads, local_heads=config.local_heads, ranks=ranks))
