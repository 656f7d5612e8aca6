"""Mistral 3 with images against transformers: the tower, and images of rows that end with tokens of their own."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_bench import load_bench
from interpreter import HAS_TRITON
from quire.config.vision import ImageGrid, ImageLimits, resolve_images
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.hf.config import hf_model_config
from quire.serving.vision.image_reader import fitting_size
from quire.types.decoding import BeamRules
from quire.types.errors import ConfigError, InvalidRequest, ModelLoadError
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from tiny_models import DEVICE
from vision_models import (
    IMAGE,
    UNIT,
    Picture,
    VisionPrompt,
    check_in_triton,
    check_logits,
    picture,
    pixtral_inputs,
    prompt_of,
    vision_model,
    vision_reference,
    write_changed,
)
from worker_executor import TinyEngine

pytest.importorskip("transformers")
COUNT = 4
ROW_ENDS = (94, 95)


def prompt(*parts: Any) -> VisionPrompt:
    return prompt_of(*parts, row_ends=ROW_ENDS)


PROMPTS = [
    prompt([5, 9, 11, 6], picture(3, 5), [7, 30, 8]),
    prompt([4, 4, 17, 3, 8]),
    prompt([6], picture(4, 2, 1), [12, 40], picture(2, 6, 2), [13]),
]
GRID = ImageGrid(IMAGE, UNIT, UNIT**2, 64**2, longest=64, row_ends=ROW_ENDS)
LIMITS = ImageLimits(GRID, max_images=3, max_kept_tokens=0)


class Case:
    def __init__(self, folder: Path, family: str = "mistral3") -> None:
        self.folder, self.model = folder, vision_model(folder, family)
        self.expected = [vision_reference(self.model, each, COUNT) for each in PROMPTS]
        write_tokens(folder)

    def answer(self, asked: VisionPrompt, count: int = COUNT) -> list[int]:
        return vision_reference(self.model, asked, count)[0]

    def engine(self, **settings: Any) -> TinyEngine:
        settings = {"images": LIMITS, "max_len": 128, **settings}
        return TinyEngine(open_checkpoint(files_at(self.folder)), None, **settings)


def write_tokens(folder: Path) -> None:
    tokens = {
        str(number): {"content": name} for name, number in zip(("[IMG_BREAK]", "[IMG_END]"), ROW_ENDS, strict=True)
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("mistral3"))


def test_the_tower_gives_what_that_of_transformers_gives(case: Case) -> None:
    tower, model = load_bench(case.folder).worker._runner._model.tower, case.model
    assert tower is not None
    for shown in (picture(3, 5), picture(4, 2, 1), picture(1, 4, 2)):
        with torch.no_grad():
            wanted = model.model.get_image_features(**pixtral_inputs([shown])).pooler_output[0]  # type: ignore[union-attr]
            found = tower(shown.pixels.to(DEVICE))
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", [0, 3, 9, 10, 14, 23])  # before and behind the end of a row, too
@pytest.mark.parametrize("attention", ["gather", "auto"])
def test_logits_are_those_of_transformers_with_and_without_images(case: Case, attention: str, cut: int) -> None:
    check_logits(load_bench(case.folder, attention=attention), PROMPTS, case.expected, cut)


def test_names_of_newer_checkpoints_are_the_same_tensors(case: Case, tmp_path: Path) -> None:
    tensors = load_file(case.folder / "model.safetensors")
    places = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.", "": "model."}
    renamed = {}
    for name, tensor in tensors.items():
        old = next(place for place in places if name.startswith(place))
        renamed[places[old] + name.removeprefix(old)] = tensor
    assert renamed.keys() != tensors.keys()
    shutil.copy(case.folder / "config.json", tmp_path)
    write_tokens(tmp_path)
    save_file(renamed, tmp_path / "model.safetensors")
    check_logits(load_bench(tmp_path), PROMPTS, case.expected, 0)


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
def test_images_come_to_the_kernels_of_a_gpu_too(case: Case) -> None:
    check_in_triton(case.folder, PROMPTS[0], case.expected[0])


def test_pixtral_12b_is_a_llava_whose_tokens_are_patches(tmp_path: Path) -> None:
    made = Case(tmp_path, "llava")
    for cut in (0, 9):
        check_logits(load_bench(tmp_path), PROMPTS, made.expected, cut)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value, error in (
        ("vision_feature_layer", -2, "vision_feature_layer: only -1 is supported"),
        ("vision_feature_layer", None, "vision_feature_layer: only -1 is supported"),
        ("vision_feature_select_strategy", "default", "vision_feature_select_strategy: only full is supported"),
        ("vision_config", {"model_type": "dinov2"}, "model_type: 'dinov2' is not supported"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ModelLoadError, match=re.escape(error)):
            hf_model_config(tmp_path)


def request(name: str, asked: VisionPrompt, **sampling: Any) -> Submit:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, **sampling})
    return Submit(name, tuple(asked.tokens), params, TokenRules(), images=asked.images)  # type: ignore[arg-type]


def answers(made: TinyEngine, *asked: VisionPrompt, **sampling: Any) -> list[list[int]]:
    names = [f"{number} {len(made.finished)}" for number in range(len(asked))]
    for name, each in zip(names, asked, strict=True):
        made.core.submit(request(name, each, **sampling))
    made.run()
    assert [made.finished[name].error for name in names] == [None] * len(names)
    return [list(made.finished[name].samples[0].token_ids) for name in names]


@pytest.mark.parametrize("budget", [2_048, 7, 6, 5])
def test_chunks_may_end_anywhere_in_an_image(case: Case, budget: int) -> None:
    made = case.engine(budget=budget)
    assert answers(made, *PROMPTS) == [tokens for tokens, _ in case.expected]


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_hit_may_end_at_the_end_of_a_row_and_another_image_is_none(case: Case, block_size: int) -> None:
    made = case.engine(block_size=block_size, num_blocks=256)
    assert answers(made, PROMPTS[0]) == [case.expected[0][0]]
    before = made.core.stats().prompt_tokens
    assert answers(made, PROMPTS[0]) == [case.expected[0][0]]
    assert made.core.stats().prompt_tokens - before < block_size + 2
    for other in (
        prompt([5, 9, 11, 6], picture(3, 5, 7), [7, 30, 8]),
        prompt([5, 9, 11, 6], Picture(PROMPTS[0].pictures[0].pixels[:16]), [7, 30, 8]),  # fewer rows
    ):
        assert answers(made, other) == [case.answer(other)]
    cut = VisionPrompt(PROMPTS[0].tokens[: PROMPTS[0].images[0].end], PROMPTS[0].images, PROMPTS[0].pictures)
    assert answers(made, cut) == [case.answer(cut)]


def test_preempted_requests_go_on_as_if_nothing_was(case: Case) -> None:
    made = case.engine(num_blocks=16)
    others = [prompt([seed + 3], picture(2, 4, seed), [seed + 5]) for seed in range(4)]
    assert answers(made, *others, max_tokens=12) == [case.answer(other, 12) for other in others]
    assert made.core.stats().preemptions > 0


def test_samples_and_beams_share_the_image(case: Case) -> None:
    found = []
    for made in (case.engine(), case.engine(block_size=3)):
        made.core.submit(Submit("beams", *_asked(), images=PROMPTS[0].images, beam=BeamRules(2)))
        made.run()
        found.append([sample.token_ids for sample in made.finished["beams"].samples])
    assert found[0] == found[1]


def _asked() -> tuple[Any, SamplingParams, TokenRules]:
    return tuple(PROMPTS[0].tokens), SamplingParams(temperature=0.0, max_tokens=COUNT, n=2), TokenRules()


def test_an_image_without_the_ends_of_its_rows_is_refused(case: Case) -> None:
    plain = prompt_of([5], picture(3, 5), [7])
    with pytest.raises(InvalidRequest, match="cannot be placed"):
        case.engine().core.submit(request("plain", plain))


@pytest.mark.parametrize(
    ("where", "value", "error"),
    [
        ("image_token_index", 97, "image_token_index: is 97, which is no token"),
        ("projector_hidden_act", "relu", "projector_hidden_act: 'relu' is not supported"),
        ("vision_feature_layer", [-1, -2], "vision_feature_layer: only -1 is supported"),
        ("vision_config.model_type", "clip_vision_model", "model_type: 'clip_vision_model' is not supported"),
        ("vision_config.hidden_act", "relu", "hidden_act: 'relu' is not supported"),
        ("vision_config.num_channels", 1, "num_channels: only 3 is supported"),
        ("vision_config.num_attention_heads", 3, "num_attention_heads: hidden size 32 is not 3 heads"),
        ("vision_config.rope_parameters", {"rope_type": "yarn"}, "rope_parameters: only axial positions"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    case: Case, tmp_path: Path, where: str, value: object, error: str
) -> None:
    write_changed(case.folder, tmp_path, where, value)
    with pytest.raises(ModelLoadError, match=re.escape(error)):
        hf_model_config(tmp_path)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"preprocessor_config.json": {"resample": 2}}, "resample: is 2, only 3 is supported"),
        ({"preprocessor_config.json": {"size": {"longest_edge": 7}}}, "size.longest_edge: must be a number of pixels"),
        ({"processor_config.json": {"patch_size": 14}}, "patch_size: is 14, and the tower's 4"),
        ({"processor_config.json": {"image_break_token": "<b>"}}, "<b>: is no token of the vocabulary"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": {"content": "[IMG_BREAK]"}}}}, "[IMG_BREAK]: is no"),
        (
            {"tokenizer_config.json": {}, "tokenizer.json": {"added_tokens": [1, {"id": 2}]}},
            "tokenizer.json: [IMG_BREAK]",
        ),
    ],
)
def test_images_that_are_prepared_otherwise_are_refused(
    case: Case, tmp_path: Path, files: dict[str, dict[str, Any]], error: str
) -> None:
    shutil.copy(case.folder / "config.json", tmp_path)
    write_tokens(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=re.escape(error)):
        hf_model_config(tmp_path)


def test_the_longest_side_can_be_lowered(case: Case) -> None:
    vision = hf_model_config(case.folder).vision
    assert vision is not None
    assert (vision.grid.row_ends, vision.grid.max_tokens) == (ROW_ENDS, 8 * 9)
    limits = resolve_images(vision, None, {"longest_edge": 36}, 1_024, 16)
    assert limits is not None
    assert limits.grid.max_tokens == 5 * 6
    least = resolve_images(vision, None, {"longest_edge": 8}, 1_024, 16)
    assert least is not None
    assert fitting_size(300, 200, least.grid) == (16, 16)  # as many tokens as a key needs
    assert (least.grid.max_tokens, least.grid.max_pixels) == (2 * 3, 16 * 16)
    for value in (7, 65):
        with pytest.raises(ConfigError, match="choose 8 to 64"):
            resolve_images(vision, None, {"longest_edge": value}, 1_024, 16)
