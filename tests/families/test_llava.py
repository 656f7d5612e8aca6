"""LLaVA, LLaVA-NeXT and LLaVA-OneVision against transformers: the tower with its tiles, and answers about pictures."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from family_bench import load_bench
from interpreter import HAS_TRITON
from quire.config.vision import Vision, resolve_images
from quire.runtime.loading.hf.config import hf_model_config
from quire.types.errors import ConfigError, ModelLoadError
from quire.types.images import PromptImage
from tiled_models import ComparedWithTransformers, TiledCase, answers, check_towers, noise, normalized
from vision_models import IMAGE, TEXT, write_changed

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip
CLIP = {**SIZES, "model_type": "clip_vision_model", "image_size": 24}
SIGLIP = {**SIZES, "model_type": "siglip_vision_model", "image_size": 26, "vision_use_head": False}
FULL = {"vision_feature_select_strategy": "full"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # family, text, tower, the rest
    "llava": ("llava", {"model_type": "llama"}, CLIP, {}),
    "llava-layers": (
        "llava", {"model_type": "mistral", "sliding_window": None}, {**CLIP, "hidden_act": "gelu"},
        {**FULL, "vision_feature_layer": [-3, 0, -1], "multimodal_projector_bias": False},
    ),
    "llava-siglip": ("llava", {"model_type": "qwen2"}, SIGLIP, {**FULL, "vision_feature_layer": -1}),
    "llava_next": (
        "llava_next", {"model_type": "mistral", "sliding_window": 9}, CLIP,
        {"image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]},
    ),
    "granite-vision": (
        "llava_next", {"model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0}, SIGLIP,
        {**FULL, "vision_feature_layer": [-3, -1], "image_grid_pinpoints": [[26, 52], [52, 78]]},
    ),
    "llava_onevision": (
        "llava_onevision", {"model_type": "qwen2"}, SIGLIP,
        {"image_grid_pinpoints": [[26, 26], [26, 52], [52, 78], [78, 78]], "vision_aspect_ratio": "anyres_max_2"},
    ),
}  # fmt: skip


def inputs(vision: Vision, images: Sequence[PromptImage], side: int) -> dict[str, Any]:
    tiles = [normalized(image, vision, side) for image in images]
    if vision.grid.tiling is None:
        return {"pixel_values": torch.cat(tiles)}
    padded = torch.zeros(len(tiles), max(map(len, tiles)), 3, side, side)
    for number, each in enumerate(tiles):
        padded[number, : len(each)] = each
    sizes = torch.tensor([image.size if any(image.size) else (1, 1) for image in images])
    several = {"batch_num_images": torch.tensor([len(images)])} if vision.grid.margin is not None else {}
    return {"pixel_values": padded, "image_sizes": sizes, **several}


def make(folder: Path, name: str) -> TiledCase:
    kind, text, tower, rest = CASES[name]
    usual = {key: value for key, value in TEXT.items() if key != "rope_parameters"}
    config = transformers.AutoConfig.for_model(
        kind, text_config=usual | text, vision_config=tower, image_token_index=IMAGE, **rest
    )
    return TiledCase(folder, config, tower["image_size"], inputs)


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TiledCase:
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> TiledCase:
    return make(tmp_path_factory.mktemp("tiled"), "llava_next")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TiledCase:
    return make(tmp_path_factory.mktemp("plain"), "llava")


class TestFamily(ComparedWithTransformers):
    """Of each case."""


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
def test_images_come_to_the_kernels_of_a_gpu_too(tiled: TiledCase) -> None:
    asked = tiled.asked([5], noise(25, 24), [7])
    made = tiled.engine(attention="triton", rows=2)
    assert answers(made, asked, count=2) == [tiled.expected(asked, 2)]


def test_names_of_older_checkpoints_are_the_same_tensors(tiled: TiledCase, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiled.folder / "model.safetensors")
    stored = {
        "vision_tower.vision_model.": ("model.vision_tower.vision_model.", "vision_tower.vision_model.",
                                       "model.vision_tower.", "vision_tower."),
        "multi_modal_projector.": ("model.multi_modal_projector.", "multi_modal_projector."),
        "image_newline": ("model.image_newline", "image_newline"),
        "language_model.model.": ("model.language_model.", "language_model.model."),
        "language_model.lm_head.": ("lm_head.", "language_model.lm_head."),
    }  # fmt: skip
    for newer in (False, True):
        renamed = {}
        for name, tensor in tensors.items():
            old, new = next(
                (old, prefix) for old, names in stored.items() for prefix in names if name.startswith(prefix)
            )
            short = old.removesuffix("vision_model.").replace("language_model.model.", "language_model.")
            short = short.replace("language_model.lm_head.", "lm_head.")
            kept = f"model.{short}" if newer and short != "lm_head." else short if newer else old
            renamed[kept + name.removeprefix(new)] = tensor
        folder = tmp_path / str(newer)
        folder.mkdir()
        shutil.copy(tiled.folder / "config.json", folder)
        save_file(renamed, folder / "model.safetensors")
        check_towers(tiled, load_bench(folder).worker._runner._model.tower)


@pytest.mark.parametrize(
    ("where", "value", "error"),
    [
        ("image_token_index", 97, "image_token_index: is 97, which is no token"),
        ("projector_hidden_act", "relu", "projector_hidden_act: 'relu' is not supported"),
        ("vision_feature_layer", -5, "vision_feature_layer: is -5, and the tower has 3 layers"),
        ("vision_feature_layer", [0], "vision_feature_layer: is [0], and the tower has 3 layers"),
        ("vision_feature_layer", [], "vision_feature_layer: must be a whole number, or a list of up to 16"),
        ("vision_feature_select_strategy", "full", "vision_feature_select_strategy: only default is supported"),
        ("image_grid_pinpoints", [[24, 40]], "image_grid_pinpoints: must be up to 128 pairs of multiples of 24"),
        ("image_grid_pinpoints", [[240, 240]], "image_grid_pinpoints: makes more than 64 tiles"),
        ("text_config.model_type", "gemma", "text_config.model_type: 'gemma' is not supported"),
        ("vision_config.model_type", "dinov2", "model_type: 'dinov2' is not supported"),
        ("vision_config.hidden_act", "relu", "hidden_act: 'relu' is not supported"),
        ("vision_config.num_channels", 1, "num_channels: must be 3"),
        ("vision_config.num_attention_heads", 3, "num_attention_heads: 3 do not divide"),
        ("vision_config.image_size", 7, "image_size: 7 pixels are fewer than two patches of 4"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tiled: TiledCase, tmp_path: Path, where: str, value: object, error: str
) -> None:
    write_changed(tiled.folder, tmp_path, where, value)
    with pytest.raises(ModelLoadError, match=re.escape(error)):
        hf_model_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "prepared", "error"),
    [
        ("tiled", {"resample": 2}, "resample: is 2, only 3 is supported"),
        ("tiled", {"do_pad": False}, "do_pad: only true is supported"),
        ("tiled", {"size": {"shortest_edge": 48}}, "size: only 24 pixels are supported"),
        ("tiled", {"crop_size": {"height": 48, "width": 48}}, "crop_size: only 24 x 24 is supported"),
        ("tiled", {"image_grid_pinpoints": [[24, 24]]}, "image_grid_pinpoints: differs from that of config.json"),
        ("plain", {"size": {"shortest_edge": 48}}, "size: only 24 pixels are supported"),
        ("plain", {"crop_size": {"height": 48, "width": 48}}, "crop_size: only 24 x 24 is supported"),
        ("plain", {"do_center_crop": False}, "do_center_crop: only true is supported"),
    ],
)
def test_images_that_are_prepared_otherwise_are_refused(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, prepared: dict[str, Any], error: str
) -> None:
    shutil.copy(request.getfixturevalue(family).folder / "config.json", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
    with pytest.raises(ModelLoadError, match=re.escape(error)):
        hf_model_config(tmp_path)


def test_a_config_without_sizes_has_those_of_transformers(plain: TiledCase, tmp_path: Path) -> None:
    """The published files leave most of them out."""
    config = json.loads((plain.folder / "config.json").read_text())
    config["text_config"] = {"model_type": "mistral", "vocab_size": 32_064, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, usual = hf_model_config(tmp_path), transformers.MistralConfig()
    assert (found.hidden_size, found.num_layers) == (usual.hidden_size, usual.num_hidden_layers)
    assert (found.intermediate_size, found.heads.num_query) == (usual.intermediate_size, usual.num_attention_heads)


def test_tiles_have_no_settings(tiled: TiledCase) -> None:
    with pytest.raises(ConfigError, match="tiles of this model always have 24 x 24 pixels"):
        resolve_images(tiled.vision, None, {"max_pixels": 1_000}, 1_024, 16)
