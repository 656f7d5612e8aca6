"""Replaces the weights of a loaded model in place, one layer at a time. Tensors keep their addresses, so captured
graphs and compiled programs stay valid."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.runtime.layers.modules import Embedding, Scalar, TiedHead
from quire.runtime.layers.weights import WeightLayer, weight_layers
from quire.runtime.object_tensors import ADDED_LATER, reachable_tensors, replacements

Fill = Callable[[WeightLayer, str, str], None]  # loads a part into a layer: layer, part, checkpoint name


@dataclass(frozen=True, slots=True)
class _Entry:
    """A layer of the running model, and what it was before its weights were loaded."""

    layer: WeightLayer
    blank: WeightLayer
    devices: dict[str, torch.device]  # of the parameters that had memory then
    parts: dict[str, str]  # by checkpoint name

    @property
    def name(self) -> str:
        """A name for messages."""
        return next(iter(self.parts), type(self.layer).__name__)


class WeightSet:
    """The layers of a model with their parts, so that other weights can be put into them. Make it before the model is
    loaded. Holds no weights of its own."""

    def __init__(self, model: nn.Module) -> None:
        self._entries = [_Entry(layer, *_blank(layer), parts) for layer, parts in weight_layers(model)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape in the checkpoint of each tensor that these layers load, by name."""
        return {name: entry.blank.part_shape(part) for entry in self._entries for name, part in entry.parts.items()}

    def groups(self) -> list[tuple[str, ...]]:
        """Return the checkpoint names of each layer: those of one layer can only be replaced together."""
        return [tuple(entry.parts) for entry in self._entries if entry.parts]

    def num_values(self, names: Collection[str]) -> int:
        """Return how many numbers these tensors have."""
        return sum(math.prod(shape) for name, shape in self.shapes().items() if name in names)

    def parts(self, names: Collection[str]) -> Iterator[tuple[WeightLayer, str, str]]:
        """Yield layer, part and checkpoint name of the parts with these names."""
        for entry in self._entries:
            yield from ((entry.blank, part, name) for name, part in entry.parts.items() if name in names)

    @torch.inference_mode()
    def rehearse(self, fill: Fill, names: Collection[str]) -> None:
        """Do what `replace` does, one layer after the other, without changing the model. Raises what `fill` raises, and
        DoesNotMatch if new weights have another form than the old ones."""
        for entry in self._chosen(names):
            replacements(entry.layer, _loaded(entry, fill, in_place=False), entry.name)

    @torch.inference_mode()
    def changed_number(self, fill: Fill, names: Collection[str]) -> str | None:
        """Return the name of a part that would change a number that captured graphs contain, or None."""
        for entry in self._chosen(names):
            if isinstance(entry.layer, Scalar):
                found = _loaded(entry, fill, in_place=False)
                if isinstance(found, Scalar) and found.number != entry.layer.number:
                    return entry.name
        return None

    @torch.inference_mode()
    def holds(self, name: str, fill: Fill) -> bool:
        """Whether the embedding table with this name has the values that `fill` loads."""
        for entry in self._chosen((name,)):
            if isinstance(entry.layer, Embedding):
                found = _loaded(entry, fill, in_place=False)
                return found.weight.shape == entry.layer.weight.shape and found.weight.equal(entry.layer.weight)
        return False

    @torch.inference_mode()
    def replace(self, fill: Fill, names: Collection[str]) -> None:
        """Load these parts by `fill` and put them in the place of the old ones. All parts of a layer must be named. If
        this raises, the weights are of no use until all of them have been replaced."""
        for entry in self._chosen(names):
            for put in replacements(entry.layer, _loaded(entry, fill, in_place=True), entry.name):
                put()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that `replace` fills whatever they held before: packed weights and embedding tables."""
        for entry in self._entries:
            mine, before = entry.layer.__dict__, entry.blank.__dict__
            made = {name: value for name, value in mine.items() if before.get(name) is not value}
            table = made.pop("_parameters")
            for name in ("_modules", "_buffers", *ADDED_LATER):
                made.pop(name, None)
            children = [child for name, child in mine["_modules"].items() if child is not before["_modules"].get(name)]
            kept = () if isinstance(entry.layer, Embedding) else table.values()
            storages = {each.untyped_storage().data_ptr() for each in kept if each is not None and not each.is_meta}
            for tensor in reachable_tensors((made, children, table)):
                if not tensor.is_meta and not tensor.is_mkldnn and tensor.untyped_storage().data_ptr() not in storages:
                    yield tensor

    def _chosen(self, names: Collection[str]) -> Iterator[_Entry]:
        """Yield the layers that have these parts, and a head that is tied to one of them."""
        chosen: set[int] = set()
        for entry in self._entries:
            is_tied = isinstance(entry.layer, TiedHead) and id(entry.layer.table) in chosen
            if is_tied or any(name in names for name in entry.parts):
                chosen.add(id(entry.layer))
                yield entry


def _blank(layer: WeightLayer) -> tuple[WeightLayer, dict[str, torch.device]]:
    """Return a copy of a layer that is not loaded yet, without memory, and the devices of the parameters that have
    some."""
    blank, devices = _copied(layer), {}
    for name, parameter in layer._parameters.items():
        if parameter is not None:
            if not parameter.is_meta:
                devices[name] = parameter.device
            blank._parameters[name] = _parameter(torch.empty_like(parameter, device="meta"))
    return blank, devices


def _loaded(entry: _Entry, fill: Fill, *, in_place: bool) -> WeightLayer:
    """Return a new layer with other weights. `in_place`: parameters that the running layer still has are shared with
    it, and so change in the running layer."""
    layer, running = _copied(entry.blank), entry.layer._parameters
    for name, device in entry.devices.items():
        blank, mine = entry.blank._parameters[name], running.get(name)
        assert blank is not None
        is_kept = mine is not None and mine.shape == blank.shape and not mine.is_meta
        if is_kept and in_place:
            layer._parameters[name] = mine
        else:
            made = torch.empty_like(blank, device=device)
            layer._parameters[name] = _parameter(made.copy_(mine) if is_kept and mine is not None else made)
    for name, part in entry.parts.items():
        fill(layer, part, name)
    layer.finish()
    return layer


def _copied(layer: WeightLayer) -> WeightLayer:
    """Return another layer with the same attributes, whose own attributes can be set without changing the first."""
    copied: WeightLayer = object.__new__(type(layer))
    copied.__dict__.update(layer.__dict__)
    for name in ("_parameters", "_modules", "_buffers"):
        copied.__dict__[name] = dict(layer.__dict__[name])
    return copied


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
