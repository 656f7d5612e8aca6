"""InternVL in the form of transformers: a transformer with scaled residuals before Qwen or Llama.

A picture is cut into tiles whose number fits its shape, and shown as a whole behind them. The patches of a token are
concatenated, normed and projected.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.config.vision import Vision
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.vision_weights import NamedTensor
from quire.runtime.layers.weights import WeightLayer
from quire.runtime.models.family import Family
from quire.runtime.models.hf_internvl import read_internvl_tower
from quire.runtime.models.mixture import QwenMoeBlock
from quire.runtime.models.vision_decoder import VisionDecoder, read_text, rename
from quire.runtime.models.vision_transformer import VisionTransformer

_TEXTS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_PROJECTOR_EPS = 1e-5
_NAMES = {  # parts of names in checkpoints, and in `InternVLTower`
    "encoder.layer.": "encoder.layers.",
    "layernorm_before.": "layer_norm1.",
    "layernorm_after.": "layer_norm2.",
    ".attention.": ".self_attn.",
    "projection_layer.": "out_proj.",
    "embeddings.patch_embeddings.projection.": "embeddings.patch_embedding.",
    "vision_tower.layernorm.": "vision_tower.post_layernorm.",
}


class InternVLTower(VisionTransformer):
    """The tower and the projector behind it."""

    def __init__(self, vision: Vision, hidden_size: int, build: LayerBuilder) -> None:
        super().__init__(vision, build)
        size = vision.hidden_size * vision.merge**2
        self.norm = build.layer_norm("layer_norm", size, _PROJECTOR_EPS)
        self.linear_1 = build.whole_linear("linear_1", size, hidden_size)
        self.linear_2 = build.whole_linear("linear_2", hidden_size, hidden_size)

    def make_tables(self, vision: Vision, build: LayerBuilder) -> tuple[WeightLayer, WeightLayer | None]:
        shape = (1, 1 + vision.table_side**2, vision.hidden_size)
        table = NamedTensor("embeddings.position_embeddings", shape, build)
        return table, NamedTensor("embeddings.cls_token", (1, 1, vision.hidden_size), build)

    def forward(self, tiles: Tensor) -> Tensor:  # [tiles, side, side, 3] -> [tiles, tokens, hidden]
        size = self.vision.hidden_size * self.vision.merge**2
        by_token = self.encode(tiles, self.positions)[:, 1:].reshape(-1, size)
        found: Tensor = self.linear_2(F.gelu(self.linear_1(self.norm(by_token))))
        return found.view(len(tiles), -1, found.shape[-1])


class InternVL(VisionDecoder):
    make_tower = InternVLTower


class InternVLMoe(InternVL):
    block = QwenMoeBlock


def build_internvl(config: ModelConfig, build: LayerBuilder) -> InternVL:
    return (InternVL if config.experts is None else InternVLMoe)(config, build)


def read_internvl(config: Fields) -> ModelConfig:
    return read_text(config, "internvl", "qwen2", _TEXTS, read_internvl_tower(config))


def rename_internvl(name: str) -> str | None:
    found = rename(name)
    if found is not None and found.startswith("vision_tower."):
        for old, new in _NAMES.items():
            found = found.replace(old, new)
    return found


INTERNVL = Family(
    name="internvl", build=build_internvl, read=read_internvl, rename=rename_internvl, nested="text_config"
)
