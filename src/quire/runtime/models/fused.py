"""The decoder's layers joined: in one compiled call on a CPU, by fewer and larger kernels on a GPU.

Either does what the plain blocks do, and only where every one of them has such a form.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from quire.config.model import ModelConfig
from quire.kernels.native.decoder import DecoderShape, LayerWeights, LinearWeights, NativeDecoder
from quire.runtime.attention.backend import AttentionBackend, LayerCache
from quire.runtime.attention.native import NativePlan
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.native import NativeMultiply
from quire.runtime.layers.rotary import Rotation
from quire.runtime.layers.step import ForwardStep


class Fused(Protocol):
    """All layers of a decoder, from token ids to hidden states."""

    def takes(self, step: ForwardStep) -> bool:
        """Whether the step is of the kind these kernels are made for."""

    def __call__(self, step: ForwardStep) -> Tensor:
        """Hidden states [tokens, hidden], or those of `step.wanted`; fills the step's slots of every layer's cache."""

    def rehearse(self, step: ForwardStep) -> None:
        """Launch each kernel of such a step once, where kernels are compiled by their first launch."""


class CompiledLayers:
    """Bit for bit the kernels of the plain blocks, without an interpreter between them."""

    def __init__(self, stack: Any, layers: list[LayerWeights], shape: DecoderShape) -> None:
        self._embed, self._rotary = stack.embed_tokens, stack.rotary
        self._layers, self._shape = layers, shape
        self._caches: tuple[LayerCache, ...] | None = None
        self._decoder: NativeDecoder | None = None

    def takes(self, step: ForwardStep) -> bool:
        return isinstance(step.attention, NativePlan)

    def __call__(self, step: ForwardStep) -> Tensor:
        x: Tensor = self._embed(step.token_ids)
        rotation: Rotation = self._rotary(step)
        if self._decoder is None or self._caches is not step.caches:
            caches = [(cache.key, cache.value) for cache in step.caches]
            self._decoder, self._caches = NativeDecoder(self._shape, self._layers, caches, x.dtype), step.caches
        plan: NativePlan = step.attention
        hidden = self._decoder.run(x, rotation.cos, rotation.sin, step.slots, plan.tables, plan.spans)
        return hidden if step.wanted is None else hidden.index_select(0, step.wanted)

    def rehearse(self, step: ForwardStep) -> None:
        """Compiled ahead."""


def fuse(stack: Any, config: ModelConfig, backend: AttentionBackend) -> Fused | None:
    """The loaded layers of `stack` joined for the kernels that `backend` runs; None where they have no such form."""
    if backend.kernels == "triton":
        from quire.runtime.models.triton_stack import join

        return join(stack, config, backend)
    return _compile(stack, config)


def _compile(stack: Any, config: ModelConfig) -> CompiledLayers | None:
    """None where a weight is not in the order of our own kernels, or the activation has no compiled form."""
    blocks: nn.ModuleList = stack.layers
    if config.activation != "silu" or not len(blocks):
        return None
    packed = [_packed(block) for block in blocks]
    weights = [_weights(block, linears) for block, linears in zip(blocks, packed, strict=True) if linears is not None]
    if len(weights) != len(blocks):
        return None
    heads = config.heads
    shape = DecoderShape(
        config.hidden_size, heads.num_query, heads.num_kv, heads.dim, config.intermediate_size, config.norm_eps
    )
    return CompiledLayers(stack, weights, shape)


def _linears(block: Any) -> tuple[Linear, ...]:
    attention, mlp = block.self_attn, block.mlp
    return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


def _packed(block: Any) -> list[LinearWeights] | None:
    products = [linear.multiply for linear in _linears(block)]
    found = [LinearWeights(each.weight, each.bias) for each in products if isinstance(each, NativeMultiply)]
    return found if len(found) == len(products) else None


def _weights(block: Any, linears: list[LinearWeights]) -> LayerWeights:
    norm = block.self_attn.qk_norm
    scales = None if isinstance(norm, nn.Identity) else norm.scales
    return LayerWeights(block.input_layernorm.weight.data, scales, block.post_attention_layernorm.weight.data, *linears)
