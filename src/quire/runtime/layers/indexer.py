"""Sparse attention of DeepSeek V3.2 and GLM-5: an indexer scores the tokens of a sequence, and attention reads those
with the highest scores.

The keys of an indexer are kept in the paged cache beside the latents. Up to the number of chosen tokens, a token
attends to all before it: nothing is scored, and attention runs as without an indexer, also where other tokens of the
step attend to chosen ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quire.config.indexer import Indexer
from quire.config.model import ModelConfig
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.reference.chosen import attend_chosen, choose_tokens
from quire.kernels.reference.quantize import LARGEST
from quire.runtime.attention.backend import (
    AttentionBackend,
    ChunkSpan,
    LayerCache,
    divide_batch,
    indexable,
    to_stored,
)
from quire.runtime.layers.ops import LayerOps
from quire.runtime.layers.rotary import Rotary
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Value
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.runtime.layers.builder import LayerBuilder

EPS = 1e-6  # of the norm of keys
_CHOSEN, _DIVISION = "chosen tokens", "tokens that choose"  # memo keys


class HeadRotation(NamedTuple):
    """Rotates the first elements of heads [tokens, heads, dim] by a step's positions."""

    rotary: Rotary
    ops: LayerOps

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        return self.ops.rotate(x.contiguous(), *self.rotary(step))


class Chosen(Protocol):
    """The tokens that the tokens of a step attend to."""

    def attend(self, query: Tensor, key: Tensor, cache: LayerCache, rule: AttentionRule) -> Tensor:
        """Attend over latents. query [tokens, heads, dim]; key: of the step's tokens, as backends read it -> [tokens,
        heads * value dim]."""


class TokenChooser(Protocol):
    """Chooses the tokens that a layer attends to."""

    def __call__(self, x: Normed, queries: Value) -> tuple[Value, ...]:
        """Return the inputs of `choose`, from the layer's input and its compressed queries."""

    def choose(self, step: ForwardStep, cache: LayerCache, rotate: HeadRotation, *inputs: Tensor) -> Chosen | None:
        """Return the chosen tokens; None: all. Side effect: writes the step's keys of the indexer."""


class LastChoice(nn.Module):
    """Repeats the choice of the last layer with an indexer."""

    def forward(self, x: Normed, queries: Value) -> tuple[Value, ...]:  # noqa: ARG002
        return ()

    def choose(
        self,
        step: ForwardStep,
        cache: LayerCache,  # noqa: ARG002
        rotate: HeadRotation,  # noqa: ARG002
    ) -> Chosen | None:
        found: Chosen | None = step.memo[_CHOSEN]
        return found


class TokenIndexer(nn.Module):
    """The indexer of one layer. All ranks compute the whole of it."""

    def __init__(self, config: ModelConfig, own: Indexer, build: LayerBuilder) -> None:
        super().__init__()
        assert config.latent is not None
        assert config.latent.query_rank is not None
        self._own = own
        self.wq_b = build.linear("wq_b", config.latent.query_rank, own.num_heads * own.dim, bias=False)
        self.wk = build.linear("wk", config.hidden_size, own.dim, bias=False)
        self.k_norm = build.layer_norm("k_norm", own.dim, EPS)
        self.weights_proj = build.linear("weights_proj", config.hidden_size, own.num_heads, bias=False)
        self._rope_dim = config.latent.rope_dim

    def forward(self, x: Normed, queries: Value) -> tuple[Value, ...]:
        return self.wq_b(queries), self.wk(x), self.weights_proj(x)

    def choose(
        self, step: ForwardStep, cache: LayerCache, rotate: HeadRotation, queries: Tensor, keys: Tensor, weights: Tensor
    ) -> Chosen | None:
        own = self._own
        is_short = step.max_length <= own.num_chosen
        step.memo[_CHOSEN] = chosen = None
        if cache.index is None:
            assert is_short, "the cache keeps no keys of the indexer"
            return None
        keys = rotate(self._halves(self.k_norm.of(keys).unsqueeze(1)), step)
        write_index(cache, self._in_range(keys.squeeze(1), cache), step.slots_of(cache))
        if not is_short:
            queries = rotate(self._halves(queries.reshape(len(queries), own.num_heads, own.dim)), step)
            chosen = self._choose(division_of(step, own.num_chosen), cache, queries, weights)
        step.memo[_CHOSEN] = chosen
        return chosen

    def _halves(self, x: Tensor) -> Tensor:
        """Order the rotated pairs of heads [tokens, heads, dim] in two halves. Scores do not depend on the order."""
        if not self._own.in_pairs:
            return x
        size = self._rope_dim
        return torch.cat((x[..., 0:size:2], x[..., 1:size:2], x[..., size:]), dim=-1)

    def _in_range(self, keys: Tensor, cache: LayerCache) -> Tensor:
        """Scale keys [tokens, dim] so that the cache holds the largest ones that the norm can give. One factor for all
        keys of the layer does not change which have the highest scores."""
        assert cache.index is not None
        if cache.index.dtype != torch.float8_e4m3fn:
            return keys
        weight, bias = self.k_norm.weight.float().abs().amax(dim=1)
        longest = (weight * self._own.dim**0.5 + bias) * 2**0.5  # of a rotated pair
        scaled: Tensor = keys.float() * (LARGEST / longest).clamp_(max=1.0)
        return scaled.clamp_(-LARGEST, LARGEST)  # NaN stays NaN

    def _choose(self, division: Division, cache: LayerCache, queries: Tensor, weights: Tensor) -> ChosenTokens:
        found = []
        for span in division.spans:
            tokens, read = slice(span.begin, span.begin + span.num_tokens), partial(read_index, cache, span.block_ids)
            found.append(choose_tokens(queries[tokens], read, weights[tokens], span.start, self._own.num_chosen))
        return ChosenTokens(division, tuple(found))


