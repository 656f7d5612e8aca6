"""What all models have in common: tokens become vectors, blocks change them, a norm and a head make logits of them."""

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
from quire.runtime.layers.expert_adapters import ExpertProduct
from quire.runtime.layers.experts import EachExpert
from quire.runtime.layers.latent import LatentAttention
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.modules import TiedHead, TokenTable
from quire.runtime.layers.native import NativeMultiply
from quire.runtime.layers.received import ReceivedStream
from quire.runtime.layers.rotary import Rotary
from quire.runtime.layers.side_inputs import SideInputs
from quire.runtime.layers.stacked_experts import StackedExperts
from quire.runtime.layers.step import BESIDE, AdaptedRows, ForwardStep
from quire.runtime.layers.vision import VisionTower


class BaseModel(nn.Module):
    """`forward` gives hidden states [tokens, hidden], or only those of `step.wanted`; `logits` turns hidden states into
    [n, vocab]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.elsewhere: frozenset[str] = frozenset()  # the checkpoint's tensors that only other ranks load
        self._embedding_scale, self._logit_scale = config.embedding_scale, config.logit_scale
        self._logit_softcap, self._hidden = config.logit_softcap, config.hidden_size
        self.side: tuple[SideInputs | None] = (None,)  # what makes inputs of layers; in a tuple: not a child twice
        self.head_adapters: LinearAdapters | None = None  # LoRA adapters of the output head

    def assemble(
        self, embedding: TokenTable, blocks: Blocks, norm: nn.Module, head: nn.Module, labels: nn.Module | None = None
    ) -> None:
        """Say which of the model's modules do what. Their names stay those that they have in the model. `labels`: the
        head of a classifier."""
        self._parts = (embedding, blocks, norm, head)  # in a tuple: not children a second time
        self._labels = (labels,)

    @property
    def parts(self) -> tuple[TokenTable, Blocks, nn.Module, nn.Module]:
        """Embedding, blocks, last norm and head."""
        return self._parts

    @property
    def labels(self) -> nn.Module | None:
        """The head of a classifier."""
        return self._labels[0]

    @property
    def embedding(self) -> TokenTable:
        return self._parts[0]

    @property
    def blocks(self) -> Blocks:
        return self._parts[1]

    @property
    def tower(self) -> VisionTower | None:
        """What makes vectors of images; None: the model takes none."""
        return None

    def embed(self, vectors: Tensor, step: ForwardStep) -> Tensor:
        """What the first block gets, from the vectors of the step's tokens [tokens, hidden]. May overwrite them. Where
        layers have inputs of their own, the vectors of both tables come side by side."""
        side, others = self.side[0], None
        if side is not None:
            vectors, others = vectors[:, : self._hidden].contiguous(), vectors[:, self._hidden :]
        hidden = vectors if self._embedding_scale == 1.0 else vectors.mul_(self._embedding_scale)
        if side is not None:
            step.memo[BESIDE] = side(others, hidden)
        return hidden

    def forward(self, step: ForwardStep, vectors: Tensor | None = None) -> Tensor:
        """`vectors`: those of the step's tokens, where they are known already; overwritten."""
        embedding, blocks, _, _ = self._parts
        step.memo.clear()  # of an earlier pass over the same step
        found = embedding(step.token_ids) if vectors is None else vectors
        if step.features is not None:
            found.index_copy_(0, step.features.places, step.features.vectors)
        if isinstance(embedding, ReceivedStream):  # an earlier pipeline stage has embedded the tokens
            if (beside := embedding.beside(len(found))) is not None:
                step.memo[BESIDE] = beside
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
    def native_head(self) -> LinearWeights | None:
        """The weight of the head as the compiled kernels read it; None where logits are more than products with it."""
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
        """The layers that LoRA adapters may change, by their paths: the linear ones of blocks, but not of routed
        experts, and the output head, the last one, where this pipeline stage has it."""
        paths = {id(module): path for path, module in self.named_modules()}
        _, blocks, _, head = self._parts
        found: dict[str, Linear | TiedHead] = dict(_linears(blocks, paths[id(blocks)]))
        return found | ({paths[id(head)]: head} if isinstance(head, Linear | TiedHead) else {})

    def adapted_experts(self) -> dict[str, ExpertProduct]:
        """The products of routed experts that LoRA adapters may change too, by their paths."""
        blocks = self._parts[1]
        (path,) = (path for path, module in self.named_modules() if module is blocks)
        return {
            f"{where}.{name}": ExpertProduct(module.own, linears)
            for where, module in blocks.named_modules(prefix=path)
            if isinstance(module, EachExpert | StackedExperts)
            for name, linears in module.products.items()
        }

    @property
    def rules(self) -> list[AttentionRule]:
        """Those of all attention layers."""
        return [module.rule for module in self.modules() if isinstance(module, Attention | LatentAttention)]

    def _rotaries(self) -> list[Rotary]:
        return [module for module in self.modules() if isinstance(module, Rotary)]  # each of them once


class BaseEncoder(nn.Module):
    """`forward` gives the hidden states [tokens, hidden] of `Texts`. It keeps nothing of them. Classifiers have a
    head."""

    head: nn.Module | None

    def classify(self, first: Tensor) -> Tensor:
        """Logits [texts, labels] from the hidden states of the first tokens [texts, hidden]."""
        assert self.head is not None, "this encoder has no head"
        logits: Tensor = self.head(first)
        return logits


def _linears(module: nn.Module, path: str) -> Iterator[tuple[str, Linear]]:
    for name, child in module.named_children():
        if isinstance(child, Linear):
            yield f"{path}.{name}", child
        elif not isinstance(child, EachExpert):
            yield from _linears(child, f"{path}.{name}")


def _kind(module: nn.Module) -> tuple[type, object]:
    """What decides which kernels a module launches."""
    return type(module), module.variant if isinstance(module, Attention) else None
