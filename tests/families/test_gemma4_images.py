"""Gemma 4 with images against transformers: its towers, side inputs of image tokens, and images that are seen whole
where there is a window."""

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
from quire import LLM, SamplingParams
from quire.config.vision import resolve_images
from quire.runtime.loading.hf.config import hf_model_config
from quire.types.errors import ConfigError, ModelLoadError
from tiny_models import DEVICE
from vision_models import (
    check_in_triton,
    check_logits,
    gemma4_inputs,
    picture,
    prompt_of,
    vision_model,
    vision_reference,
    write_changed,
)

pytest.importorskip("transformers")
COUNT = 4
PROMPTS = [
    prompt_of([5, 9, 11, 6, 3, 8, 9, 4, 3, 12, 15], picture(3, 5), [7, 30, 8]),
    prompt_of([4, 4, 17, 3, 8]),
    prompt_of([6], picture(4, 2, 1), [12, 40], picture(2, 6, 2), [13]),
]
FAMILIES = ["gemma4", "gemma4_large"]  # causal with side inputs; images see themselves whole where there is a window


class Case:
    def __init__(self, folder: Path, family: str) -> None:
        self.folder, self.model = folder, vision_model(folder, family)
        self.expected = [vision_reference(self.model, prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp(request.param), request.param)


def test_the_tower_gives_what_that_of_transformers_gives(case: Case) -> None:
    tower, model = load_bench(case.folder).worker._runner._model.tower, case.model
    assert tower is not None
    for shown in (picture(3, 5), picture(4, 2, 1), picture(1, 4, 2)):
        with torch.no_grad():
            wanted = model.model.get_image_features(**gemma4_inputs([shown])).pooler_output[0]  # type: ignore[union-attr]
            found = tower(shown.pixels.to(DEVICE))
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", [0, 12, 28])
@pytest.mark.parametrize("attention", ["reference", "gather", "auto"])
@pytest.mark.parametrize("split", [False, True])
def test_logits_are_those_of_transformers_with_and_without_images(
    case: Case, attention: str, cut: int, split: bool
) -> None:
    bench = load_bench(case.folder, attention=attention, split=split)
    check_logits(bench, PROMPTS, case.expected, cut)  # at an edge of the image


def test_a_causal_image_may_be_cut(tmp_path: Path) -> None:
    case = Case(tmp_path, "gemma4")
    check_logits(load_bench(tmp_path), PROMPTS, case.expected, 17)


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
def test_images_come_to_the_kernels_of_a_gpu_too(case: Case) -> None:
    check_in_triton(case.folder, PROMPTS[0], case.expected[0])


@pytest.mark.parametrize(
    ("where", "value", "error"),
    [
        ("image_token_id", 97, "image_token_id: is 97, which is no token"),
        ("vision_config.hidden_activation", "gelu", "hidden_activation: 'gelu' is not supported"),
        ("vision_config.attention_bias", True, "attention_bias: only false is supported"),
        ("vision_config.num_key_value_heads", 1, "num_key_value_heads: only 2 is supported"),
        ("vision_config.head_dim", 8, "head_dim: only 16 is supported"),
        ("vision_config.position_embedding_size", 99, "position_embedding_size: must be at least 2240"),
        ("vision_config.rope_parameters", {"rope_type": "yarn"}, "rope_parameters: only axial positions"),
        ("vision_config.rope_parameters", {"rope_theta": "1"}, "rope_theta: must be a positive number"),
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
        ({"resample": 2}, "resample: is 2, only 3 is supported"),
        ({"pooling_kernel_size": 3}, "pooling_kernel_size: is 3, only 2 is supported"),
        ({"max_soft_tokens": 100}, "max_soft_tokens: must be one of"),
        ({"do_normalize": True, "image_mean": [0.5, 0.5, 0.5]}, "do_normalize: only false is supported"),
    ],
)
def test_images_that_are_prepared_otherwise_are_refused(
    case: Case, tmp_path: Path, prepared: dict[str, Any], error: str
) -> None:
    shutil.copy(case.folder / "config.json", tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": prepared}))
    with pytest.raises(ModelLoadError, match=re.escape(error)):
        hf_model_config(tmp_path)


def test_the_budget_of_tokens_comes_from_the_processors_file_or_the_settings(case: Case, tmp_path: Path) -> None:
    shutil.copy(case.folder / "config.json", tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"max_soft_tokens": 140}}))
    vision = hf_model_config(tmp_path).vision
    assert vision is not None
    assert vision.grid.max_tokens == 140
    limits = resolve_images(vision, None, {"max_soft_tokens": 560}, 1_024, 16)
    assert limits is not None
    assert limits.grid.max_tokens == 560


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"mm_processor_kwargs": {"max_pixels": 2_000}}, "mm_processor_kwargs.max_pixels: is not known"),
        ({"mm_processor_kwargs": {"max_soft_tokens": 100}}, "mm_processor_kwargs.max_soft_tokens: is 100"),
    ],
)
def test_settings_that_do_not_fit_images_are_refused(case: Case, settings: dict[str, Any], error: str) -> None:
    given = {"dtype": "float32", "num_kv_blocks": 64, "skip_tokenizer_init": True, "load_format": "dummy"}
    with pytest.raises(ConfigError, match=re.escape(error)):
        LLM(case.folder, **(given | settings))


def test_without_images_the_tower_is_not_loaded(case: Case) -> None:
    given: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "skip_tokenizer_init": True, "threads": 1}
    with LLM(case.folder, limit_mm_per_prompt={"image": 0}, **given) as made:
        (answer,) = made.generate(
            [{"prompt_token_ids": PROMPTS[1].tokens}], SamplingParams(temperature=0.0, max_tokens=COUNT)
        )
    assert list(answer.outputs[0].token_ids) == case.expected[1][0]
