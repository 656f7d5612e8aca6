"""Qwen2-VL to Qwen3.5, GLM-4.1V and GLM-4.5V with images against transformers: towers, positions of three axes, cut
prompts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from family_bench import load_bench
from interpreter import HAS_TRITON
from quire.runtime.layers.vision import cut_patches
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.hf.config import hf_model_config
from quire.runtime.sampling.make import make_sampler
from quire.types.errors import ModelLoadError
from quire.types.step import Chunk
from tiny_models import DEVICE, Bench, engine_config
from vision_models import VISION, VisionPrompt, check_logits, picture, prompt_of, vision_model, vision_reference

pytest.importorskip("transformers")
FAMILIES = ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe"]
COUNT = 4
PROMPTS = [
    prompt_of([5, 9, 11], picture(3, 5), [7, 30, 8]),
    prompt_of([4, 4, 17, 3, 8]),
    prompt_of([6], picture(2, 2, 1), [12, 40], picture(4, 3, 2), [13]),
]


class Case:
    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.folder, self.model = family, folder, vision_model(folder, family)
        self.expected = [vision_reference(self.model, prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def add(bench: Bench, row: int, prompt: VisionPrompt) -> None:
    bench.add(row, prompt.tokens, images=prompt.images)


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (3, 3), (5, 7), (6, 2)])
def test_the_tower_gives_what_that_of_transformers_gives(case: Case, rows: int, columns: int) -> None:
    bench, shown = load_bench(case.folder), picture(rows, columns)
    tower = bench.worker._runner._model.tower
    assert tower is not None
    with torch.no_grad():
        patches = cut_patches(shown.pixels, VISION, torch.float32)
        visual: Any = case.model.get_submodule("model.visual")
        wanted = visual(patches, grid_thw=torch.tensor([[1, 2 * rows, 2 * columns]]))
        found = tower(shown.pixels.to(DEVICE))
    wanted = torch.cat((getattr(wanted, "pooler_output", wanted), *getattr(wanted, "deepstack_features", ())), dim=1)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("attention", "cut"), [("reference", 0), ("gather", 9), ("auto", 0), ("auto", 9)])
def test_logits_are_those_of_transformers_with_and_without_images(case: Case, attention: str, cut: int) -> None:
    check_logits(load_bench(case.folder, attention=attention), PROMPTS, case.expected, cut)  # inside the image


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
def test_captured_steps_know_where_tokens_are(case: Case) -> None:
    if case.family != "qwen2_5_vl" and DEVICE == "cpu":
        pytest.skip("its decoder is the same, and Triton's interpreter is slow")
    sampler = make_sampler(2, 97, torch.device(DEVICE), "triton", 64)
    checkpoint, config = open_checkpoint(files_at(case.folder)), engine_config(rows=2, max_len=40)
    bench = Bench(checkpoint, config, attention="triton", sampler=sampler)
    for row, prompt in enumerate(PROMPTS[:2]):
        add(bench, row, prompt)
    count = len(PROMPTS[0].tokens)
    bench.run(chunks=[Chunk(0, 0, 9), Chunk(1, 0, 5, (1,))])  # cut inside the image, so not captured
    bench.run(chunks=[Chunk(0, 9, count - 10)])
    bench.run(chunks=[Chunk(0, count - 1, 1, (0,))])  # text behind it, which is
    for _ in range(2):
        bench.run(decode=[0, 1])
    for row in (0, 1):
        assert bench.tokens[row][len(PROMPTS[row].tokens) :] == case.expected[row][0][:3]


def test_an_image_is_encoded_once_while_its_vectors_are_kept(case: Case) -> None:
    bench = load_bench(case.folder)
    images = bench.worker._images
    assert images is not None
    images._capacity = 15
    for row in (0, 1):
        add(bench, row, PROMPTS[0])
        for start in (0, 6, 9):
            bench.run(chunks=[Chunk(row, start, 3 if start else 6)])
    assert images.num_encoded == 1
    add(bench, 2, PROMPTS[2])
    bench.run(chunks=[Chunk(2, 0, len(PROMPTS[2].tokens), (2,))])
    assert images.num_encoded == 3
    assert sum(map(len, images._vectors.values())) <= 15
    bench.worker.check()


def test_a_row_that_had_images_is_a_plain_one_for_the_next_text(case: Case) -> None:
    bench = load_bench(case.folder)
    add(bench, 0, PROMPTS[0])
    bench.run(chunks=[Chunk(0, 0, 8)])
    bench.release(0)
    add(bench, 0, PROMPTS[1])
    bench.run(chunks=[Chunk(0, 0, 5, (0,))])
    for _ in range(COUNT - 1):
        bench.run(decode=[0])
    assert bench.tokens[0][5:] == case.expected[1][0]
    bench.worker.check()


def test_an_image_with_too_few_pixels_fails_its_own_row(case: Case) -> None:
    bench = load_bench(case.folder)
    broken = replace(PROMPTS[0].images[0], pixels=b"\0" * 10)
    bench.add(0, PROMPTS[0].tokens, images=[broken])
    add(bench, 1, PROMPTS[1])
    bench.run(chunks=[Chunk(0, 0, len(PROMPTS[0].tokens), (0,)), Chunk(1, 0, 5, (1,))])
    assert bench.worker._failed == {0}
    assert bench.tokens[1][5:] == case.expected[1][0][:1]


def test_how_images_are_prepared_is_read_where_transformers_reads_it(case: Case, tmp_path: Path) -> None:
    """An object of processor_config.json counts before preprocessor_config.json, which older versions write."""
    shutil.copy(case.folder / "config.json", tmp_path)
    unit, frames = VISION.patch * VISION.merge, 2 if case.family.startswith("glm4v") else 1  # for which GLM's sizes are
    old, new = ({"size": {"shortest_edge": 4 * unit**2, "longest_edge": most * unit**2}} for most in (50, 60))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2VLProcessor"}))
    vision = hf_model_config(tmp_path).vision
    assert vision is not None
    assert vision.grid.max_pixels == 50 * unit**2 // frames
    nested = {"image_processor": new | {"image_mean": [0.1, 0.2, 0.3]}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    vision = hf_model_config(tmp_path).vision
    assert vision is not None
    assert (vision.grid.max_pixels, vision.mean) == (60 * unit**2 // frames, (0.1, 0.2, 0.3))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"do_rescale": False}}))
    with pytest.raises(ModelLoadError, match=r"processor_config.json: image_processor.do_rescale"):
        hf_model_config(tmp_path)
    for size in (5, {"height": 224, "width": 224}):
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"size": size}}))
        with pytest.raises(ModelLoadError, match=r"image_processor.size: may hold shortest_edge and longest_edge"):
            hf_model_config(tmp_path)
