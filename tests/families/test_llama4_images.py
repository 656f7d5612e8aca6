"""Llama 4 with images against transformers: the tower, and answers about pictures in tiles."""

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
from quire.types.errors import ModelLoadError
from quire.types.images import PromptImage
from tiled_models import ComparedWithTransformers, TiledCase, answers, noise, normalized
from tiny_models import DEVICE
from vision_models import IMAGE, TEXT, write_changed

transformers = pytest.importorskip("transformers")
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 24, "projector_input_dim": 40, "projector_output_dim": 40, "vision_output_dim": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip
PREPARED = {"max_patches": 4, "size": {"height": 24, "width": 24}}


def inputs(vision: Vision, images: Sequence[PromptImage], side: int) -> dict[str, Any]:
    return {"pixel_values": torch.cat([normalized(image, vision, side) for image in images])}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> TiledCase:
    folder = tmp_path_factory.mktemp("llama4")
    text = {key: value for key, value in TEXT.items() if key != "rope_parameters"} | {
        "head_dim": 16, "intermediate_size_mlp": 96, "intermediate_size": 32, "num_local_experts": 4,
        "no_rope_layers": [1, 0, 1], "moe_layers": [1, 2], "attention_chunk_size": 16, "floor_scale": 8,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(
        "llama4", text_config=text, vision_config=TOWER, image_token_index=IMAGE, tie_word_embeddings=False
    )
    made = TiledCase(folder, config, 24, inputs)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARED))
    return made


class TestFamily(ComparedWithTransformers):
    """Its tower takes tiles as images of their own."""

    def test_the_tower_gives_what_that_of_transformers_gives(self, case: TiledCase) -> None:
        tower: Any = load_bench(case.folder).worker._runner._model.tower
        asked = case.asked(noise(30, 50), noise(24, 24))
        pixels = case.inputs(asked)["pixel_values"]
        with torch.no_grad():
            seen = case.model.vision_model(pixel_values=pixels).last_hidden_state
            wanted = case.model.multi_modal_projector(seen)
            tiles = torch.cat([torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8) for image in asked.images])
            found = tower(tiles.view(-1, 24, 24, 3).to(DEVICE)).cpu()
        torch.testing.assert_close(found, wanted.view(found.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
def test_images_come_to_the_kernels_of_a_gpu_too(case: TiledCase) -> None:
    asked = case.asked([5], noise(24, 24), [7])
    made = case.engine(attention="triton", rows=2)
    assert answers(made, asked, count=2) == [case.expected(asked, 2)]


def test_fewer_tiles_can_be_asked_for(case: TiledCase) -> None:
    limits = resolve_images(case.vision, None, {"max_patches": 2}, 1_024, 16)
    assert limits is not None
    assert (case.grid.max_pieces, limits.grid.max_pieces) == (5, 3)


def test_without_a_tower_in_config_json_the_model_takes_text(case: TiledCase, tmp_path: Path) -> None:
    config = json.loads((case.folder / "config.json").read_text())
    del config["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert hf_model_config(tmp_path).vision is None


@pytest.mark.parametrize(
    ("where", "value", "error"),
    [
        ("image_token_index", 97, "image_token_index: is 97, which is no token"),
        ("vision_config.model_type", "clip_vision_model", "model_type: 'clip_vision_model' is not supported"),
        ("vision_config.num_channels", 1, "num_channels: must be 3"),
        ("vision_config.num_attention_heads", 3, "num_attention_heads: hidden size 32 is not 3 heads"),
        ("vision_config.pixel_shuffle_ratio", 0.4, "pixel_shuffle_ratio: 0.4 does not divide the 6 x 6 patches"),
        ("vision_config.intermediate_size", 96, "intermediate_size: only 128 is supported"),
        ("vision_config.vision_output_dim", 96, "vision_output_dim: only 40 is supported"),
        ("vision_config.multi_modal_projector_bias", True, "multi_modal_projector_bias: only false is supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    case: TiledCase, tmp_path: Path, where: str, value: object, error: str
) -> None:
    write_changed(case.folder, tmp_path, where, value)
    with pytest.raises(ModelLoadError, match=re.escape(error)):
        hf_model_config(tmp_path)


@pytest.mark.parametrize(
    ("prepared", "error"),
    [
        ({"resample": 3}, "resample: is 3, only 2 is supported"),
        ({"size": {"height": 48, "width": 48}}, "size: only 24 x 24 is supported"),
        ({"resize_to_max_canvas": True}, "resize_to_max_canvas: only false is supported"),
    ],
)
def test_images_that_are_prepared_otherwise_are_refused(
    case: TiledCase, tmp_path: Path, prepared: dict[str, Any], error: str
) -> None:
    shutil.copy(case.folder / "config.json", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
    with pytest.raises(ModelLoadError, match=re.escape(error)):
        hf_model_config(tmp_path)
