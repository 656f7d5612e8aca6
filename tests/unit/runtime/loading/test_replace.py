"""Every number of a layer that comes from its weights is replaced with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from quire.runtime.layers.vision_weights import Ranges
from quire.runtime.layers.weights import Placement, WeightLayer
from quire.runtime.layers.xielu import Xielu
from quire.runtime.loading.replace import WeightSet
from quire.runtime.object_tensors import DoesNotMatch, replacements

PLACEMENT = Placement(torch.float32, torch.device("cpu"))
X = torch.linspace(-3, 3, 7)


def ranges() -> Ranges:
    return Ranges(cast("Any", SimpleNamespace(placement=PLACEMENT)))


def within_ranges(layer: Ranges) -> Tensor:
    return (X.clamp(*layer.of_inputs) * 2).clamp(*layer.of_outputs)


def filled(layer: WeightLayer, numbers: list[float]) -> WeightLayer:
    for part, number in zip(layer.parts, numbers, strict=True):
        layer.load(part, torch.tensor(number).view(layer.part_shape(part)))
    return layer


@pytest.mark.parametrize(("make", "run"), [(lambda: Xielu(PLACEMENT), lambda x: x(X)), (ranges, within_ranges)])
def test_numbers_of_a_layer_are_those_of_its_new_weights(make: Any, run: Any) -> None:
    first, second = [0.2, 0.3, 0.5, -1e-6], [-1.0, 1.5, -0.5, 2.5]
    running, fresh = make(), filled(make(), second)
    weights = WeightSet(nn.ModuleList([running]))
    for layer, numbers in ((running, first), (fresh, second)):
        filled(layer, numbers).finish()
    before = run(running)
    new = {name: torch.tensor(number) for name, number in zip(weights.shapes(), second, strict=True)}
    weights.replace(lambda layer, part, name: layer.load(part, new[name].view(layer.part_shape(part))), new)
    assert torch.equal(run(running), run(fresh))
    assert not torch.equal(run(running), before)


def test_other_numbers_in_a_tuple_are_refused() -> None:
    replacements((1.0, 2), (1.0, 2), "layer")
    with pytest.raises(DoesNotMatch, match=r"layer: float 1\.0 cannot become float 3\.0"):
        replacements((1.0, 2), (3.0, 2), "layer")
