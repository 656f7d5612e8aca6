"""The small operations between the products: by torch on any device, compiled on a CPU, by Triton on a GPU."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.native.loader import why_not_native
from quire.kernels.reference.quantize import to_float8
from quire.runtime.attention.backend import LayerCache, indexable

GELU = {"gelu": "none", "gelu_tanh": "tanh"}


class LayerOps(Protocol):
    """Functions on tensors; all results are in the dtype of the input, sums in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [tokens, size] over its root mean square, times weight [size]."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads [tokens, heads, dim] turned by cos and signed sin [tokens, 1, dim]. May overwrite x."""

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """[tokens, 2 * size], gate then up -> activation(gate) * up [tokens, size]."""

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """key, value [tokens, kv heads, dim] into slots [tokens * kv heads] of a layer's cache."""


class TorchOps:
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return normalize(x, eps).mul_(weight)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        swapped = x.roll(x.shape[-1] // 2, dims=-1)  # the halves change places
        return (x * cos).addcmul_(swapped, sin)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=GELU[activation])
        return active.mul_(up)

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        dim, dtype = key.shape[-1], cache.key.dtype
        for memory, new in ((cache.key_slots, key), (cache.value_slots, value)):
            memory.index_copy_(0, slots, indexable(_held(new.reshape(-1, dim), dtype)))


class TritonOps(TorchOps):
    """One launch each for the norm and the gate. Most norms are taken along by the product behind them."""

    def __init__(self) -> None:
        from quire.kernels.triton import activation, norm

        self._norm, self._activation = norm, activation

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm.rms_norm(x, weight, eps)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        return self._activation.gate(gate_up, activation)


def _held(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    return to_float8(numbers.float()) if dtype == torch.float8_e4m3fn else numbers.to(dtype)


def choose_ops(dtype: torch.dtype, device: torch.device, *, triton: bool = False) -> LayerOps:
    """`triton`: the Triton kernels run this model."""
    if triton:
        return TritonOps()
    if why_not_native(dtype, device) is not None:
        return TorchOps()
    from quire.runtime.layers.native import NativeOps

    return NativeOps()


def normalize(x: Tensor, eps: float) -> Tensor:
    """A new tensor: x over its root mean square, in x's dtype. The fewest passes torch offers on a CPU."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return (x * (norm * norm).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()).to(x.dtype)
