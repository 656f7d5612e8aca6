"""The small operations between gemms: in torch on any device, compiled on a CPU, in Triton on a GPU."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.native.loader import why_not_native
from quire.kernels.reference.activation import gate as reference_gate
from quire.runtime.accelerator import dependent_rows
from quire.runtime.attention.backend import LayerCache

GELU = {"gelu": "none", "gelu_tanh": "tanh"}


class LayerOps(Protocol):
    """Operations on tensors. Results have the dtype of the input; sums are accumulated in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of x [tokens, size] with weight [size]."""

    def add_rms_norm(self, x: Tensor, change: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `change` [tokens, size] to x in place and return `rms_norm` of the sum. May overwrite change."""

    def layer_norm(self, x: Tensor, weight_bias: Tensor, eps: float) -> Tensor:
        """LayerNorm of x [tokens, size]; weight_bias: [2, size]."""

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Apply the activation of this name to x. May overwrite x."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first elements of each head [tokens, heads, dim] by cos and signed sin [tokens, 1, rotated dim].
        May overwrite x."""

    def gate(self, gate_up: Tensor, activation: str, clamp: Clamp | None = None) -> Tensor:
        """Return activation(gate) * up [tokens, size] for gate_up [tokens, 2 * size], gate first. With a clamp: see
        Clamp."""

    def gate_sum(self, gate_up: Tensor, change: Tensor, activation: str, clamp: Clamp | None = None) -> Tensor:
        """Return `gate` of gate_up + change. May overwrite gate_up."""

    def times(self, x: Tensor, y: Tensor, column: int) -> Tensor:
        """Multiply x [tokens, size] by `size` columns of y from `column` on. May overwrite x."""

    def gate_by(self, x: Tensor, wide: Tensor) -> Tensor:
        """Multiply x [tokens, size] by the sigmoid of the last `size` elements of each row of `wide`. May overwrite
        x."""

    def write(self, key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor) -> None:
        """Write key and value [tokens, kv heads, dim] into slots [tokens * kv heads] of a layer's cache. Without a
        value the key is a latent."""


class TorchOps:
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return normalize(x, eps).mul_(weight)

    def add_rms_norm(self, x: Tensor, change: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(x.add_(change), weight, eps)

    def layer_norm(self, x: Tensor, weight_bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight_bias[0], weight_bias[1], eps)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return _activate(x, activation)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        size = cos.shape[-1]
        whole = size == x.shape[-1]
        rotated = x if whole else x[..., :size]
        swapped = rotated.roll(size // 2, dims=-1)  # swap the halves
        rotated = (rotated * cos).addcmul_(swapped, sin)
        return rotated if whole else torch.cat((rotated, x[..., size:]), dim=-1)

    def gate(self, gate_up: Tensor, activation: str, clamp: Clamp | None = None) -> Tensor:
        if clamp is not None:
            return reference_gate(gate_up, activation, clamp)
        gate, up = gate_up.chunk(2, dim=-1)
        return _activate(gate, activation).mul_(up)

    def gate_sum(self, gate_up: Tensor, change: Tensor, activation: str, clamp: Clamp | None = None) -> Tensor:
        return self.gate(gate_up.add_(change), activation, clamp)

    def times(self, x: Tensor, y: Tensor, column: int) -> Tensor:
        return x.mul_(y[:, column : column + x.shape[1]])

    def gate_by(self, x: Tensor, wide: Tensor) -> Tensor:
        return x * torch.sigmoid(wide[:, -x.shape[1] :])

    def write(self, key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor) -> None:
        cache.write(key, value, slots)


class TritonOps(TorchOps):
    """One Triton launch per norm and per gate. Most RMSNorms are fused into the gemm after them. `dependent_rows`:
    fewest rows with programmatic dependent launch."""

    def __init__(self, dependent_rows: int) -> None:
        from quire.kernels.triton import activation, layer_norm, norm

        self._norm, self._layer_norm, self._activation = norm, layer_norm, activation
        self._dependent_rows = dependent_rows

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm.rms_norm(x, weight, eps, dependent=self._is_dependent(x))

    def add_rms_norm(self, x: Tensor, change: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm.add_rms_norm(change, x, weight, eps, dependent=self._is_dependent(x))

    def gate(self, gate_up: Tensor, activation: str, clamp: Clamp | None = None) -> Tensor:
        if clamp is not None:
            return super().gate(gate_up, activation, clamp)
        return self._activation.gate(gate_up, activation, dependent=self._is_dependent(gate_up))

    def gate_sum(self, gate_up: Tensor, change: Tensor, activation: str, clamp: Clamp | None = None) -> Tensor:
        if clamp is not None:
            return super().gate_sum(gate_up, change, activation, clamp)
        return self._activation.gate(gate_up, activation, dependent=self._is_dependent(gate_up), change=change)

    def layer_norm(self, x: Tensor, weight_bias: Tensor, eps: float) -> Tensor:
        return self._layer_norm.layer_norm(x, weight_bias, eps)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        self._activation.activate_rows(x, activation)
        return x

    def _is_dependent(self, x: Tensor) -> bool:
        return len(x) >= self._dependent_rows


def _activate(x: Tensor, activation: str) -> Tensor:
    """Return a new tensor."""
    if activation in GELU:
        return F.gelu(x, approximate=GELU[activation])
    if activation == "relu2":
        return F.relu(x).square_()
    return F.silu(x) if activation == "silu" else F.relu(x)


def choose_ops(dtype: torch.dtype, device: torch.device, *, triton: bool = False) -> LayerOps:
    """Return the operations for a dtype and device. `triton`: the Triton kernels run this model."""
    if triton:
        return TritonOps(dependent_rows(device))
    if why_not_native(dtype, device) is not None:
        return TorchOps()
    from quire.runtime.layers.native import NativeOps

    return NativeOps()


def normalize(x: Tensor, eps: float) -> Tensor:
    """Return a new tensor: x over its root mean square, in x's dtype. Uses the fewest passes that torch offers on a
    CPU."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return (x * (norm * norm).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()).to(x.dtype)