@dataclass(frozen=True, slots=True)
class Division:
    """The tokens of a step by whether they attend to all tokens before them or to chosen ones."""

    backend: AttentionBackend
    plan: Any  # of those that attend to all; None: there are none
    places: Tensor  # [tokens] of these
    spans: tuple[ChunkSpan, ...]  # of the others


def division_of(step: ForwardStep, num_chosen: int) -> Division:
    """Return the division of a step's tokens, which all layers share."""
    found: Division | None = step.memo.get(_DIVISION)
    if found is None:
        assert step.batch is not None
        batch, places, spans = divide_batch(step.batch, num_chosen)
        plan = None if batch is None else step.backend.prepare(batch)
        found = step.memo[_DIVISION] = Division(step.backend, plan, places, spans)
    return found


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """Implements Chosen: the positions [tokens, chosen] that the tokens of each span attend to."""

    division: Division
    chosen: tuple[Tensor, ...]

    def attend(self, query: Tensor, key: Tensor, cache: LayerCache, rule: AttentionRule) -> Tensor:
        rank, division = cache.value.shape[3], self.division
        out = query.new_empty(*query.shape[:2], rank)
        if division.plan is not None:
            some, own = query[division.places], key[division.places]
            found = division.backend.attend(some, own, own[..., :rank], cache, division.plan, rule)
            out[division.places] = found.view(-1, *out.shape[1:])
        for span, chosen in zip(division.spans, self.chosen, strict=True):
            tokens, read = slice(span.begin, span.begin + span.num_tokens), partial(read_latents, cache, span.block_ids)
            out[tokens] = attend_chosen(query[tokens], read, chosen, rule.scale, rank)
        return out.flatten(1)


def write_index(cache: LayerCache, keys: Tensor, slots: Tensor) -> None:
    """Write the indexer's keys [tokens, dim] of the tokens whose latents are in `slots` [tokens] of the cache."""
    assert cache.index is not None
    size = cache.key.shape[2]
    blocks = slots // (size * cache.block_heads)
    places = (blocks, slots - blocks * (size * cache.block_heads))
    indexable(cache.index).index_put_(places, indexable(to_stored(keys, cache.index.dtype)))


def read_index(cache: LayerCache, block_ids: Tensor, positions: Tensor) -> Tensor:
    """Return the indexer's keys of a sequence at `positions` [tokens] -> [tokens, dim]."""
    assert cache.index is not None
    size = cache.key.shape[2]
    return indexable(cache.index)[block_ids[positions // size], positions % size].view(cache.index.dtype)


def read_latents(cache: LayerCache, block_ids: Tensor, positions: Tensor) -> Tensor:
    """Return the latents of a sequence at `positions` [any] -> [any, dim]."""
    size = cache.key.shape[2]
    return indexable(cache.key)[block_ids[positions // size], 0, positions % size].view(cache.key.dtype)


def chooser_of(config: ModelConfig, layer: int, build: LayerBuilder) -> TokenIndexer | LastChoice | None:
    """Return what chooses the tokens that a layer attends to; None: it attends to all. Raises ConfigError if the
    attention backend cannot attend to chosen tokens."""
    if config.indexer is None:
        return None
    if build.backend.kernels == "triton":  # whose steps keep no cache slots to write the keys to
        topk = config.indexer.num_chosen
        raise ConfigError(
            "attention_backend", f"the Triton kernels cannot attend to the {topk} tokens that an indexer chooses",
            f'use "gather" or "reference", or set max_model_len to {topk} or less',
        )  # fmt: skip
    return TokenIndexer(config, config.indexer, build) if layer in config.indexer.layers else LastChoice()
