"""Runs calibration texts through a model one block at a time, and accumulates the second moments of the gemms'
inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from quire.config.engine import DeviceConfig
from quire.config.model import ModelConfig
from quire.runtime.attention.backend import ChunkSpan, LayerCache
from quire.runtime.attention.reference import ReferenceAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.gemm import Multiply
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.layers.weights import WeightLayer, weight_layers
from quire.runtime.models.base import BaseModel
from quire.runtime.models.build import build_model
from quire.types.errors import ConfigError


class _Recorder:
    """A gemm that also accumulates x x^T of its rows x."""

    def __init__(self, multiply: Multiply) -> None:
        self._multiply = multiply
        self.total: Tensor | None = None  # [inputs, inputs]

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.float()
        if self.total is None:
            self.total = torch.zeros(x.shape[1], x.shape[1], device=x.device)
        self.total.addmm_(rows.t(), rows)
        return self._multiply(x)


class PlainModel:
    """A float32 model whose blocks are loaded and dropped one at a time."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        settings = DeviceConfig(str(device), "float32", "float32", attention_backend="reference")
        self.model: BaseModel = build_model(config, LayerBuilder(settings, config.heads))
        self.embedding, self.blocks, self.norm, self.head = self.model.parts
        self._layers = list(weight_layers(self.model))

    @property
    def in_front(self) -> list[WeightLayer]:
        """The layers outside of the blocks, the last norm and the head: the embedding and others that `embed` reads."""
        behind = {id(each) for part in (self.blocks, self.norm, self.head) for each in part.modules()}
        return [layer for layer, _ in self._layers if id(layer) not in behind]

    def parts_of(self, module: nn.Module) -> list[tuple[WeightLayer, dict[str, str]]]:
        inside = {id(each) for each in module.modules()}
        return [(layer, parts) for layer, parts in self._layers if id(layer) in inside]

    def fill(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        for layer, parts in self.parts_of(module):
            for name, part in parts.items():
                layer.load(part, tensors[name])
            layer.finish()

    def forget(self, number: int) -> None:
        gone = {id(layer) for layer, _ in self.parts_of(self.blocks[number])}
        self._layers = [pair for pair in self._layers if id(pair[0]) not in gone]
        self.blocks[number] = nn.Module()


class Calibration:
    """Hidden states of texts of equal length, advanced block by block. Memory: the hidden states and one block's
    statistics."""

    def __init__(self, config: ModelConfig, texts: Sequence[Sequence[int]], device: torch.device) -> None:
        self._device, self._count = device, len(texts[0])
        self._tokens = torch.tensor(texts, device=device)  # [texts, tokens]
        heads = config.heads
        memory = torch.zeros(2, 1, heads.num_kv, self._count, heads.dim, device=device)
        self._caches = (LayerCache.of(memory[0], memory[1]),) * config.num_layers
        places = torch.arange(self._count, device=device)
        self._slots = (places[:, None] + torch.arange(heads.num_kv, device=device) * self._count).flatten()
        self._hidden: list[Tensor] = []

    @property
    def num_tokens(self) -> int:
        return self._tokens.numel()

    def embed(self, plain: PlainModel) -> None:
        for tokens in self._tokens:
            step = self._step(tokens)
            self._hidden.append(plain.model.embed(plain.embedding(tokens).clone(), step))

    def record(self, block: nn.Module) -> dict[int, Tensor]:
        """Return the accumulated x x^T of each linear layer of a block, by the layer's id. Hidden states are
        unchanged."""
        recorders: dict[int, _Recorder] = {}
        for layer in block.modules():
            if isinstance(layer, Linear) and layer.multiply is not None:
                layer.fused = None
                layer.multiply = recorders[id(layer)] = _Recorder(layer.multiply)
        for tokens, hidden in zip(self._tokens, self._hidden, strict=True):
            self._run(block, tokens, hidden.clone())
        return {name: each.total for name, each in recorders.items() if each.total is not None}

    def advance(self, block: nn.Module) -> None:
        """Replace the hidden states by the block's output."""
        self._hidden = [
            self._run(block, tokens, hidden) for tokens, hidden in zip(self._tokens, self._hidden, strict=True)
        ]

    def of_head(self, norm: nn.Module) -> Tensor:
        """Return the accumulated x x^T of the output head's inputs."""
        total: Tensor | None = None
        for hidden in self._hidden:
            rows = norm(hidden)
            total = rows.t() @ rows if total is None else total.addmm_(rows.t(), rows)
        assert total is not None
        return total

    def _run(self, block: nn.Module, tokens: Tensor, hidden: Tensor) -> Tensor:
        stream = Stream(hidden, None, None)
        block(stream, self._step(tokens))
        settled: Tensor = stream.settle()
        return settled

    def _step(self, tokens: Tensor) -> ForwardStep:
        count, places = self._count, torch.arange(self._count, device=self._device)
        plan = (ChunkSpan(0, 0, count, torch.zeros(1, dtype=torch.int64, device=self._device)),)
        lengths = torch.full_like(places, count)
        return ForwardStep(tokens, places, lengths, count, self._slots, self._caches, plan, ReferenceAttention())


def check_plain(config: ModelConfig) -> None:
    """Raise ConfigError for models whose blocks need more than the residual stream."""
    reasons = {
        "mixtures of experts": config.experts is not None,
        "attention over latents": config.latent is not None,
        "recurrent layers": config.recurrent is not None,
        "images": config.vision is not None,
        "layers with heads of their own": config.local_heads is not None,
        "layers that share keys and values": bool(config.kv_layers) or config.keys_are_values,
        "inputs of each layer": config.per_layer_input > 0,
        "several residual streams": config.streams > 1,
    }
    for what, is_there in reasons.items():
        if is_there:
            raise ConfigError(
                "model", f"models with {what} cannot be written as quantized checkpoints", "set quantization instead"
            )
