"""A deeper model that says the same."""

from __future__ import annotations

import torch

from benchmarks.deepened import deepened


def test_layers_that_are_added_are_copies_that_add_little() -> None:
    parts = ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight")
    tensors = {f"model.layers.{layer}.{part}": torch.full((2, 2), layer + 1.0) for layer in range(2) for part in parts}
    found = deepened({**tensors, "model.norm.weight": torch.ones(2)}, 3, 0.5)
    assert found["model.norm.weight"].tolist() == [1.0, 1.0]
    assert len(found) == 1 + 3 * len(tensors)
    for layer in range(2):
        for part in parts:
            own, *copies = (found[f"model.layers.{3 * layer + place}.{part}"] for place in range(3))
            assert (own == layer + 1).all()
            scale = 0.5 if part.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            assert all((copy == scale * (layer + 1)).all() for copy in copies)
