"""Which architectures are built, and that what they ask of a checkpoint is what Hugging Face calls it."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from quire.config.model import Architecture
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.loading.weights import load_weights
from quire.runtime.models.registry import MODELS, build_model
from quire.types.errors import ConfigError
from tiny_models import checkpoint_of, engine_config, tiny_config, transformers_model


def test_every_architecture_a_config_can_name_has_a_model() -> None:
    assert set(MODELS) == set(get_args(Architecture))


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_a_model_asks_for_exactly_the_tensors_of_its_checkpoint(architecture: str) -> None:
    pytest.importorskip("transformers")
    config = tiny_config(architecture)
    checkpoint = checkpoint_of(transformers_model(config), config)
    load_weights(build_model(config, LayerBuilder(engine_config().device, config.heads)), checkpoint)
    assert sorted(checkpoint.reads) == sorted(checkpoint.names)


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    config = replace(tiny_config(), architecture="mamba")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="supported: llama, mistral, qwen2, qwen3"):
        build_model(config, LayerBuilder(engine_config().device, config.heads))
