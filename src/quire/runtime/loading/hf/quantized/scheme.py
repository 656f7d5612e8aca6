"""A compressed-tensors scheme: how weights and activations of some layers are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.config.fields import Fields
from quire.runtime.loading.hf.quantized.method import Shape

_ACTIVATION_BITS = 8


@dataclass(frozen=True, slots=True)
class Activations:
    is_float: bool
    is_static: bool
    group: int | None  # inputs that share a dynamic scale; None: one scale per token


@dataclass(frozen=True, slots=True)
class Scheme:
    is_float: bool
    bits: int
    is_symmetric: bool
    strategy: str  # what shares a scale: tensor, channel, group or block
    group: int | None  # inputs per group
    block_size: tuple[int, int] | None
    activations: Activations | None

    def block(self, shape: Shape) -> tuple[int, int]:
        """Return the (outputs, inputs) that share a scale in a matrix of this shape."""
        outputs, inputs = shape
        if self.block_size is not None:
            return self.block_size
        return (outputs, inputs) if self.strategy == "tensor" else (1, inputs if self.group is None else self.group)


def read_scheme(config: Fields, path: str, group: Mapping[str, object]) -> Scheme:
    """Read one entry of `config_groups`. Raises ModelLoadError for settings that are not supported."""
    if group.get("output_activations"):
        raise config.refuse(f"{path}.output_activations", "is not supported")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise config.refuse(f"{path}.weights", "must say how weights are quantized")
    own = _fields(config, f"{path}.weights", weights)
    kind, bits = own.text("type", "int"), own.integer("num_bits", 8)
    strategy = own.text("strategy", "group" if weights.get("group_size") else "tensor")
    if kind not in ("int", "float") or not (bits == 8 if kind == "float" else 2 <= bits <= 8):
        raise own.refuse(
            "num_bits", f"{kind} of {bits} bits is not supported", fix="supported: int of 2 to 8, float of 8"
        )
    if strategy not in (("tensor", "channel", "block", "group") if kind == "float" else ("tensor", "channel", "group")):
        raise own.refuse("strategy", f"{strategy!r} is not supported for {kind} weights")
    size = own.integer("group_size") if strategy == "group" else None
    if size is not None and size < 1:
        raise own.refuse("group_size", f"must be at least 1, is {size}")
    if weights.get("dynamic"):
        raise own.refuse("dynamic", "cannot be set for weights")
    block = _block(own) if strategy == "block" else None
    return Scheme(
        kind == "float", bits, own.flag("symmetric", True), strategy, size, block,
        _read_activations(config, f"{path}.input_activations", group.get("input_activations")),
    )  # fmt: skip


def _read_activations(config: Fields, path: str, given: object) -> Activations | None:
    if not given:
        return None
    if not isinstance(given, dict):
        raise config.refuse(path, "must say how activations are quantized")
    own = _fields(config, path, given)
    kind, dynamic = own.text("type", "int"), given.get("dynamic", False)
    if kind not in ("int", "float") or own.integer("num_bits", _ACTIVATION_BITS) != _ACTIVATION_BITS:
        raise own.refuse("num_bits", f"{kind} of {given.get('num_bits')} bits is not supported", fix="supported: 8")
    if not own.flag("symmetric", True):
        raise own.refuse("symmetric", "activations with zero points are not supported")
    if not isinstance(dynamic, bool):
        raise own.refuse("dynamic", f"{dynamic!r} is not supported", fix="supported: true, false")
    strategy = own.text("strategy", "token" if dynamic else "tensor")
    if strategy not in (("token", "group") if dynamic else ("tensor",)):
        how = "dynamic" if dynamic else "static"
        raise own.refuse(
            "strategy", f"{how} activations by {strategy} are not supported", fix="dynamic: token or group"
        )
    return Activations(kind == "float", not dynamic, own.integer("group_size") if strategy == "group" else None)


def _block(config: Fields) -> tuple[int, int]:
    block = config.raw("block_structure")
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise config.refuse("block_structure", f"must be two sizes, is {block!r}")
    return block[0], block[1]


def _fields(config: Fields, path: str, values: Mapping[str, object]) -> Fields:
    prefix = f"quantization_config.{path}."
    return Fields(config.file, {prefix + key: value for key, value in values.items()}, prefix)
