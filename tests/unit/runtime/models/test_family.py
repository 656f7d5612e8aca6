"""Names of tensors: where the model has layers inside other modules, and which tensors no layer reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.runtime.models.family import is_unread, with_module_path
from tiny_models import tiny_config

PLACES = {"outside": ("table.",), "inside": ("gate.", "norm_2.")}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.table.weight", "model.outside.table.weight"),
        ("model.layers.11.gate.weight", "model.layers.11.inside.gate.weight"),
        ("model.layers.11.norm_2.weight", "model.layers.11.inside.norm_2.weight"),
        ("model.layers.11.norm.weight", "model.layers.11.norm.weight"),
        ("model.layers.11.mlp.gate.weight", "model.layers.11.mlp.gate.weight"),  # the gate of another module
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_layers_are_looked_for_in_the_modules_that_hold_them(name: str, expected: str) -> None:
    assert with_module_path(name, PLACES) == expected


def test_keys_and_values_of_layers_that_read_those_of_others_are_not_read() -> None:
    config = replace(tiny_config(num_layers=3), kv_layers=(0, 1, 1))
    names = [f"model.layers.{layer}.self_attn.{part}.weight" for layer in range(4) for part in ("k_proj", "q_proj")]
    assert [name for name in names if is_unread(config, name)] == ["model.layers.2.self_attn.k_proj.weight"]
    assert not any(is_unread(replace(config, kv_layers=()), name) for name in names)
