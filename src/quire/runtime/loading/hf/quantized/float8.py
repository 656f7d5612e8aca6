"""FP8 (e4m3) matrices: in blocks with `weight_scale_inv` (DeepSeek, Qwen3), or with one `weight_scale` per tensor."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quire.config.fields import Fields
from quire.runtime.loading.hf.quantized.integers import FLOATS
from quire.runtime.loading.hf.quantized.method import BadTensors, Layout, Method, Shape, need
from quire.runtime.loading.hf.safetensors import StoredTensor
from quire.runtime.quantization.activations import ActivationScheme
from quire.runtime.quantization.float8_weight import Float8Weight
from quire.runtime.quantization.region import Region, narrow, narrow_scales

FLOAT8 = "F8_E4M3"
SCALES = ("weight_scale_inv", "weight_scale")


class Float8(Method):
    """Matrices that are not float8 (`modules_to_not_convert`) are read unquantized."""

    name = "fp8"
    words = frozenset(("weight", *SCALES, "input_scale"))
    main_words = ("weight",)

    def __init__(self, config: Fields) -> None:
        kind = config.text("fmt", "e4m3")
        if kind not in ("e4m3", "float8_e4m3fn"):
            raise config.refuse("fmt", f"{kind!r} is not supported", fix="supported: e4m3")
        self._block = _read_block(config)
        scheme = config.text("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise config.refuse("activation_scheme", f"{scheme!r} is not supported", fix="supported: dynamic, static")
        if scheme == "static" and self._block is not None:
            raise config.refuse("activation_scheme", "cannot be static where weights have blocks")
        self._is_static = scheme == "static"
        self._has_powers = _read_powers(config)
        if self._is_static and self._has_powers:
            raise config.refuse("scale_fmt", "is for dynamic activation scales, but activation_scheme is static")

    def is_quantized(self, tensors: Mapping[str, StoredTensor]) -> bool:
        return "weight" in tensors and tensors["weight"].dtype == FLOAT8

    def layout(self, layer: str, tensors: Mapping[str, StoredTensor]) -> Layout:  # noqa: ARG002
        outputs, inputs = need(tensors, "weight", 2, (FLOAT8,))
        block = self._block or (outputs, inputs)
        check_scale(tensors, _scale_word(tensors), (outputs, inputs), block)
        if self._is_static:
            check_scale(tensors, "input_scale", (1, 1), (1, 1))
        return Layout(outputs, inputs, 0, -(-inputs // block[1]))

    def cut(
        self,
        layer: str,  # noqa: ARG002
        layout: Layout,
        tensors: Mapping[str, Tensor],
        region: Region,
    ) -> Mapping[str, Tensor] | None:
        word, shape = next(word for word in SCALES if word in tensors), (layout.outputs, layout.inputs)
        scales = narrow_scales(tensors[word], shape, self._block or shape, region)
        if scales is None:
            return None
        weight = narrow(tensors["weight"], region.outputs, region.inputs)
        return {**tensors, "weight": weight.contiguous(), word: scales}

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> Float8Weight:  # noqa: ARG002
        weight = tensors["weight"]
        outputs, inputs = weight.shape
        block = self._block or (outputs, inputs)
        scale = float(tensors["input_scale"].float()) if self._is_static else None
        group = None if self._block is None else block[1]
        scheme = ActivationScheme("fp8", scale, group, self._has_powers)
        scales = tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"]
        return Float8Weight(
            weight, scales.float().reshape(-(-outputs // block[0]), -(-inputs // block[1])), block, scheme
        )


def check_scale(tensors: Mapping[str, StoredTensor], word: str, shape: Shape, block: Shape) -> None:
    """Refuse scales whose shape does not match the number of blocks."""
    if word not in tensors:
        raise BadTensors(word, "is missing")
    wanted = tuple(-(-size // part) for size, part in zip(shape, block, strict=True))
    found, single = tensors[word].shape, wanted == (1, 1)
    per_output = wanted[1] == 1 and found == (wanted[0],)
    if tensors[word].dtype not in FLOATS or not (found == wanted or per_output or (single and found in ((), (1,)))):
        raise BadTensors(word, f"has {tensors[word].dtype} of shape {list(found)}, expected floats of {list(wanted)}")


def _scale_word(tensors: Mapping[str, StoredTensor]) -> str:
    return next((word for word in SCALES if word in tensors), SCALES[0])


def _read_powers(config: Fields) -> bool:
    """Whether activation scales are powers of two."""
    kind = config.raw("scale_fmt")
    if kind not in (None, "ue8m0"):
        raise config.refuse("scale_fmt", f"{kind!r} is not supported", fix="supported: ue8m0")
    return kind is not None


def _read_block(config: Fields) -> tuple[int, int] | None:
    block = config.raw("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise config.refuse("weight_block_size", f"must be two sizes, is {block!r}")
    return block[0], block[1]
