"""Multi-token-prediction (MTP) heads: one more layer in a model's checkpoint, which drafts tokens.

Entry p of a head joins the target's hidden state at position p with the embedding of token p + 1, and predicts token
p + 2. Where the target has not computed yet, the head's own normed hidden state is that of the next position, so one
layer drafts several tokens. Embeddings and output head are the target's: copies in checkpoints are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quire.config.model import ModelConfig, MtpHead
from quire.config.weight_counts import StoredLevels, WeightCounts
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.modules import LentModule
from quire.runtime.layers.step import AdaptedRows, ForwardStep
from quire.runtime.models.base import BaseModel
from quire.runtime.models.decoder import MIMO, Decoder
from quire.runtime.models.deepseek import DEEPSEEK_V3, Deepseek
from quire.runtime.models.draft_head import DraftHead, Features
from quire.runtime.models.ernie_moe import ERNIE4_5_MOE
from quire.runtime.models.family import Family
from quire.runtime.models.latent_mixture import DEEPSEEK_V32, GLM4_MOE_LITE, GLM_MOE_DSA
from quire.runtime.models.mixture import QwenMoe
from quire.runtime.models.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, Hybrid
from quire.runtime.models.registry import MTP
from quire.runtime.models.sigmoid_mixture import GLM4_MOE
from quire.types.errors import ConfigError

_LAYER = "layers.0."  # the block, in the names of parts


@dataclass(frozen=True, slots=True)
class Layout:
    """How checkpoints store a kind of head. `prefix`: of all tensors; `{}` is the number of the target's layers.
    `norm`: the last one; None: the target's. `block`: after the prefix, of the tensors of the block. `hidden_first`:
    the first inputs of `fc` are the hidden state, not the embedding. `normed`: that is read after the target's last
    norm. `dense`: the block has no experts."""

    prefix: str
    embedding_norm: str
    hidden_norm: str
    fc: str
    norm: str | None
    block: str = ""
    hidden_first: bool = False
    normed: bool = True
    dense: bool = False


DEEPSEEK = Layout("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN = Layout("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", block=_LAYER)
XIAOMI = Layout(
    "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm",
    hidden_first=True, normed=False,
)  # fmt: skip
BAIDU = Layout("model.mtp_", "emb_norm.0", "hidden_norm.0", "linear_proj.0", None, block="block.0.", dense=True)
_COPIES = ("embed_tokens.", "shared_head.head.")  # of the target's, in checkpoints


class Mtp(DraftHead):
    """An MTP head. `model`: the class of the target, whose block and norms the head has. Its own normed hidden state is
    the feature of a token that the target has not computed."""

    def __init__(self, config: ModelConfig, build: LayerBuilder, *, layout: Layout, model: type[Decoder]) -> None:
        super().__init__(config, build)
        hidden, norm = config.hidden_size, (config.hidden_size, config.norm_eps, model.norm_offset)
        self._layout = layout
        self.embedding_norm = build.rms_norm(layout.embedding_norm, *norm)
        self.hidden_norm = build.rms_norm(layout.hidden_norm, *norm)
        self.fc = build.linear(layout.fc, 2 * hidden, hidden, bias=False)
        self.layers = Blocks((model.block(config, 0, build) for _ in range(1)), config)
        self.norm = LentModule() if layout.norm is None else build.rms_norm(layout.norm, *norm)
        self._head = LentModule()
        self.assemble(self._table, self.layers, self.norm, self._head)

    def taps(self, target: BaseModel) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor] | None]:
        return (len(target.blocks.own),), target.parts[2] if self._layout.normed else None

    def attach(self, target: BaseModel, features: Features, sampled: Tensor) -> None:
        """Use the output head of `target` too, and its last norm if the checkpoint has none for the head."""
        super().attach(target, features, sampled)
        _, _, norm, head = target.parts
        self._head.lend(head)
        if isinstance(self.norm, LentModule):
            self.norm.lend(norm)

    def forward(self, step: ForwardStep, vectors: Tensor | None = None) -> Tensor:
        step.memo.clear()  # left from an earlier pass over the same step
        embedded = self.embed(self._table(step.token_ids) if vectors is None else vectors, step)
        both = (self.embedding_norm.of(embedded), self.hidden_norm.of(self.read_features(step)))
        hidden: Tensor = self.layers(self.fc(torch.cat(both[::-1] if self._layout.hidden_first else both, dim=1)), step)
        return hidden

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        states: Tensor = self.norm(hidden)
        self.sampled[: len(states)].copy_(states)
        return self.head_logits(states, adapted)


def head_config(target: ModelConfig) -> ModelConfig:
    """Return the config of the MTP head in the checkpoint of a model. Raises ConfigError if the family has none."""
    found = HEADS.get(f"{target.architecture}{MTP}")
    if found is None:
        names = ", ".join(name.removesuffix(MTP) for name in HEADS)
        reason = f"drafts by the model's own MTP head, and {target.architecture} models have none that is supported"
        raise ConfigError("speculative_config.method", reason, f'use "ngram" or a draft model; with heads: {names}')
    layout = found.build.keywords["layout"]  # type: ignore[attr-defined]  # made by `_head_of`
    dense = (0,) if layout.dense else ()
    experts = None if target.experts is None else replace(target.experts, dense_layers=dense)
    indexer = None if target.indexer is None else replace(target.indexer, layers=(0,))
    return replace(
        target, architecture=found.name, num_layers=1, mtp=MtpHead(layout.prefix.format(target.num_layers)),
        experts=experts, indexer=indexer, recurrent=None, vision=None, rope=replace(target.rope, sections=()),
        windows=(), layers_without_rope=(), kv_layers=(), mlp_layers=(), tie_word_embeddings=False, stage=None,
        levels=StoredLevels(), weights=WeightCounts(), rank_weights=None,
    )  # fmt: skip


def _head_of(family: Family, layout: Layout, model: type[Decoder]) -> Family:
    build: Callable[[ModelConfig, LayerBuilder], BaseModel] = partial(Mtp, layout=layout, model=model)
    rename = partial(_rename, layout=layout, inner=family.rename)
    return Family(
        name=f"{family.name}{MTP}", build=build, read=family.read, rename=rename, stacked=family.stacked,
        nested=family.nested, embedding=family.embedding,
    )  # fmt: skip


def _rename(name: str, layout: Layout, inner: Callable[[str], str | None]) -> str | None:
    """Return the part of a tensor of the head, given its name after the prefix."""
    if name.rpartition(".")[0] in (layout.embedding_norm, layout.hidden_norm, layout.fc, layout.norm):
        return name
    if layout is DEEPSEEK and name.startswith(_COPIES):
        return None
    if not name.startswith(layout.block):
        return None if re.search(r"(?:^|\.)[1-9]\d*\.", name) else name  # of another head, or refused as unknown
    found = inner(f"model.{_LAYER}{name.removeprefix(layout.block)}")
    return None if found is None else found.removeprefix("model.")


_MODELS: tuple[tuple[Family, Layout, type[Decoder]], ...] = (
    *((family, DEEPSEEK, Deepseek) for family in (DEEPSEEK_V3, DEEPSEEK_V32, GLM4_MOE_LITE, GLM_MOE_DSA)),
    (GLM4_MOE, DEEPSEEK, QwenMoe),
    *((family, QWEN, Hybrid) for family in (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)),
    (ERNIE4_5_MOE, BAIDU, QwenMoe),
    (MIMO, XIAOMI, Decoder),
)
HEADS = {f"{family.name}{MTP}": _head_of(family, layout, model) for family, layout, model in _MODELS}
