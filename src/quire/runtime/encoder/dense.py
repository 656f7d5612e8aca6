"""The Dense modules of sentence-transformers: linear layers between the pooling and the normalization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.embedding import Dense, DenseActivation
from quire.runtime.loading.hf.checkpoint import WEIGHT_DTYPES
from quire.runtime.loading.hf.safetensors import SafetensorsFile
from quire.runtime.loading.values import refuse_non_finite
from quire.types.errors import ModelLoadError

FILE = "model.safetensors"
_ACTIVATIONS: dict[DenseActivation, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x, "tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid, "gelu": F.gelu,
    "silu": F.silu,
}  # fmt: skip


class DenseLayers:
    """Applies the layers to pooled rows [texts, size] in float32."""

    def __init__(self, layers: Sequence[Dense], weights: Sequence[dict[str, Tensor]]) -> None:
        self._layers = tuple(zip(layers, weights, strict=True))

    def __call__(self, rows: Tensor) -> Tensor:
        for layer, weights in self._layers:
            rows = _ACTIVATIONS[layer.activation](F.linear(rows, weights["linear.weight"], weights.get("linear.bias")))
        return rows


def load_dense(directory: Path, layers: Sequence[Dense], size: int, device: torch.device) -> DenseLayers:
    """Read the weights of layers that are applied to rows of `size` elements. Raises ModelLoadError if a file does not
    fit its config, or a layer the one before it."""
    for layer in layers:
        if layer.inputs != size:
            reason = f"is {layer.inputs}, and what is before it gives vectors of {size} elements"
            raise ModelLoadError(str(directory / layer.folder / "config.json"), reason, tensor="in_features")
        size = layer.outputs
    return DenseLayers(layers, [_read(directory / layer.folder / FILE, layer, device) for layer in layers])


def random_dense(layers: Sequence[Dense], device: torch.device, seed: int) -> DenseLayers:
    generator, weights = torch.Generator().manual_seed(seed), list[dict[str, Tensor]]()
    for layer in layers:
        made = {name: torch.randn(shape, generator=generator) for name, shape in _shapes(layer).items()}
        weights.append({name: tensor.div_(layer.inputs**0.5).to(device) for name, tensor in made.items()})
    return DenseLayers(layers, weights)


def _shapes(layer: Dense) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (layer.outputs, layer.inputs)}
    return shapes | {"linear.bias": (layer.outputs,)} if layer.has_bias else shapes


def _read(path: Path, layer: Dense, device: torch.device) -> dict[str, Tensor]:
    if not path.is_file():
        raise ModelLoadError(str(path), "is missing", fix="store the weights of the Dense module as safetensors")
    file, shapes = SafetensorsFile(path), _shapes(layer)
    try:
        found = {name: (stored.shape, stored.dtype) for name, stored in file.tensors.items()}
        for name in shapes.keys() | found.keys():
            if name not in found or found[name][0] != shapes.get(name) or found[name][1] not in WEIGHT_DTYPES:
                has = "is missing" if name not in found else "is {1} of shape {0}".format(*found[name])
                wanted = f"a float tensor of shape {shapes[name]}" if name in shapes else "no such tensor"
                raise ModelLoadError(file.name, f"{has}, and its config.json says {wanted}", tensor=name)
        read = {}
        for name, shape in shapes.items():
            raw = torch.from_numpy(file.raw(name)).view(WEIGHT_DTYPES[found[name][1]]).view(shape)
            read[name] = raw.float().clone()
            refuse_non_finite(read[name], file.name, name)
        return {name: tensor.to(device) for name, tensor in read.items()}
    finally:
        file.close()
