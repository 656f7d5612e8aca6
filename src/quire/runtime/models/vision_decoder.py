"""Decoders of other families with a vision tower: LLaVA and InternVL are stored with any of several text models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.config.vision import Vision
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.vision import VisionTower
from quire.runtime.models.decoder import (
    Decoder,
    read_granite,
    read_llama,
    read_mistral,
    read_qwen2,
    read_qwen3,
)
from quire.runtime.models.family import text_model_name
from quire.runtime.models.mixture import read_qwen3_moe

_SIZES = {"vocab_size": 32_000, "hidden_size": 4_096, "intermediate_size": 11_008, "num_hidden_layers": 32,
          "num_attention_heads": 32}  # fmt: skip
_QWEN = {**_SIZES, "vocab_size": 151_936, "intermediate_size": 22_016}


class TextModel(NamedTuple):
    """Reads the config of a text model. `usual`: sizes that `text_config` may leave out."""

    read: Callable[[Fields], ModelConfig]
    usual: Mapping[str, int]


TEXT_MODELS = {  # by `model_type` of `text_config`
    "llama": TextModel(read_llama, _SIZES),
    "mistral": TextModel(read_mistral, {**_SIZES, "intermediate_size": 14_336}),
    "granite": TextModel(read_granite, _SIZES),
    "qwen2": TextModel(read_qwen2, _QWEN),
    "qwen3": TextModel(read_qwen3, _QWEN),
    "qwen3_moe": TextModel(read_qwen3_moe, {**_QWEN, "intermediate_size": 6_144}),
}


class VisionDecoder(Decoder):
    """A plain decoder with a vision tower, whose tensors begin with `vision_tower.`"""

    make_tower: type[VisionTower]

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config, build)
        vision, size = config.vision, config.hidden_size
        self.vision_tower = None if vision is None else self.make_tower(vision, size, build)

    @property
    def tower(self) -> VisionTower | None:
        return self.vision_tower


def read_text(config: Fields, name: str, kind: str, known: tuple[str, ...], vision: Vision) -> ModelConfig:
    """Read the text model and join it with the tower. `name`: of the family; `kind`: the default of
    `text_config.model_type`; `known`: its values that are supported."""
    found = config.text("model_type", kind)
    if found == name:  # that of the whole, because `text_config` has none
        found = kind
    if found not in known:
        raise config.refuse(
            "text_config.model_type", f"{found!r} is not supported", fix=f"supported: {', '.join(known)}"
        )
    model = TEXT_MODELS[found]
    given = {key: value for key, value in config.values.items() if value is not None or key == "sliding_window"}
    numbers = model.read(Fields(config.file, {**model.usual, **given}))
    return replace(numbers, architecture=name, vision=replace(vision, vector_scale=numbers.embedding_scale))


def rename(name: str) -> str | None:
    """Normalize the names of several versions of transformers. Projector and newline are parts of our tower."""
    outer = name.removeprefix("model.")
    if outer.startswith("vision_tower."):
        return f"vision_tower.{outer.removeprefix('vision_tower.').removeprefix('vision_model.')}"
    if outer.startswith("multi_modal_projector."):
        return f"vision_tower.{outer.partition('.')[2]}"
    return f"vision_tower.{outer}" if outer == "image_newline" else text_model_name(name, ())
