"""Sparse attention of DeepSeek V3.2 and GLM-5: an indexer scores the tokens of a sequence, and attention reads those
with the highest scores.

The keys of an indexer are kept in the paged cache beside the latents. While all sequences of a step are short, all
tokens are chosen: nothing is scored, and attention runs as without an indexer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quire.config.indexer import Indexer
from quire.config.model import ModelConfig
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.reference.chosen import attend_chosen, choose_tokens
from quire.runtime.attention.backend import ChunkSpan, LayerCache, indexable, spans_of, to_stored
from quire.runtime.layers.ops import LayerOps
from quire.runtime.layers.rotary import Rotary
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Value

if TYPE_CHECKING:
    from quire.runtime.layers.builder import LayerBuilder

EPS = 1e-6  # of the norm of keys
DENSE_LENGTHS = 2  # below this many times the chosen tokens, reading all latents for several tokens is faster
_CHOSEN = "chosen tokens"  # memo key


class Turn(NamedTuple):
    """Rotates the first elements of heads [tokens, heads, dim] by a step's positions."""

    rotary: Rotary
    ops: LayerOps

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        return self.ops.rotate(x.contiguous(), *self.rotary(step))


class Chosen(Protocol):
    """The tokens that the tokens of a step attend to."""

    def attend(self, query: Tensor, cache: LayerCache, rule: AttentionRule) -> Tensor:
        """Attend over latents. query [tokens, heads, dim] -> [tokens, heads * value dim]."""


class TokenChooser(Protocol):
    """Chooses the tokens that a layer attends to."""

    def __call__(self, x: Normed, queries: Value) -> tuple[Value, ...]:
        """Return the inputs of `choose`, from the layer's input and its compressed queries."""

    def choose(self, step: ForwardStep, cache: LayerCache, turn: Turn, *inputs: Tensor) -> Chosen | None:
        """Return the chosen tokens; None: all. Side effect: writes the step's keys of the indexer."""


class LastChoice(nn.Module):
    """Repeats the choice of the last layer with an indexer."""

    def forward(self, x: Normed, queries: Value) -> tuple[Value, ...]:  # noqa: ARG002
        return ()

    def choose(
        self,
        step: ForwardStep,
        cache: LayerCache,  # noqa: ARG002
        turn: Turn,  # noqa: ARG002
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
        self._turned = config.latent.rope_dim

    def forward(self, x: Normed, queries: Value) -> tuple[Value, ...]:
        return self.wq_b(queries), self.wk(x), self.weights_proj(x)

    def choose(
        self, step: ForwardStep, cache: LayerCache, turn: Turn, queries: Tensor, keys: Tensor, weights: Tensor
    ) -> Chosen | None:
        own = self._own
        is_short = step.max_length <= own.num_chosen
        step.memo[_CHOSEN] = chosen = None
        if cache.index is None:
            assert is_short, "the cache keeps no keys of the indexer"
            return None
        keys = turn(self._halves(self.k_norm.of(keys).unsqueeze(1)), step)
        write_index(cache, keys.squeeze(1), step.slots_of(cache))
        if not is_short:
            assert step.batch is not None
            queries = turn(self._halves(queries.reshape(len(queries), own.num_heads, own.dim)), step)
            spans = spans_of(step.batch)
            chosen = ChosenTokens(tuple((span, self._choose(span, cache, queries, weights)) for span in spans))
        step.memo[_CHOSEN] = chosen
        return chosen

    def _halves(self, x: Tensor) -> Tensor:
        """Order the rotated pairs of heads [tokens, heads, dim] in two halves. Scores do not depend on the order."""
        if not self._own.in_pairs:
            return x
        size = self._turned
        return torch.cat((x[..., 0:size:2], x[..., 1:size:2], x[..., size:]), dim=-1)

    def _choose(self, span: ChunkSpan, cache: LayerCache, queries: Tensor, weights: Tensor) -> Tensor:
        tokens = slice(span.begin, span.begin + span.num_tokens)
        keys = read_index(cache, span.block_ids, span.length)
        return choose_tokens(queries[tokens], keys, weights[tokens], span.positions, self._own.num_chosen)


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """Implements Chosen with torch: the chosen positions of each span's tokens [tokens, chosen]."""

    spans: tuple[tuple[ChunkSpan, Tensor], ...]

    def attend(self, query: Tensor, cache: LayerCache, rule: AttentionRule) -> Tensor:
        rank, size = cache.value.shape[3], cache.key.shape[2]
        out = query.new_empty(*query.shape[:2], rank)

        def attend(span: ChunkSpan, tokens: slice, seen: Tensor, chosen: Tensor, positions: Tensor) -> None:
            latents = indexable(cache.key)[span.block_ids[seen // size], 0, seen % size].view(cache.key.dtype)
            out[tokens] = attend_chosen(query[tokens], latents, chosen, positions, rule.scale, rank)

        for span, chosen in self.spans:
            if span.length < DENSE_LENGTHS * chosen.shape[1] and span.num_tokens > 1:
                seen = torch.arange(span.length, device=query.device)
                attend(span, slice(span.begin, span.begin + span.num_tokens), seen, chosen, span.positions)
                continue
            for token, own in enumerate(chosen):  # reads its chosen latents alone
                seen = own[own <= span.start + token]
                places = torch.arange(len(seen), device=query.device)
                at = span.begin + token
                attend(span, slice(at, at + 1), seen, places[None], places[-1:])
        return out.flatten(1)


def write_index(cache: LayerCache, keys: Tensor, slots: Tensor) -> None:
    """Write the indexer's keys [tokens, dim] of the tokens whose latents are in `slots` [tokens] of the cache."""
    assert cache.index is not None
    size = cache.key.shape[2]
    blocks = slots // (size * cache.block_heads)
    places = (blocks, slots - blocks * (size * cache.block_heads))
    indexable(cache.index).index_put_(places, indexable(to_stored(keys, cache.index.dtype)))


def read_index(cache: LayerCache, block_ids: Tensor, num_tokens: int) -> Tensor:
    """Return the indexer's keys of the first `num_tokens` tokens of a sequence [tokens, dim]."""
    assert cache.index is not None
    found = indexable(cache.index)[block_ids[: -(-num_tokens // cache.key.shape[2])]]
    return found.view(cache.index.dtype).flatten(0, 1)[:num_tokens]


def chooser_of(config: ModelConfig, layer: int, build: LayerBuilder) -> TokenIndexer | LastChoice | None:
    """Return what chooses the tokens that a layer attends to; None: it attends to all."""
    if config.indexer is None:
        return None
    return TokenIndexer(config, config.indexer, build) if layer in config.indexer.layers else LastChoice()
