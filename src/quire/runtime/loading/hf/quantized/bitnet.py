"""BitNet b1.58: matrices of -1, 0 and 1 with one scale, multiplied by rows of int8. Files pack four outputs into a
byte, or store plain weights that are rounded while they are loaded ("online")."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.config.fields import Fields
from quire.runtime.loading.hf.quantized.integers import FLOATS
from quire.runtime.loading.hf.quantized.method import BadTensors, Layout, Method, need
from quire.runtime.loading.hf.safetensors import StoredTensor
from quire.runtime.quantization.activations import ActivationScheme
from quire.runtime.quantization.levels import LevelWeight
from quire.runtime.quantization.region import Region, narrow

_PACKED, _PER_BYTE, _BITS = "U8", 4, 2
_MIDDLE = 8  # the 4-bit level that stands for 0
_LEAST_SCALE = 1e-5  # of plain weights
_PLAIN = ("embed_tokens", "lm_head")  # matrices that are never rounded


class BitNet(Method):
    """`linear_class` states what the stored scale is: `autobitlinear` multiplies by it, `bitlinear` divides."""

    name = "bitnet"
    words = frozenset(("weight", "weight_scale"))
    main_words = ("weight",)

    def __init__(self, config: Fields) -> None:
        kind, mode = config.text("linear_class", "bitlinear"), config.text("quantization_mode", "offline")
        if kind not in ("bitlinear", "autobitlinear"):
            raise config.refuse("linear_class", f"{kind!r} is not supported", fix="supported: bitlinear, autobitlinear")
        if mode not in ("offline", "online"):
            raise config.refuse("quantization_mode", f"{mode!r} is not supported", fix="supported: offline, online")
        if config.flag("use_rms_norm", False):
            raise config.refuse("use_rms_norm", "norms inside of linear layers are not supported")
        self._divides = kind == "bitlinear"
        self._is_online = mode == "online" and not self._divides  # transformers ignores the mode of `bitlinear`
        left = config.raw("modules_to_not_convert") or []
        self._left = (*_PLAIN, *(str(name) for name in left)) if isinstance(left, list) else _PLAIN

    def is_quantized(self, tensors: Mapping[str, StoredTensor]) -> bool:
        weight = tensors.get("weight")
        if weight is None or not self._is_online:
            return weight is not None and weight.dtype == _PACKED
        path = weight.name.split(".")
        return len(weight.shape) == 2 and not any(name in path for name in self._left)

    def layout(self, layer: str, tensors: Mapping[str, StoredTensor]) -> Layout:  # noqa: ARG002
        if self._is_online:
            outputs, inputs = need(tensors, "weight", 2, FLOATS)
            return Layout(outputs, inputs, 4, 1, has_offsets=False)
        rows, inputs = need(tensors, "weight", 2, (_PACKED,))
        scale = tensors.get("weight_scale")
        if scale is None or scale.dtype not in FLOATS or scale.shape not in ((), (1,)):
            found = "is missing" if scale is None else f"has {scale.dtype} of shape {list(scale.shape)}"
            raise BadTensors("weight_scale", f"{found}, expected one float")
        return Layout(_PER_BYTE * rows, inputs, 4, 1, has_offsets=False)

    def cut(
        self,
        layer: str,  # noqa: ARG002
        layout: Layout,  # noqa: ARG002
        tensors: Mapping[str, Tensor],
        region: Region,
    ) -> Mapping[str, Tensor] | None:
        signs, scale = self._signs(tensors)
        return {"weight": narrow(signs, region.outputs, region.inputs), "weight_scale": scale}

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> LevelWeight:  # noqa: ARG002
        signs, scale = self._signs(tensors)
        scales = scale.reshape(1, 1).repeat(len(signs), 1)  # [outputs, 1]
        levels = (signs + _MIDDLE).to(torch.uint8).contiguous()
        return LevelWeight(
            levels, scales, -_MIDDLE * scales, nibbles=True, activations=ActivationScheme("int8"),
        )  # fmt: skip

    def _signs(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the entries [outputs, inputs], int8, and the scale that multiplies them, float32."""
        weight = tensors["weight"]
        if weight.dtype == torch.int8:  # made by `cut`
            return weight, tensors["weight_scale"]
        if self._is_online:
            wide = weight.float()
            scale = wide.abs().mean().clamp_(min=_LEAST_SCALE)
            return (wide * (1.0 / scale)).round_().clamp_(-1, 1).to(torch.int8), scale
        codes = torch.cat([weight >> _BITS * place & 3 for place in range(_PER_BYTE)])
        if bool((codes == 3).any()):
            raise BadTensors("weight", "has the code 3, but codes are 0, 1 and 2")
        scale = tensors["weight_scale"].float().reshape(())
        if self._divides:
            if float(scale) == 0.0:
                raise BadTensors("weight_scale", "is 0, and weights are divided by it")
            scale = 1.0 / scale
        return codes.to(torch.int8) - 1, scale
