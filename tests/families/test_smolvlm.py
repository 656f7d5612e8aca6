"""SmolVLM and Idefics 3 against transformers: the tower, and prompts with several tiles."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from family_bench import load_bench
from interpreter import HAS_TRITON
from quire.config.vision import resolve_images
from quire.runtime.loading.hf.config import hf_model_config
from quire.types.errors import ConfigError, ModelLoadError
from tiny_models import DEVICE
from vision_models import (
    check_in_triton,
    check_logits,
    picture,
    prompt_of,
    smolvlm_inputs,
    vision_model,
    vision_reference,
    write_changed,
)

pytest.importorskip("transformers")
COUNT = 4
PROMPTS = [
    prompt_of([5, 9, 11, 6], picture(3, 3), [7, 30, 8]),
    prompt_of([4, 4, 17, 3, 8]),
    prompt_of([6], picture(3, 3, 1), picture(3, 3, 2), [12, 40], picture(3, 3, 3), [13]),
]


class Case:
    def __init__(self, folder: Path, family: str) -> None:
        self.folder, self.model = folder, vision_model(folder, family)
        self.expected = [vision_reference(self.model, each, COUNT) for each in PROMPTS]


@pytest.fixture(scope="module", params=["smolvlm", "idefics3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp(request.param), request.param)


def test_the_tower_gives_what_that_of_transformers_gives(case: Case) -> None:
    tower, model, shown = load_bench(case.folder).worker._runner._model.tower, case.model, picture(3, 3)
    assert tower is not None
    with torch.no_grad():
        wanted = model.model.get_image_features(**smolvlm_inputs([shown])).pooler_output[0]  # type: ignore[union-attr]
        (found,) = tower(shown.pixels[None].to(DEVICE))
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", [0, 3, 9, 14])
@pytest.mark.parametrize("attention", ["gather", "auto"])
def test_logits_are_those_of_transformers_with_and_without_images(case: Case, attention: str, cut: int) -> None:
    check_logits(load_bench(case.folder, attention=attention), PROMPTS, case.expected, cut)


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
def test_images_come_to_the_kernels_of_a_gpu_too(case: Case) -> None:
    check_in_triton(case.folder, PROMPTS[0], case.expected[0])


@pytest.mark.parametrize(
    ("where", "value", "error"),
    [
        ("image_token_id", 97, "image_token_id: is 97, which is no token"),
        ("scale_factor", 4, "scale_factor: 4 does not divide the 6 x 6 patches"),
        ("text_config.model_type", "mistral", "model_type: 'mistral' is not supported"),
        ("vision_config.hidden_act", "gelu", "hidden_act: 'gelu' is not supported"),
        ("vision_config.num_channels", 1, "num_channels: must be 3"),
        ("vision_config.num_attention_heads", 3, "num_attention_heads: 3 do not divide"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    case: Case, tmp_path: Path, where: str, value: object, error: str
) -> None:
    write_changed(case.folder, tmp_path, where, value)
    with pytest.raises(ModelLoadError, match=re.escape(error)):
        hf_model_config(tmp_path)


@pytest.mark.parametrize(
    ("prepared", "error"),
    [
        ({"resample": 3}, "resample: is 3, only 1 is supported"),
        ({"do_pad": False}, "do_pad: only true is supported"),
        ({"max_image_size": {"longest_edge": 48}}, "max_image_size: only 24 is supported"),
        ({"size": {"longest_edge": 16}}, "size.longest_edge: must be a number of pixels from 24 to 4096"),
    ],
)
def test_images_that_are_prepared_otherwise_are_refused(
    case: Case, tmp_path: Path, prepared: dict[str, Any], error: str
) -> None:
    shutil.copy(case.folder / "config.json", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
    with pytest.raises(ModelLoadError, match=re.escape(error)):
        hf_model_config(tmp_path)


def test_the_number_of_tiles_comes_from_the_processors_file_or_the_settings(case: Case, tmp_path: Path) -> None:
    shutil.copy(case.folder / "config.json", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": 72}}))
    vision = hf_model_config(tmp_path).vision
    assert vision is not None
    assert (vision.grid.max_pieces, vision.grid.max_tokens, vision.grid.fixed) == (10, 9, 3)
    limits = resolve_images(vision, None, {"longest_edge": 24}, 1_024, 16)
    assert limits is not None
    assert limits.grid.max_pieces == 1
    with pytest.raises(ConfigError, match="choose 24 to 72"):
        resolve_images(vision, None, {"longest_edge": 80}, 1_024, 16)
