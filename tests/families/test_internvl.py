"""InternVL and Command A Vision against transformers: the tower with its tiles, and answers about pictures."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from interpreter import HAS_TRITON
from quire.config.vision import Vision, resolve_images
from quire.runtime.loading.hf.config import hf_model_config
from quire.types.errors import ModelLoadError
from quire.types.images import PromptImage
from tiled_models import ComparedWithTransformers, TiledCase, answers, noise, normalized
from vision_models import IMAGE, TEXT, write_changed

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 24,
}  # fmt: skip
INTERN = {**SIZES, "model_type": "internvl_vision"}
TILES = {"max_patches": 4, "size": {"height": 24, "width": 24}}
LINE_BREAK = 94
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # family, text, tower, the rest
    "internvl": ("internvl", {"model_type": "qwen2"}, INTERN, {}),
    "internvl-large": (  # like the tower of 6B parameters
        "internvl",
        {
            "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "head_dim": 16,
        },
        {
            **INTERN, "norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True, "use_mean_pooling": False,
            "use_mask_token": True,
        },
        {"vision_feature_layer": -1},
    ),
    "cohere2_vision": (
        "cohere2_vision", {"model_type": "cohere2", "sliding_window": 9, "logit_scale": 0.5, "pad_token_id": 0},
        {**SIZES, "model_type": "siglip_vision_model", "vision_use_head": False},
        {"alignment_intermediate_size": 40},
    ),
}  # fmt: skip


def inputs(vision: Vision, images: Sequence[PromptImage], side: int) -> dict[str, Any]:
    return {"pixel_values": torch.cat([normalized(image, vision, side) for image in images])}


def make(folder: Path, name: str) -> TiledCase:
    kind, text, tower, rest = CASES[name]
    usual = {key: value for key, value in TEXT.items() if key != "rope_parameters"}
    config = transformers.AutoConfig.for_model(
        kind, text_config=usual | text, vision_config=tower, image_token_id=IMAGE, tie_word_embeddings=False, **rest
    )
    made = TiledCase(folder, config, 24, inputs)
    (folder / "preprocessor_config.json").write_text(json.dumps(TILES))
    tokens = {"added_tokens_decoder": {str(LINE_BREAK): {"content": "<|IMG_LINE_BREAK|>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return made


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TiledCase:
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def intern(tmp_path_factory: pytest.TempPathFactory) -> TiledCase:
    return make(tmp_path_factory.mktemp("intern"), "internvl")


@pytest.fixture(scope="module")
def cohere(tmp_path_factory: pytest.TempPathFactory) -> TiledCase:
    return make(tmp_path_factory.mktemp("cohere"), "cohere2_vision")


class TestFamily(ComparedWithTransformers):
    """Of each case."""


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
def test_images_come_to_the_kernels_of_a_gpu_too(cohere: TiledCase) -> None:
    asked = cohere.asked([5], noise(25, 24), [7])
    made = cohere.engine(attention="triton", rows=2)
    assert answers(made, asked, count=2) == [cohere.expected(asked, 2)]


def test_a_token_ends_each_tile_of_command_a_vision(cohere: TiledCase) -> None:
    (image,) = cohere.asked(noise(40, 20)).images
    assert (image.rows, image.columns, image.gap) == (3, 9, 1)  # two tiles and the whole
    assert cohere.asked(noise(40, 20)).tokens == (*[IMAGE] * 9, LINE_BREAK) * 3


def test_fewer_tiles_can_be_asked_for(intern: TiledCase) -> None:
    limits = resolve_images(intern.vision, None, {"max_patches": 2}, 1_024, 16)
    assert limits is not None
    assert (intern.grid.max_tiles, limits.grid.max_tiles) == (5, 3)


INTERN_REFUSED = [
    ("image_token_id", 97, "image_token_id: is 97, which is no token"),
    ("projector_hidden_act", "relu", "projector_hidden_act: 'relu' is not supported"),
    ("vision_feature_layer", -2, "vision_feature_layer: only -1 is supported"),
    ("vision_feature_select_strategy", "full", "vision_feature_select_strategy: 'full' is not supported"),
    ("downsample_ratio", 0.25, "downsample_ratio: 1 / 4 does not divide the 6 x 6 patches"),
    ("downsample_ratio", 0.3, "downsample_ratio: is 0.3, which is not 1 divided by a whole number"),
    ("text_config.model_type", "gemma", "text_config.model_type: 'gemma' is not supported"),
    ("vision_config.image_size", [24, 28], "image_size: must be a number of pixels, the same for both sides"),
    ("vision_config.norm_type", "none", "norm_type: 'none' is not supported"),
    ("vision_config.hidden_act", "relu", "hidden_act: 'relu' is not supported"),
    ("vision_config.num_channels", 1, "num_channels: must be 3"),
    ("vision_config.num_attention_heads", 3, "num_attention_heads: 3 do not divide"),
    ("vision_config.use_absolute_position_embeddings", False, "use_absolute_position_embeddings: only true"),
]
COHERE_REFUSED = [
    ("image_token_id", 97, "image_token_id: is 97, which is no token"),
    ("downsample_factor", 4, "downsample_factor: 4 does not divide the 6 x 6 patches"),
    ("alignment_intermediate_size", 41, "alignment_intermediate_size: must be even, is 41"),
    ("text_config.model_type", "cohere", "text_config.model_type: only cohere2 is supported"),
    ("vision_config.model_type", "clip_vision_model", "model_type: 'clip_vision_model' is not supported"),
    ("vision_config.num_attention_heads", 3, "num_attention_heads: 3 do not divide"),
]


@pytest.mark.parametrize(
    ("family", "where", "value", "error"),
    [("intern", *each) for each in INTERN_REFUSED] + [("cohere", *each) for each in COHERE_REFUSED],
)
def test_what_is_not_supported_is_refused_by_name(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, where: str, value: object, error: str
) -> None:
    write_changed(request.getfixturevalue(family).folder, tmp_path, where, value)
    shutil.copy(request.getfixturevalue(family).folder / "tokenizer_config.json", tmp_path)
    with pytest.raises(ModelLoadError, match=re.escape(error)):
        hf_model_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "prepared", "error"),
    [
        ("intern", {"resample": 2}, "resample: is 2, only 3 is supported"),
        ("intern", {"size": {"height": 48, "width": 48}}, "size: only 24 x 24 is supported"),
        ("intern", {"max_patches": 65}, "max_patches: min_patches is 1 and max_patches 65"),
        ("cohere", {"max_patches": 0}, "max_patches: min_patches is 1 and max_patches 0"),
        ("cohere", {"patch_size": 5}, "patch_size: is 5, and a tile has 3 x 3 tokens"),
    ],
)
def test_images_that_are_prepared_otherwise_are_refused(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, prepared: dict[str, Any], error: str
) -> None:
    folder = request.getfixturevalue(family).folder
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
    with pytest.raises(ModelLoadError, match=re.escape(error)):
        hf_model_config(tmp_path)
