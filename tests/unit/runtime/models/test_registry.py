"""Which architectures are built, and that what they ask of a checkpoint is what Hugging Face calls it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.loading.weights import load_weights
from quire.runtime.models.build import build_model
from quire.types.errors import ConfigError
from tiny_models import checkpoint_of, engine_config, tiny_config, transformers_model


def test_layers_say_how_many_weights_a_model_has() -> None:
    config = tiny_config("qwen2", num_layers=2)
    model = transformers_model(config)
    assert config.num_parameters == sum(weight.numel() for weight in model.parameters())
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads
    outputs = heads.query_size + 2 * heads.kv_size + hidden + 2 * inner + hidden
    weights = hidden * (heads.query_size + 2 * heads.kv_size) + heads.query_size * hidden + 3 * hidden * inner
    assert config.layer_weights == (2 * weights, 2 * outputs)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_model_asks_for_exactly_the_tensors_of_its_checkpoint(architecture: str) -> None:
    pytest.importorskip("transformers")
    config = tiny_config(architecture)
    checkpoint = checkpoint_of(transformers_model(config), config)
    load_weights(build_model(config, LayerBuilder(engine_config().device, config.heads)), checkpoint)
    assert sorted(checkpoint.reads) == sorted(checkpoint.names)


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    config = replace(tiny_config(), architecture="rwkv7")
    with pytest.raises(ConfigError, match="supported: .*llama.*mistral.*qwen2.*qwen3"):
        build_model(config, LayerBuilder(engine_config().device, config.heads))
