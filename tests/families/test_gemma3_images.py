"""Gemma 3 with images against transformers: its tower, and images whose tokens see the whole of themselves."""

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
from quire import LLM
from quire.runtime.loading.hf.config import hf_model_config
from quire.types.errors import ConfigError, ModelLoadError
from tiny_models import DEVICE
from vision_models import (
    check_in_triton,
    check_logits,
    picture,
    prompt_of,
    vision_model,
    vision_reference,
    write_changed,
)

pytest.importorskip("transformers")
COUNT = 4
PROMPTS = [
    prompt_of([5, 9, 11, 6, 3, 8, 9, 4, 3, 12, 15], picture(4, 4), [7, 30, 8]),
    prompt_of([4, 4, 17, 3, 8]),
    prompt_of([6], picture(4, 4, 1), [12, 40], picture(4, 4, 2), [13]),
]


class Case:
    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, vision_model(folder, "gemma3")
        self.expected = [vision_reference(self.model, prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("gemma3"))


def test_the_tower_gives_what_that_of_transformers_gives(case: Case) -> None:
    tower, shown = load_bench(case.folder).worker._runner._model.tower, picture(4, 4)
    assert tower is not None
    model: Any = case.model
    pixels = (shown.pixels.float() / 255 - 0.5) / 0.5
    with torch.no_grad():
        wanted = model.model.get_image_features(pixels.permute(2, 0, 1)[None]).pooler_output[0]
        (found,) = tower(shown.pixels[None].to(DEVICE))
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", [0, 12, 29])
@pytest.mark.parametrize("attention", ["reference", "gather", "auto"])
@pytest.mark.parametrize("split", [False, True])
def test_logits_are_those_of_transformers_with_and_without_images(
    case: Case, attention: str, cut: int, split: bool
) -> None:
    bench = load_bench(case.folder, attention=attention, split=split)
    check_logits(bench, PROMPTS, case.expected, cut)  # at an edge of the image


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
def test_images_see_themselves_behind_the_kernels_of_a_gpu_too(case: Case) -> None:
    check_in_triton(case.folder, PROMPTS[0], case.expected[0])


@pytest.mark.parametrize(
    ("where", "value", "error"),
    [
        ("mm_tokens_per_image", 15, "mm_tokens_per_image: 15 tokens are not squares of the 8 x 8 patches"),
        ("mm_tokens_per_image", 9, "mm_tokens_per_image: 9 tokens are not squares of the 8 x 8 patches"),
        ("image_token_index", 97, "image_token_index: is 97, which is no token"),
        ("vision_config.hidden_act", "gelu", "hidden_act: 'gelu' is not supported"),
        ("vision_config.vision_use_head", True, "vision_use_head: only false is supported"),
        ("text_config.attn_logit_softcapping", 4.0, "attn_logit_softcapping: is not supported in models for images"),
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
        ({"do_pan_and_scan": True}, "do_pan_and_scan: only false is supported"),
        ({"resample": 3}, "resample: is 3, only 2 is supported"),
        ({"size": {"height": 16, "width": 16}}, "size: only 32 x 32 is supported"),
    ],
)
def test_images_that_are_prepared_otherwise_are_refused(
    case: Case, tmp_path: Path, prepared: dict[str, Any], error: str
) -> None:
    shutil.copy(case.folder / "config.json", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
    with pytest.raises(ModelLoadError, match=re.escape(error)):
        hf_model_config(tmp_path)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"max_num_batched_tokens": 17, "max_num_seqs": 2}, "max_num_batched_tokens: is 17, too few for an image"),
        ({"mm_processor_kwargs": {"max_pixels": 2_000}}, "images of this model always have 32 x 32 pixels"),
        ({"kv_layout": "virtual"}, 'kv_layout: "virtual" does not support images'),
    ],
)
def test_settings_that_do_not_fit_images_are_refused(case: Case, settings: dict[str, Any], error: str) -> None:
    given = {"dtype": "float32", "num_kv_blocks": 64, "skip_tokenizer_init": True, "load_format": "dummy"}
    with pytest.raises(ConfigError, match=re.escape(error)):
        LLM(case.folder, **(given | settings))
