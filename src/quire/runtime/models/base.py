"""The base of all models: embedding, blocks, final norm and output head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.config.model import ModelConfig
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.native.weights import LinearWeights
from quire.runtime.attention.backend import LayerCache
from quire.runtime.layers.adapted import LinearAdapters
from quire.runtime.layers.attention import Attention
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.draft_tokens import DraftTokens
from quire.runtime.layers.expert_adapters import ExpertGemm
from quire.runtime.layers.experts import SeparateExperts
from quire.runtime.layers.latent import LatentAttention
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.modules import TiedHead, TokenTable
from quire.runtime.layers.native import NativeMultiply
from quire.runtime.layers.received import ReceivedStream
from quire.runtime.layers.rotary import Rotary
from quire.runtime.layers.side_inputs import SideInputs
from quire.runtime.layers.stacked_experts import StackedExperts
from quire.runtime.layers.step import BESIDE, TAKEN, AdaptedRows, ForwardStep
from quire.runtime.layers.vision import VisionTower


class BaseModel(nn.Module):
    """Base of decoders. `forward` returns hidden states [tokens, hidden], or only those of `step.wanted`; `logits`
    turns hidden states into [n, vocab]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.elsewhere: frozenset[str] = frozenset()  # checkpoint tensors that only other ranks load
        self._embedding_scale, self._logit_scale = config.embedding_scale, config.logit_scale
        self._logit_softcap, self._hidden = config.logit_softcap, config.hidden_size
        self.side: tuple[SideInputs | None] = (None,)  # in a tuple, so that it is not a child twice
        # In a tuple likewise: the embedding table that a last stage keeps for a draft head; (): the model's embedding.
        self.lent_table: tuple[TokenTable, ...] = ()
        self.head_adapters: LinearAdapters | None = None  # LoRA adapters of the output head

    def assemble(
        self, embedding: TokenTable, blocks: Blocks, norm: nn.Module, head: nn.Module, labels: nn.Module | None = None
    ) -> None:
        """Set which modules are the embedding, blocks, final norm and head. They keep the names that they have in the
        model. `labels`: the head of a classifier."""
        self._parts = (embedding, blocks, norm, head)  # in a tuple, so that they are not children twice
        self._labels = (labels,)

    @property
    def parts(self) -> tuple[TokenTable, Blocks, nn.Module, nn.Module]:
        """Embedding, blocks, final norm and output head."""
        return self._parts

    @property
    def labels(self) -> nn.Module | None:
        """The head of a classifier, or None."""
        return self._labels[0]

    @property
    def embedding(self) -> TokenTable:
        return self._parts[0]

    @property
    def blocks(self) -> Blocks:
        return self._parts[1]

    @property
    def tower(self) -> VisionTower | None:
        """The vision tower, or None if the model takes no images."""
        return None

    def embed(self, vectors: Tensor, step: ForwardStep) -> Tensor:
        """Return the first block's input from the embeddings of the step's tokens [tokens, hidden], which may be
        overwritten: scaled, with the vectors of images in their places. With side inputs the vectors of both tables are
        concatenated in `vectors`."""
        side, others = self.side[0], None
        if side is not None:
            vectors, others = vectors[:, : self._hidden].contiguous(), vectors[:, self._hidden :]
        hidden = vectors if self._embedding_scale == 1.0 else vectors.mul_(self._embedding_scale)
        if step.features is not None:  # not scaled like embeddings
            hidden.index_copy_(0, step.features.places, step.features.vectors)
        if side is not None and others is not None:
            if step.features is not None:
                others.index_copy_(0, step.features.places, side.of_filler(len(step.features.places)))
            step.memo[BESIDE] = side(others, hidden)
        return hidden

    def forward(self, step: ForwardStep, vectors: Tensor | None = None) -> Tensor:
        """Run the model. `vectors`: the embeddings of the step's tokens if they are known already; overwritten."""
        embedding, blocks, _, _ = self._parts
        step.memo.clear()  # left from an earlier pass over the same step
        found = embedding(step.token_ids) if vectors is None else vectors
        if isinstance(embedding, ReceivedStream):  # an earlier pipeline stage has embedded the tokens
            if (beside := embedding.beside(len(found))) is not None:
                step.memo[BESIDE] = beside
            if (states := embedding.states(found)) is not None:
                step.memo[TAKEN] = [states]
        else:
            found = self.embed(found, step)
        hidden: Tensor = blocks(found, step)
        return hidden

    def normed(self, hidden: Tensor) -> Tensor:
        found: Tensor = self._parts[2](hidden)
        return found

    @property
    def classifies(self) -> bool:
        return self._labels[0] is not None

    def classify(self, states: Tensor) -> Tensor:
        assert self._labels[0] is not None, "this model has no labels"
        logits: Tensor = self._labels[0](states)
        return logits

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        return self.head_logits(self._parts[2](hidden), adapted)

    def head_logits(self, states: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        logits: Tensor = self._parts[3](states)
        if adapted is not None and self.head_adapters is not None:
            self.head_adapters.add_rows(logits, states, adapted)
        if self._logit_scale != 1.0:
            logits = logits.mul_(self._logit_scale)
        cap = self._logit_softcap
        return logits if cap is None else torch.tanh_(logits.div_(cap)).mul_(cap)

    @property
    def draft_tokens(self) -> DraftTokens | None:
        return None

    @property
    def native_head(self) -> LinearWeights | None:
        """The output head's weight for the compiled kernels, or None if logits need more than one gemm with it."""
        head = self._parts[3]
        if self._logit_scale != 1.0 or self._logit_softcap is not None or self.head_adapters is not None:
            return None
        if not isinstance(head, Linear | TiedHead) or (isinstance(head, Linear) and head.adapters is not None):
            return None
        multiply = head.multiply
        if not isinstance(multiply, NativeMultiply) or multiply.weight.dtype != torch.float32:
            return None
        return LinearWeights(multiply.weight, multiply.bias)

    @property
    def is_static(self) -> bool:
        return all(rotary.is_static for rotary in self._rotaries())

    @property
    def num_varied(self) -> int:
        kinds = [frozenset(map(_kind, block.modules())) for block in self._parts[1].own]
        return 1 + max(kinds.index(kind) for kind in set(kinds))

    def reserve(self, max_length: int) -> None:
        for rotary in self._rotaries():
            rotary.angles(max_length)

    def trace(self, caches: tuple[LayerCache, ...], num_layers: int | None = None) -> None:
        self._parts[1].trace(caches, self.embedding.dtype, num_layers)

    def trace_row(self, caches: tuple[LayerCache, ...], num_layers: int | None = None) -> int | None:
        return self._parts[1].trace_row(caches, self.embedding.dtype, num_layers)

    def adapted_layers(self) -> dict[str, Linear | TiedHead]:
        """Return the layers that LoRA adapters may change, by path: the linear layers of blocks (not of routed
        experts), then the output head if this pipeline stage has it."""
        paths = {id(module): path for path, module in self.named_modules()}
        _, blocks, _, head = self._parts
        found: dict[str, Linear | TiedHead] = dict(_linears(blocks, paths[id(blocks)]))
        return found | ({paths[id(head)]: head} if isinstance(head, Linear | TiedHead) else {})

    def adapted_experts(self) -> dict[str, ExpertGemm]:
        """Return the gemms of routed experts that LoRA adapters may change, by path."""
        blocks = self._parts[1]
        (path,) = (path for path, module in self.named_modules() if module is blocks)
        return {
            f"{where}.{name}": ExpertGemm(module.own, linears)
            for where, module in blocks.named_modules(prefix=path)
            if isinstance(module, SeparateExperts | StackedExperts)
            for name, linears in module.gemms.items()
        }

    @property
    def rules(self) -> list[AttentionRule]:
        """The attention rules of all attention layers."""
        return [module.rule for module in self.modules() if isinstance(module, Attention | LatentAttention)]

    def _rotaries(self) -> list[Rotary]:
        return [module for module in self.modules() if isinstance(module, Rotary)]  # shared ones once


class BaseEncoder(nn.Module):
    """Base of encoders. `forward` returns the hidden states [tokens, hidden] of `Texts` and keeps no state. Classifiers
    have a head."""

    head: nn.Module | None

    def classify(self, pooled: Tensor) -> Tensor:
        """Return logits [texts, labels] from the pooled hidden states [texts, hidden]."""
        assert self.head is not None, "this encoder has no head"
        logits: Tensor = self.head(pooled)
        return logits


def _linears(module: nn.Module, path: str) -> Iterator[tuple[str, Linear]]:
    for name, child in module.named_children():
        if isinstance(child, Linear):
            yield f"{path}.{name}", child
        elif not isinstance(child, SeparateExperts):
            yield from _linears(child, f"{path}.{name}")


def _kind(module: nn.Module) -> tuple[type, object]:
    """Return what determines which kernels a module launches."""
    return type(module), module.variant if isinstance(module, Attention) else None
