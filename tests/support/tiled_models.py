"""Tiny random models that see pictures in tiles, as transformers makes them, and prompts with pictures for both."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from family_bench import load_bench, randomize
from quire.config.vision import ImageGrid, ImageLimits, Vision
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.serving.vision.image_reader import ImageReader, place_images
from quire.types.images import PromptImage, shown_together
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from tiny_models import DEVICE
from vision_models import IMAGE
from worker_executor import TinyEngine

COUNT = 5  # tokens of an answer
SIZES = ((30, 50), (90, 20), (25, 24), (7, 9), (100, 101), (3, 60), (24, 24))  # of pictures: height, width
Inputs = Callable[[Vision, Sequence[PromptImage], int], dict[str, Any]]


@dataclass(frozen=True)
class Asked:
    """A prompt with its images in their places."""

    tokens: tuple[int, ...]
    images: tuple[PromptImage, ...]


class TiledCase:
    """A model that transformers has saved. `side`: pixels per side of the tower's images; `inputs` makes what the model
    of transformers takes besides tokens, from the images of a prompt."""

    def __init__(self, folder: Path, config: Any, side: int, inputs: Inputs) -> None:
        import transformers

        config._attn_implementation = "eager"
        self.folder, self.side, self._inputs = folder, side, inputs
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        self.model: Any = randomize(model)
        self.model.save_pretrained(folder)

    @cached_property
    def vision(self) -> Vision:
        found = open_checkpoint(files_at(self.folder)).config.vision
        assert found is not None
        return found

    @property
    def grid(self) -> ImageGrid:
        return self.vision.grid

    @property
    def limits(self) -> ImageLimits:
        return ImageLimits(self.grid, max_images=4, max_kept_tokens=0)

    def engine(self, **settings: Any) -> TinyEngine:
        """Blocks divide the chunks that the model attends within, if there are any."""
        checkpoint = open_checkpoint(files_at(self.folder))
        if checkpoint.config.has_chunks and "block_size" in settings:
            sizes = (size for size in checkpoint.config.windows if size is not None)
            settings["block_size"] = gcd(settings["block_size"], *sizes)
        return TinyEngine(checkpoint, None, **{"images": self.limits, "max_len": 512, "num_blocks": 256, **settings})

    def asked(self, *parts: Any) -> Asked:
        """A prompt of texts (token ids) and pictures (PIL)."""
        reader, tokens, images = ImageReader(self.limits), [], []
        for part in parts:
            if isinstance(part, list):
                tokens += part
            else:
                images.append(reader.prepare("image", part))
                tokens += [IMAGE] * (len(images[-1].tiles) + 1)
        return Asked(*place_images("prompt", tokens, shown_together(images), self.grid))

    def prompts(self, seed: int) -> list[Asked]:
        """Prompts with one picture, with none, and with several."""
        rng = random.Random(seed)

        def text() -> list[int]:
            return rng.choices(range(3, 80), k=rng.randrange(1, 9))

        def shown() -> Any:
            return noise(*rng.choice(SIZES), rng.randrange(100))

        one, several = self.asked(text(), shown(), text()), self.asked(shown(), text(), shown(), shown(), text())
        return [one, self.asked(text()), several]

    def inputs(self, asked: Asked) -> dict[str, Any]:
        return self._inputs(self.vision, asked.images, self.side) if asked.images else {}

    @torch.no_grad()
    def expected(self, asked: Asked, count: int = COUNT) -> list[int]:
        """transformers' greedy tokens."""
        ids = torch.tensor([asked.tokens])
        found = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **self.inputs(asked), max_new_tokens=count,
            min_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        answer: list[int] = found[0, len(asked.tokens) :].tolist()
        return answer


def noise(height: int, width: int, seed: int = 0) -> Any:
    from PIL import Image

    pixels = np.random.default_rng((height, width, seed)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def answers(made: TinyEngine, *asked: Asked, count: int = COUNT) -> list[list[int]]:
    names = [f"{number} {len(made.finished)}" for number in range(len(asked))]
    params = SamplingParams(temperature=0.0, max_tokens=count)
    for name, each in zip(names, asked, strict=True):
        made.core.submit(Submit(name, each.tokens, params, TokenRules(), images=each.images))
    made.run()
    errors = [error for name in names if (error := made.finished[name].error)]
    assert not errors, errors
    return [list(made.finished[name].samples[0].token_ids) for name in names]


def pixels_of(image: PromptImage, vision: Vision) -> Tensor:  # [tiles, side, side, 3], uint8
    side = vision.grid.tile_side
    return torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(-1, side, side, 3)


def normalized(image: PromptImage, vision: Vision, side: int) -> Tensor:  # [tiles, 3, side, side]
    """The tiles of an image as models of transformers take them: with the pixels that make no whole patch."""
    values = pixels_of(image, vision).float() / 255
    found = (values - torch.tensor(vision.mean)) / torch.tensor(vision.std)
    rest = side - vision.grid.tile_side
    return torch.nn.functional.pad(found.permute(0, 3, 1, 2), (0, rest, 0, rest))


def check_towers(case: TiledCase, tower: Any) -> None:
    """Compare the vectors of pictures of all sizes with those of transformers."""
    for size in SIZES:
        asked = case.asked(noise(*size))
        with torch.no_grad():
            wanted = case.model.model.get_image_features(**case.inputs(asked)).pooler_output
            tiles = [tower(pixels_of(image, case.vision).to(DEVICE)) for image in asked.images]
        joined = [tower.join(each, image.size) for each, image in zip(tiles, asked.images, strict=True)]
        found, wanted = torch.cat(joined).cpu(), wanted if isinstance(wanted, Tensor) else torch.cat(list(wanted))
        assert len(found) == sum(image.num_placeholders for image in asked.images)
        scaled = wanted.reshape(found.shape) * case.vision.vector_scale
        torch.testing.assert_close(found, scaled, rtol=1e-4, atol=1e-4)


def check_answers(case: TiledCase, seed: int, **settings: Any) -> None:
    """Compare answers with those of transformers: in chunks that end within pictures, and again from the cache."""
    asked = case.prompts(seed)
    expected = [case.expected(each) for each in asked]
    made = case.engine(**settings)
    assert answers(made, *asked) == expected
    before = made.core.stats().prompt_tokens
    assert answers(made, *asked) == expected
    computed, block = made.core.stats().prompt_tokens - before, made.config.cache.block_size
    assert computed <= len(asked) * (block + 2), "the pictures were not found in the cache"
    others = [case.asked(list(each.tokens[: each.images[0].start]), noise(31, 49, seed)) for each in asked[::2]]
    assert answers(made, *others) == [case.expected(each) for each in others]


class ComparedWithTransformers:
    """Tests of a family. The module that takes them has a fixture `case`."""

    def test_the_tower_gives_what_that_of_transformers_gives(self, case: TiledCase) -> None:
        check_towers(case, load_bench(case.folder).worker._runner._model.tower)

    @pytest.mark.parametrize(
        ("seed", "settings"), [(1, {}), (2, {"budget": 7, "block_size": 3}), (3, {"tensor": 2, "budget": 33})]
    )
    def test_answers_are_those_of_transformers(self, case: TiledCase, seed: int, settings: dict[str, Any]) -> None:
        check_answers(case, seed, **settings)
