"""EAGLE-3 heads: one decoder layer that drafts tokens from a target model's hidden states.

Entry p of the head combines the feature at position p (hidden states of some of the target's layers, joined to one
vector) with the embedding of token p + 1, and predicts token p + 2. Where the target has not computed yet, the head's
own hidden state is the feature of the next position. The head uses the target's embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor

from quire.config.fields import Fields
from quire.config.model import EagleHead, ModelConfig
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.draft_tokens import DraftTokens
from quire.runtime.layers.eagle_block import EagleBlock
from quire.runtime.layers.step import BESIDE, AdaptedRows, ForwardStep
from quire.runtime.models.base import BaseModel
from quire.runtime.models.draft_head import DraftHead
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import read_decoder, refuse_norms, refuse_windows

_NORMS = {  # supported values
    **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output", "use_mtp_layernorm"), False),
    **dict.fromkeys(("use_input_layernorm_in_first_layer", "use_last_layernorm"), True),
}


class Eagle3(DraftHead):
    """An EAGLE-3 head. Its own hidden state is the feature of a token that the target has not computed."""

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config, build)
        assert config.eagle is not None
        hidden, eagle = config.hidden_size, config.eagle
        self._read = eagle.layers  # of the target
        self.fc = build.linear("fc", eagle.num_states * hidden, hidden, bias=False)
        self.layers = Blocks((EagleBlock(config, build) for _ in range(1)), config)
        self.norm = build.rms_norm("norm", hidden, config.norm_eps)
        self.lm_head = build.column_linear("lm_head", hidden, eagle.vocab_size, bias=False)
        is_part = eagle.vocab_size < config.vocab_size
        self.d2t = DraftTokens(eagle.vocab_size, config.vocab_size, build.placement) if is_part else None
        self._is_shared = build.ranks.tensor.size > 1
        self.assemble(self._table, self.layers, self.norm, self.lm_head)

    def taps(self, target: BaseModel) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor] | None]:
        own = target.blocks.layers
        return tuple(layer - own.start for layer in self._read if layer in own), self.fc

    def forward(self, step: ForwardStep, vectors: Tensor | None = None) -> Tensor:
        step.memo.clear()  # left from an earlier pass over the same step
        step.memo[BESIDE] = self._table(step.token_ids) if vectors is None else vectors
        (block,) = self.layers.own
        assert isinstance(block, EagleBlock)
        hidden: Tensor = self.layers(block.stream_of(self.read_features(step)), step)
        return hidden

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        self.sampled[: len(hidden)].copy_(hidden)
        return super().logits(hidden, adapted)

    def head_logits(self, states: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        logits = super().head_logits(states, adapted)
        return logits if self.d2t is None or self._is_shared else self.d2t(logits)

    @property
    def draft_tokens(self) -> DraftTokens | None:
        return self.d2t


def read_eagle3(config: Fields) -> ModelConfig:
    refuse_windows(config)
    refuse_norms(config, _NORMS, "eagle_config")
    if config.integer("num_hidden_layers") != 1:
        raise config.refuse("num_hidden_layers", f"an EAGLE-3 head has 1, is {config.integer('num_hidden_layers')}")
    hidden, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
    if config.integer("target_hidden_size", hidden) != hidden:
        reason = f"must be hidden_size={hidden}, is {config.integer('target_hidden_size')}: embeddings are the target's"
        raise config.refuse("target_hidden_size", reason)
    drafted = config.integer("draft_vocab_size", vocab_size)
    if not 1 <= drafted <= vocab_size:
        raise config.refuse("draft_vocab_size", f"must be in [1, {vocab_size}], is {drafted}")
    is_speculators = isinstance(config.raw("transformer_layer_config"), dict)  # has another default norm
    norms_stream = config.flag("norm_before_residual", is_speculators)
    bias = config.flag("attention_bias", False)
    return read_decoder(
        config,
        "eagle3",
        2_048,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        tie_word_embeddings=False,
        per_layer_input=hidden,
        eagle=EagleHead(drafted, _read_layers(config), norms_stream),
    )


def _read_layers(config: Fields) -> tuple[int, ...]:
    """Return the target's layers whose inputs are read. The key at the top of config.json numbers layer inputs; in
    `eagle_config` it numbers layer outputs, which are the inputs of the next layer."""
    key, inner = "eagle_aux_hidden_state_layer_ids", config.raw("eagle_config")
    nested = inner if isinstance(inner, dict) else {}
    if nested.get("use_aux_hidden_state") is False:
        raise config.refuse("eagle_config", "only heads that read hidden states of several layers are supported")
    given, behind = (config.raw(key), 0) if config.raw(key) is not None else (nested.get(key), 1)
    if given is None:
        return ()
    if not isinstance(given, list) or not given or any(type(layer) is not int for layer in given):
        raise config.refuse(key, f"must name one or more layers, is {given!r}", fix="leave it out for the usual three")
    layers = tuple(layer + behind for layer in given)
    if layers[0] < 0 or any(first >= second for first, second in pairwise(layers)):
        raise config.refuse(key, f"must be layers in rising order, is {given!r}")
    return layers


def _rename(name: str) -> str | None:
    """Ignore the embeddings, which are the target's, and the map from the target's tokens."""
    name = name.removeprefix("model.")
    if name in ("t2d", "embed_tokens.weight"):
        return None
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


EAGLE3 = Family(
    name="eagle3",
    build=Eagle3,
    read=read_eagle3,
    rename=_rename,
    integers=frozenset({"d2t"}),
    embedding="embed_tokens.weight",
    nested="transformer_layer_config",
)
